"""``/v1/chat/completions`` through the client of OpenAI: templates, tools, streams, next turns."""

from __future__ import annotations

import json

import openai
import pytest

from tests.checkpoint.tokenizer_folders import EOS, byte_level_folder
from tests.helpers.models import write_model
from tests.server.engines import read_all, source
from tests.server.http.running import NAME, Running, chat_model, serving
from trt_kvcache import ChatPrompt

HELLO = [{"role": "user", "content": "Alice was"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with source(1).replace(chat_model(tmp_path_factory.mktemp("alone") / "tiny"))() as one:
        yield one


@pytest.fixture
def client(chatting: Running):
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_conversation_is_answered_as_by_the_session(client, session):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_completion_tokens=9, temperature=0.8, seed=2)
    tokens, text = read_all(session, ChatPrompt(HELLO), {"max_new_tokens": 9, "temperature": 0.8, "seed": 2})
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", text)
    assert (answer.object, answer.usage.completion_tokens) == ("chat.completion", len(tokens))


def test_without_a_limit_an_answer_may_fill_its_slot(client, chatting):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == chatting.engine.config.context_length + 1
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_with_usage(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 9, "temperature": 0.8, "seed": 2, "n": 2}
    whole = client.chat.completions.create(**asked)
    *parts, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for choice in whole.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_helper_of_the_client_reads_a_stream(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 40, "stop": "b"}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == client.chat.completions.create(**asked).choices[0].message.content


def test_log_probabilities(client, session):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2)
    events = list(session.generate(ChatPrompt(HELLO), max_new_tokens=3, logprobs=2))
    content = answer.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx([event.logprob for event in events], rel=1e-4)
    assert [one.token for one in content] == [session.tokenizer.decode([event.token]) for event in events]
    assert all(bytes(one.bytes).decode() == one.token for one in content)
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_bytes_of_parts_of_a_character(tmp_path):
    folder = byte_level_folder(write_model(tmp_path / "bytes", vocab_size=264, eos_token_id=260))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with serving(1, folder=folder, max_sequence_length=64) as server, server.client() as client:
        asked = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "response_format": {"type": "regex", "regex": "é n"}}
        choice = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    content = [one for one in choice["logprobs"]["content"] if one["token"] != EOS]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == choice["message"]["content"] == "é n"
    assert [one["token"][:9] for one in content] == ["token_id:", "token_id:", " ", "n"]


def test_the_next_turn_runs_only_what_is_new(client, chatting):
    messages = [{"role": "user", "content": "Tell me of the rabbit."}]
    first = client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, stop="\n")
    ran = chatting.stats().session.prefill_tokens
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And the hat?"}]
    second = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens
    assert chatting.stats().session.prefill_tokens - ran == second.usage.prompt_tokens - cached


def test_tools_are_passed_to_the_template(client):
    def prompt_tokens(**options):
        return client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=1, **options).usage.prompt_tokens

    assert prompt_tokens(tools=[TOOL]) > prompt_tokens() == prompt_tokens(tools=[TOOL], tool_choice="none")


def test_fields_that_clients_send_and_that_change_nothing(client):
    asked = {"model": NAME, "messages": HELLO, "max_completion_tokens": 5}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    fields = {
        "user": "me",
        "safety_identifier": "me",
        "metadata": {"page": "1"},
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "a"},
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "verbosity": "medium",
        "reasoning_effort": "low",
    }
    nothing = dict.fromkeys(["audio", "functions", "function_call", "web_search_options", "metadata", "store", "tools", "stream_options"])
    assert client.chat.completions.create(**asked, **fields).choices[0].message.content == plain
    assert client.chat.completions.create(**asked, extra_body=nothing).choices[0].message.content == plain
    padded = client.chat.completions.create(**asked, stream=True, stream_options={"include_obfuscation": False})
    assert "".join(part.choices[0].delta.content or "" for part in padded) == plain


def test_messages_of_answers_and_of_tools_come_back(client, chatting):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=3).choices[0].message
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        *HELLO,
        answer,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    assert client.chat.completions.create(model=NAME, messages=messages, max_tokens=2).usage.completion_tokens == 2
    with chatting.client() as http:
        tokens = [http.post("/tokenize", json={"messages": [{"role": role, "content": "x"}]}).json() for role in ("developer", "system")]
    assert tokens[0] == tokens[1]


def test_the_effort_is_for_the_template(tmp_path):
    folder = chat_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ reasoning_effort }}{{ messages[0].content }}")
    with serving(1, folder=folder) as server, server.client() as http:
        asked = {"messages": HELLO, "max_tokens": 1}
        usage = [http.post("/v1/chat/completions", json={**asked, **more}).json()["usage"] for more in ({}, {"reasoning_effort": "x"})]
        assert usage[1]["prompt_tokens"] == usage[0]["prompt_tokens"] + 1


def test_an_answer_in_json(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=40, response_format=wanted, temperature=1.0, seed=8)
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2, 3)
    wanted = {"type": "json_object"}
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=4, response_format=wanted)
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "got a part of type 'image_url'. The te",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs: expected logprobs to be true"),
        ({"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens: expected max_completion_tokens only"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice: expected tools"),
        ({"messages": HELLO, "functions": []}, "functions: Input should be None"),
        ({"messages": HELLO, "store": True}, "store: Input should be False"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities.1: Input should be 'text'"),
        ({"messages": HELLO, "thinking": True}, "thinking: this field is not known"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: expected a text, or a list of parts"),
        ({"messages": [{"role": "user"}]}, "messages.0: expected a content of the role 'user', got none"),
        ({"messages": [{"role": "tool", "content": None, "tool_call_id": "1"}]}, "messages.0: expected a content of the role 'tool'"),
    ],
)
def test_what_is_wrong_is_said(chatting, options, text):
    with chatting.client() as client:
        answer = client.post("/v1/chat/completions", json=options)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_a_model_without_a_template_says_so():
    with serving(1) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 400
        assert "expected a model with a chat template, got one without" in answer.json()["error"]["message"]


def test_tokens_of_texts_and_conversations(chatting, session):
    with chatting.client() as client:
        tokens = client.post("/tokenize", json={"prompt": "Alice was"}).json()
        assert tokens == {"tokens": session.tokenizer.encode("Alice was"), "count": 4, "max_model_len": 128}
        assert client.post("/detokenize", json={"tokens": tokens["tokens"][1:]}).json() == {"prompt": "Alice was"}
        bare = client.post("/tokenize", json={"prompt": "Alice was", "add_special_tokens": False}).json()
        assert bare["tokens"] == tokens["tokens"][1:]
        talk = client.post("/tokenize", json={"messages": HELLO}).json()
        assert session.tokenizer.decode(talk["tokens"]) == "u: Alice was\na:"
        assert client.post("/tokenize", json={"prompt": "a", "messages": HELLO}).status_code == 400
        assert client.post("/tokenize", json={}).status_code == 400
