"""Answers taken apart into content and calls of tools: whole, and cut at every place."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest

from trt_kvcache.server.http.tool_formats import ToolCall, tool_format
from trt_kvcache.server.http.tool_stream import ToolStream

LOOK = '{"name": "look", "arguments": {"at": "x"}}'
CALL = ToolCall("look", '{"at": "x"}')
TYPES = {"look": {"at": {"type": "string"}, "n": {"type": "integer"}}}


def taken(name, text, cuts=(), template="", **options):
    """Return the parts of a text that comes in pieces, texts that follow each other as one."""
    stream = ToolStream(tool_format(name, template), TYPES, **options)
    places = [0, *cuts, len(text)]
    parts = [part for start, end in pairwise(places) for part in stream.push(text[start:end])] + stream.end()
    found = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


CASES = {
    "no call": ("hermes", " Hello <b> \n", [" Hello <b> \n"]),
    "one call": ("hermes", f"<tool_call>\n{LOOK}\n</tool_call>", [CALL]),
    "content and two calls": ("hermes", f"Wait.\n\n<tool_call>{LOOK}</tool_call>\n<tool_call>{LOOK}</tool_call>\n", ["Wait.", CALL, CALL]),
    "text behind a call": ("hermes", f"<tool_call>{LOOK}</tool_call>\nDone.", [CALL, "\nDone."]),
    "the beginning of a tag": ("hermes", "a <tool_c", ["a <tool_c"]),
    "no JSON": ("hermes", "<tool_call>look</tool_call>", ["<tool_call>look</tool_call>"]),
    "broken JSON": ("hermes", '<tool_call>{"name": look}</tool_call>', ['<tool_call>{"name": look}</tool_call>']),
    "cut off": ("hermes", '<tool_call>{"name": "look", "arg', ['<tool_call>{"name": "look", "arg']),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    "no end tag": ("hermes", f"<tool_call>{LOOK}", [CALL]),
    "a broken call before one": ("hermes", f"<tool_call>x <tool_call>{LOOK}</tool_call>", ["<tool_call>x", CALL]),
    "the tag in a value": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"at": "</tool_call>\\"}{"}}</tool_call>',
        [ToolCall("look", '{"at": "</tool_call>\\"}{"}')],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "look"}</tool_call>', [ToolCall("look", "{}")]),
    "arguments as a text": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": "{\\"at\\": 1}"}</tool_call>',
        [ToolCall("look", '{"at": 1}')],
    ),
    "not a number": ("hermes", '<tool_call>{"name": "a", "arguments": {"n": NaN}}</tool_call>', None),
    "too large": ("hermes", '<tool_call>{"name": "a", "arguments": {"n": 1e999}}</tool_call>', None),
    "deep": ("hermes", '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 40 + "1" + "}" * 41 + "</tool_call>", "call"),
    "tags": (
        "hermes",
        "<tool_call>\n<function=look>\n<parameter=at>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("look", '{"at": "12", "n": 12}')],
    ),
    "broken tags": ("hermes", "<tool_call><function=look><parameter=at>1</function></tool_call>", None),
    "bare": ("llama3_json", '{"name": "look", "parameters": {"at": "x"}}', [CALL]),
    "several bare": (
        "llama3_json",
        '\n{"name": "look", "parameters": {"at": "x"}}; {"name": "look", "parameters": {"at": "x"}}',
        [CALL, CALL],
    ),
    "behind the tag": ("llama3_json", '<|python_tag|>{"name": "look", "parameters": {"at": "x"}}', [CALL]),
    "a JSON answer": ("llama3_json", '{"name": "Bob"} is it', ['{"name": "Bob"} is it']),
    "an object in a text": ("llama3_json", 'Use {"name": "a", "parameters": {}}', ['Use {"name": "a", "parameters": {}}']),
    "a list": ("mistral", f"[TOOL_CALLS] [{LOOK}, {LOOK}]", [CALL, CALL]),
    "content before a list": ("mistral", f"Yes [TOOL_CALLS][{LOOK}]", ["Yes", CALL]),
    "names": ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "x"}[TOOL_CALLS]look{"at": "x"}', [CALL, CALL]),
    "ids": ("mistral", '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"at": "x"}', [CALL]),
    "a broken list": ("mistral", "[TOOL_CALLS] [1, 2]", ["[TOOL_CALLS] [1, 2]"]),
    "an empty list": ("mistral", "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_taken_apart(case):
    name, text, expected = CASES[case]
    found = taken(name, text)
    if expected == "call":
        assert [type(part) for part in found] == [ToolCall]
    else:
        assert found == (expected or [text])


@pytest.mark.parametrize("case", CASES)
def test_cuts_change_nothing(case):
    name, text, _ = CASES[case]
    whole = taken(name, text)
    for place in range(1, len(text)):
        assert taken(name, text, [place]) == whole
    assert taken(name, text, range(1, len(text))) == whole


def test_content_before_a_call_does_not_wait():
    stream = ToolStream(tool_format("hermes", ""))
    assert stream.push("Let me look.") == ["Let me look."]
    assert stream.push(" <tool_call") == []
    assert stream.push("s>") == [" <tool_calls>"]


def test_only_one_call():
    assert taken("hermes", f"<tool_call>{LOOK}</tool_call>" * 3, only_one=True) == [CALL]
    assert taken("mistral", f"[TOOL_CALLS] [{LOOK}, {LOOK}]", only_one=True) == [CALL]


def test_a_special_token_is_no_content():
    found = taken("llama3_json", "<|python_tag|>look.call()", range(1, 20), hidden=["<|python_tag|>"])
    assert found == ["look.call()"]


def test_lone_surrogates_can_be_sent():
    [call] = taken("hermes", '<tool_call>{"name": "a", "arguments": {"b": "\\ud800é"}}</tool_call>')
    call.arguments.encode()
    assert json.loads(call.arguments) == {"b": "\ud800é"}


@pytest.mark.parametrize("text", ["<tool_call>" * 1000, "[TOOL_CALLS]" * 1000, f"<tool_call>{LOOK}</tool_call>" * 1000, '{"a":' * 4000])
def test_long_answers_take_their_length(text):
    for name in ("hermes", "mistral", "llama3_json"):
        assert taken(name, text, range(3, len(text), 3))


@pytest.mark.parametrize("text", ['<tool_call>{"a": ' * 3000, '<tool_call>{"a": ' * 3000 + "}" * 3000, "<tool_call><function=a>" * 3000])
def test_calls_that_never_end_are_content(text):
    before = time.monotonic()
    assert taken("hermes", text) == [text.rstrip() + text[len(text.rstrip()) :]]
    assert time.monotonic() - before < 20


def test_very_deep_arguments_are_no_failure():
    text = '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901 + "</tool_call>"
    assert len(taken("hermes", text)) == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'<tool_call>\\n'", "hermes"),
        ("{{- '<|python_tag|>' }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("[TOOL_CALLS] [", "mistral"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_the_form(template, name):
    found = tool_format(None, template)
    assert (found and found.name) == name


def test_a_name_goes_before_the_template():
    assert tool_format("mistral", "<tool_call>").name == "mistral"
