"""``ChatPrompt``: OpenAI's messages become what templates expect, and what they cannot express is refused."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache import ChatPrompt
from trt_kvcache.errors import ConfigError

USER = {"role": "user", "content": "hi"}


def test_messages_are_copied():
    messages = [dict(USER)]
    prompt = ChatPrompt(messages)
    messages[0]["content"] = "other"
    messages.append(USER)
    assert prompt.messages == (USER,)


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatPrompt([{"role": "user", "content": parts, "name": "Al"}]).messages == ({"role": "user", "content": "ab", "name": "Al"},)


def test_fields_without_a_value_are_not_there():
    prompt = ChatPrompt([{"role": "assistant", "content": None, "tool_calls": None, "refusal": None}])
    assert prompt.messages == ({"role": "assistant", "content": None},)


def test_arguments_of_tool_calls_become_objects():
    function = {"name": "clock", "arguments": '{"zone": "UTC"}'}
    calls = [{"id": "1", "type": "function", "function": function}, {"function": {"name": "f", "arguments": "not json"}}]
    (message,) = ChatPrompt([{"role": "assistant", "content": None, "tool_calls": calls}]).messages
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"zone": "UTC"}, "not json"]
    assert function["arguments"] == '{"zone": "UTC"}'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"messages": []}, 'messages: expected a list of {"role": ..., "content": ...}, at least one, got [].'),
        ({"messages": "hi"}, 'messages: expected a list of {"role": ..., "content": ...}, at least one, got \'hi\'.'),
        ({"messages": USER}, f'messages: expected a list of {{"role": ..., "content": ...}}, at least one, got {USER}.'),
        ({"messages": [USER, "hi"]}, 'messages[1]: expected {"role": ..., "content": ...}, got \'hi\'.'),
        ({"messages": [{"role": 3, "content": ""}]}, "messages[0]: expected a \"role\" such as \"user\", got {'role': 3, 'content': ''}."),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a text, got 5."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: expected text, got a part of type 'image_url'. The text decoder alone runs, without image input.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "text": "b"}]}]},
            "messages[0].content[1]: expected text, got a part of type 'input_audio'. The text decoder alone runs, without audio input.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal"}]}]},
            'messages[0].content[0]: expected {"type": "text", "text": ...}, got {\'type\': \'refusal\'}. Only text is supported.',
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls: expected a list of tool calls, got 3."),
        ({"messages": [USER], "tools": "clock"}, "tools: expected a list of JSON descriptions of functions, got 'clock'."),
        ({"messages": [USER], "template_args": [1]}, "template_args: expected a mapping of names to values, got [1]."),
    ],
)
def test_what_is_no_conversation_is_refused(arguments, text):
    with pytest.raises(ConfigError) as error:
        ChatPrompt(**arguments)
    assert str(error.value) == text


def test_an_error_does_not_show_all_of_a_long_value():
    with pytest.raises(ConfigError) as error:
        ChatPrompt([np.zeros(100).tolist()])
    assert len(str(error.value)) < 140
