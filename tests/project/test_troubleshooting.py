"""Texts that docs/troubleshooting.md quotes: each is part of a message of the code."""

import ast
import re

import pytest

from tests.paths import ROOT
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME

PAGE = ROOT / "docs" / "troubleshooting.md"

#: What TensorRT says, as docs/gpu.md quotes it.
OF_TENSORRT = {"Supported compute capabilities: ..."}

#: The name of the plugin and of its method, which are put together when it raises.
OF_PLUGIN = {f"{PLUGIN_NAME}.enqueue: ..."}


def quoted(page):
    """Return the texts in the first cells of tables, in headings and at the beginning of lines; pages write ... for what varies."""
    places = re.findall(r"^\| (`.*?) \| |^### (`.*)$|^(?:- )?(`.*?`)(?::| \(a | takes)", page, re.MULTILINE)
    return [text for place in places for text in re.findall(r"`([^`]+)`", "".join(place))]


def literals():
    """Return every string of the package, cut where values are filled in: a list of pieces each."""
    found = []
    for path in sorted((ROOT / "trt_kvcache").rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, (ast.JoinedStr, ast.Constant))]
        inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                pieces = "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append(pieces.replace("`", "").split("\0"))
            elif isinstance(node.value, str) and id(node) not in inside:
                found.append([node.value.replace("`", "")])
    return found


def is_in(text, pieces):
    """Return whether a text can be a part of a message: filled-in values count, if the message's own words are more than half of it."""
    for first, piece in enumerate(pieces):
        if text in piece:
            return True
        tails = (piece[start:] for start in range(len(piece) + 1))
        for tail in (tail for tail in tails if text.startswith(tail)):
            rest, own = text[len(tail) :], len(tail)
            for after in pieces[first + 1 :]:
                if after and after in rest:
                    rest, own = rest.partition(after)[2], own + len(after)
                else:
                    head = max((size for size in range(len(after) + 1) if rest.endswith(after[:size])), default=0)
                    own, rest = own + head, ""
                    break
            if own > len(text) / 2:
                return True
    return False


@pytest.fixture(scope="module")
def is_said():
    """Return a function that tells whether a text is part of a message."""
    messages = literals()
    whole = "\n".join(piece for pieces in messages for piece in pieces)
    return lambda text: text in whole or any(is_in(text, pieces) for pieces in messages if len(pieces) > 1)


@pytest.mark.parametrize("text", sorted(set(quoted(PAGE.read_text(encoding="utf-8"))) - OF_TENSORRT - OF_PLUGIN))
def test_a_quoted_text_is_in_the_code(text, is_said):
    assert [part for part in (part.strip(" :.`") for part in text.split("...")) if part and not is_said(part)] == []


@pytest.mark.parametrize("text", ["it excluded all tokens", "slots never wrap", "Bind both to one address", "attention: got a kettle"])
def test_a_text_that_no_code_has_is_found(text, is_said):
    assert not is_said(text)


def test_the_quoted_texts_are_found():
    page = "| `one ...`, `two` | do |\n### `three` and `four`\n- `five`: six `seven`\ntext `eight`\n"
    assert quoted(page) == ["one ...", "two", "three", "four", "five"]
    assert len(quoted(PAGE.read_text(encoding="utf-8"))) > 50


def test_what_tensorrt_says_is_quoted_from_a_run():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert all(text.strip(" .") in page for text in OF_TENSORRT)
