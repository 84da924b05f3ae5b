"""Files of prompts: one prompt a line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.cli.prompt_file import FilePrompt, read_prompt_file
from trt_kvcache.errors import ConfigError


def text_file(tmp_path: Path, content: bytes | str) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def json_file(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_each_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    file = text_file(tmp_path, "one\ntwo words\n")
    assert read_prompt_file(file) == [FilePrompt(f"{file}:1", "one"), FilePrompt(f"{file}:2", "two words")]


def test_lines_of_white_space_are_skipped_and_counted(tmp_path: Path) -> None:
    file = text_file(tmp_path, "\n \t\none\n")
    assert read_prompt_file(file) == [FilePrompt(f"{file}:3", "one")]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert read_prompt_file(text_file(tmp_path, "\ufeffone"))[0].prompt == "one"


def test_json_lines_hold_texts_and_token_ids(tmp_path: Path) -> None:
    prompts = read_prompt_file(json_file(tmp_path, '"one"', "[1, 2]"))
    assert [prompt.prompt for prompt in prompts] == ["one", [1, 2]]


def test_json_objects_hold_sampling_options(tmp_path: Path) -> None:
    line = json.dumps({"prompt": [1, 2], "temperature": 0.5, "stop": ["."]})
    (prompt,) = read_prompt_file(json_file(tmp_path, line))
    assert (prompt.prompt, prompt.options) == ([1, 2], {"temperature": 0.5, "stop": ["."]})


def test_a_json_object_may_hold_a_conversation(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hello"}]
    (prompt,) = read_prompt_file(json_file(tmp_path, json.dumps({"messages": said, "seed": 3})))
    assert (prompt.messages, prompt.prompt, prompt.options) == (said, "", {"seed": 3})


def test_other_fields_are_kept(tmp_path: Path) -> None:
    (prompt,) = read_prompt_file(json_file(tmp_path, '{"custom_id": "a-1", "prompt": "one", "metadata": {"x": [1]}, "top_k": 2}'))
    assert (prompt.metadata, prompt.options) == ({"custom_id": "a-1", "metadata": {"x": [1]}}, {"top_k": 2})


@pytest.mark.parametrize(
    ("content", "prompts"),
    [("one\n{two}\n", ["one", "{two}"]), ('{"prompt": "one"}\n\n{"prompt": [2]}\n', ["one", [2]])],
    ids=["text", "JSON"],
)
def test_stdin_is_json_if_every_line_is_an_object(monkeypatch: pytest.MonkeyPatch, content: str, prompts: list[object]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    found = read_prompt_file(Path("-"))
    assert [prompt.prompt for prompt in found] == prompts
    assert found[0].place == "stdin:1"


def test_a_text_file_that_looks_like_json_is_text(tmp_path: Path) -> None:
    assert read_prompt_file(text_file(tmp_path, '"one"'))[0].prompt == '"one"'


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    with raises(ConfigError, "prompts.txt", expected="at least one prompt", got="none"):
        read_prompt_file(text_file(tmp_path, content))


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "prompts.txt", expected="UTF-8", got="byte 0xff at 2"):
        read_prompt_file(text_file(tmp_path, b"ab\xff"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected JSON, got a syntax error: Expecting property name"),
        ("[" * 9**5, "expected JSON, got values nested more than 100 deep."),
        ("[" + "9" * 5000 + "]", "expected JSON, got an integer of more than 4300 digits."),
        ('"\\ud800"', "expected JSON in UTF-8, got an error: 'utf-8' codec can't encode"),
        ("5", 'expected a text, a list of token ids, or an object with one as "prompt" or with "messages", got 5.'),
        ('{"text": "a"}', 'expected a text, a list of token ids, or an object with one as "prompt" or with "messages", got {"text": "a"}.'),
        ('{"prompt": "a", "messages": []}', "expected a text, a list of token ids,"),
        ('{"messages": []}', 'messages: expected a list of objects with "role" and "content", oldest first, got [].'),
        ('{"messages": ["a"]}', "messages: expected a list of objects"),
        ('{"prompt": "a", "index": 3}', "index: expected another name; the answer has a field of this name."),
        ("null", 'expected a text, a list of token ids, or an object with one as "prompt" or with "messages", got null.'),
    ],
    ids=[
        *("syntax", "too deep", "too many digits", "surrogate", "number", "no prompt", "both", "no messages", "no message"),
        *("field of answers", "null"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    file = json_file(tmp_path, '"fine"', line)
    with pytest.raises(ConfigError) as raised:
        read_prompt_file(file)
    assert str(raised.value).startswith(f"{file}:2: {message}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompt_file(tmp_path / "none.txt")
