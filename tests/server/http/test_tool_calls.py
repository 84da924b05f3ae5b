"""Calls of tools over HTTP, through the client of OpenAI: of the shipped chat model, and of scripted answers in other forms."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from fastapi.testclient import TestClient

from tests.paths import ROOT
from tests.server.http.running import NAME, Running, serving
from trt_kvcache import Tokenizer
from trt_kvcache.checkpoint import StreamDecoder
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.engine_stats import EngineConfig
from trt_kvcache.server.http import ServerOptions, make_app
from trt_kvcache.server.http.tool_choice import forced_calls
from trt_kvcache.server.http.tool_formats import tool_format

TINY_CHAT = ROOT / "examples" / "tiny-chat"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def asks(text: str, **options):
    return {"model": NAME, "messages": [{"role": "user", "content": text}], "tools": [WEATHER, MULTIPLY], "max_tokens": 90, **options}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(2, folder=TINY_CHAT, max_sequence_length=512) as one:
        yield one


@pytest.fixture
def client(server: Running):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_a_call_comes_back(client):
    [choice] = client.chat.completions.create(**asks("What is the weather in Paris?")).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"})]
    assert choice.message.tool_calls[0].type == "function"


def test_a_streamed_call_is_the_same(client):
    with client.chat.completions.stream(**asks("What is the weather in Paris and Rome?")) as stream:
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert not choice.message.content


def test_an_answer_without_a_call(client):
    [choice] = client.chat.completions.create(**asks("What is the capital of Spain?")).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("The capital of Spain is Madrid.", None, "stop")


def test_the_result_of_a_call_is_answered(client):
    asked = asks("What is the weather in Paris?")
    message = client.chat.completions.create(**asked).choices[0].message
    asked["messages"] += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 18 degrees"}]
    assert client.chat.completions.create(**asked).choices[0].message.content == "The tool says: sunny, 18 degrees"


def test_none_leaves_the_text_alone(client):
    [choice] = client.chat.completions.create(**asks("What is the weather in Paris?", tool_choice="none")).choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_required(client, stream):
    answer = client.chat.completions.create(**asks("Hello", tool_choice="required", parallel_tool_calls=False, stream=stream))
    if stream:
        parts = [one.choices[0].delta.tool_calls[0].function for one in answer if one.choices[0].delta.tool_calls]
        found = [(parts[0].name, json.loads("".join(part.arguments for part in parts)))]
    else:
        found = calls_of(answer.choices[0].message)
    assert len(found) == 1
    assert found[0][0] in ("get_weather", "multiply")


def test_a_tool_is_named(client):
    choice = {"type": "function", "function": {"name": "multiply"}}
    asked = asks("What is the weather in Paris?", tool_choice=choice, parallel_tool_calls=False, temperature=1.0, seed=3)
    [(name, arguments)] = calls_of(client.chat.completions.create(**asked).choices[0].message)
    assert name == "multiply"
    assert set(arguments) == {"a", "b"}
    assert all(isinstance(value, int) for value in arguments.values())


def test_only_one_call_if_asked(client):
    asked = asks("What is the weather in Paris and Rome?", parallel_tool_calls=False)
    assert calls_of(client.chat.completions.create(**asked).choices[0].message) == [("get_weather", {"city": "Paris"})]


def test_an_odd_name_is_called(client):
    tool = {"type": "function", "function": {"name": 'é "x"\\ %json {}', "parameters": {"type": "object", "properties": {}}}}
    asked = {**asks("Hello"), "tools": [tool, tool], "tool_choice": "required", "parallel_tool_calls": False}
    [(name, _)] = calls_of(client.chat.completions.create(**asked).choices[0].message)
    assert name == 'é "x"\\ %json {}'


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice: expected the name of one of 2 tools, got 'other'",
        ),
        ({"tool_choice": "required", "tools": None}, "tool_choice: expected tools"),
        ({"tool_choice": "required", "tools": [{"type": "x"}]}, "tools.0.function: expected a function with a name"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters: expected the schema of an object",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format: expected none"),
        ({"tool_choice": "always"}, "tool_choice"),
    ],
)
def test_a_wrong_choice_is_refused(server, options, text):
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=asks("Hello", **options))
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


class Scripted:
    """An engine whose answers are given."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[list[int]], reason: str = "stop") -> None:
        self.config = EngineConfig(
            model=NAME,
            context_length=100_000,
            max_num_seqs=4,
            max_queue=4,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=(2,),
            has_chat_template=True,
            scores_prompts=False,
        )
        self.tokenizer = Tokenizer.open(tokenizer.path)  # a server closes it
        self.pieces, self.reason = pieces, reason
        self.draining = False

    async def start(self):
        return self.config

    async def cleanup(self):
        pass

    async def generate(self, request):
        for index in range(request["sampling_options"]["n"] or 1):
            decoder = StreamDecoder(self.tokenizer, request["token_ids"])
            for tokens in self.pieces:
                logprobs = {"log_probs": [-0.5] * len(tokens), "top_logprobs": [[]] * len(tokens)}
                yield {"index": index, "token_ids": tokens, "text": "".join(map(decoder.push, tokens)), **logprobs}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
            yield {"index": index, "token_ids": [], "text": decoder.flush(), "finish_reason": self.reason, "completion_usage": usage}


@pytest.fixture(scope="module")
def with_special_tags(tmp_path_factory) -> Tokenizer:
    """A tokenizer whose tags are special tokens, as those of Mistral and of Llama are."""
    folder = tmp_path_factory.mktemp("tags")
    given = json.loads((TINY_CHAT / "tokenizer.json").read_text())
    for index, tag in enumerate(["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"], 640):
        kinds = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        given["added_tokens"].append({"id": index, "content": tag, "special": True, **kinds})
    (folder / "tokenizer.json").write_text(json.dumps(given))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return Tokenizer.open(folder)


def answered(tokenizer: Tokenizer, text: str, parser: str, *, size: int = 1, reason: str = "stop", **options):
    """Return the whole answer and the events of its stream."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = [tokens[place : place + size] for place in range(0, len(tokens), size)]
    app = make_app(Scripted(tokenizer, pieces, reason), ServerOptions(tool_call_parser=parser, any_host=True))
    asked = asks("Hello", **options)
    with TestClient(app) as client:
        whole = client.post("/v1/chat/completions", json=asked).json()
        lines = client.post("/v1/chat/completions", json={**asked, "stream": True}).text.split("\n\n")
    return whole["choices"], [json.loads(line[6:])["choices"][0] for line in lines if line not in ("", "data: [DONE]")]


def joined(events, index: int = 0):
    """Return content and calls of a stream."""
    mine = [one["delta"] for one in events if one["index"] == index]
    calls: dict[int, list[str]] = {}
    for delta in mine:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    return "".join(delta.get("content") or "" for delta in mine), [tuple(calls[index]) for index in sorted(calls)]


SCRIPTS = {
    "hermes": (
        "hermes",
        'Je regarde é.\n<tool_call>\n{"name": "a", "arguments": {"b": "é漢"}}\n</tool_call>',
        "Je regarde é.",
        [("a", '{"b": "é漢"}')],
    ),
    "llama": ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"b": 1}}', "", [("a", '{"b": 1}')]),
    "llama code": ("llama3_json", "<|python_tag|>a.call(b=1)", "a.call(b=1)", []),
    "mistral": ("mistral", 'So [TOOL_CALLS] [{"name": "a", "arguments": {}}]', "So", [("a", "{}")]),
    "mistral names": ("mistral", '[TOOL_CALLS]a[ARGS]{"b": 1}[TOOL_CALLS]c[ARGS]{}', "", [("a", '{"b": 1}'), ("c", "{}")]),
    "mistral broken": ("mistral", "[TOOL_CALLS] [1]", " [1]", []),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripted_answers(with_special_tags, script, size):
    parser, text, content, calls = SCRIPTS[script]
    [whole], events = answered(with_special_tags, text, parser, size=size)
    message = whole["message"]
    assert message["content"] == (content or None)
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())] == calls
    assert joined(events) == (content, calls)
    assert whole["finish_reason"] == events[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_without_its_end_before_another(tmp_path, size):
    """Tags of several tokens: of the second one, the first tokens might be the end of the first one."""
    given = json.loads((TINY_CHAT / "tokenizer.json").read_text())
    given["added_tokens"] = [one for one in given["added_tokens"] if "tool" not in one["content"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    text = '<tool_call>{"name": "a", "arguments": {"b": 1}}\n<tool_call>{"name": "c", "arguments": {}}</tool_call>'
    [whole], events = answered(Tokenizer.open(tmp_path), text, "hermes", size=size)
    calls = [("a", '{"b": 1}'), ("c", "{}")]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in whole["message"]["tool_calls"]] == calls
    assert joined(events) == ("", calls)


def test_ids_are_those_that_mistral_templates_take(with_special_tags):
    [whole], _ = answered(with_special_tags, "[TOOL_CALLS]a[ARGS]{}", "mistral")
    [call] = whole["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_a_call_that_the_limit_cuts_is_content(with_special_tags):
    [whole], events = answered(with_special_tags, '<tool_call>{"name": "a", "arg', "hermes", reason="length")
    assert (whole["message"]["content"], whole["finish_reason"]) == ('<tool_call>{"name": "a", "arg', "length")
    assert joined(events) == ('<tool_call>{"name": "a", "arg', [])


def test_several_answers_with_log_probabilities(with_special_tags):
    text = 'x <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    whole, events = answered(with_special_tags, text, "hermes", n=2, logprobs=True)
    for choice in whole:
        assert joined(events, choice["index"]) == ("x", [("a", "{}")])
        streamed = [
            one for event in events if event["index"] == choice["index"] and event["logprobs"] for one in event["logprobs"]["content"]
        ]
        assert streamed == choice["logprobs"]["content"]


def test_a_stop_text_ends_a_call(client):
    [choice] = client.chat.completions.create(**asks("What is the weather in Paris?", stop="Paris")).choices
    assert choice.message.content == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    assert choice.finish_reason == "stop"


def test_a_huge_schema_costs_its_own_request(server):
    properties = {f"p{index}": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]} for index in range(3000)}
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": properties}}}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={**asks("Hello", tool_choice="required"), "tools": [tool]})
        assert answer.status_code == 400
        assert client.post("/v1/chat/completions", json=asks("Hello")).status_code == 200


def test_a_parser_that_is_not_known():
    with pytest.raises(ConfigError, match="tool_call_parser: expected"):
        ServerOptions(tool_call_parser="other")


def test_a_model_whose_form_is_not_known(with_special_tags):
    app = make_app(Scripted(with_special_tags, []), ServerOptions(any_host=True))
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=asks("Hello", tool_choice="required"))
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parser", "template", "text"),
    [
        ("hermes", "", '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        ("llama3_json", "", '{"name": "multiply", "parameters": {"a": 1, "b": 2}}'),
        (
            "mistral",
            "",
            '[TOOL_CALLS] [{"name": "multiply", "arguments": {"a": 1, "b": 2}}, {"name": "multiply", "arguments": {"a": 3, "b": 4}}]',
        ),
        ("mistral", "[ARGS]", '[TOOL_CALLS]multiply[ARGS]{"a": 1, "b": 2}'),
    ],
)
def test_forced_answers_have_the_form_of_the_model(with_special_tags, parser, template, text):
    llguidance = pytest.importorskip("llguidance")
    form = tool_format(parser, template)
    tags = {tag: with_special_tags.encode(tag, False)[0] for tag in form.tags if len(with_special_tags.encode(tag, False)) == 1}
    grammar = forced_calls(form, [WEATHER, MULTIPLY], name="multiply", several=True, tag_ids=tags)["grammar"]
    tokenizer = llguidance.LLTokenizer((with_special_tags.path / "tokenizer.json").read_text(), n_vocab=643, eos_token=2)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.consume_tokens(with_special_tags.encode(text, False))
    assert matcher.is_accepting()
