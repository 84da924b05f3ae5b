"""Bodies that are long or deep: refused before they cost anything, and read away from the event loop."""

from __future__ import annotations

import gzip
import json
import threading

import numpy as np
import pytest
from pydantic import BaseModel

from tests.paths import ROOT
from tests.server.http.running import Running
from trt_kvcache import Tokenizer
from trt_kvcache.server.http.api_errors import ApiError
from trt_kvcache.server.http.bodies import ChatBody, CompletionBody, DetokenizeBody
from trt_kvcache.server.http.json_bodies import parsed
from trt_kvcache.server.http.written import as_json

USER = {"role": "user", "content": "a"}


def refused(body: object, kind: type[BaseModel] = CompletionBody, max_values: int = 100_000) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as error:
        parsed(content, kind, max_values=max_values)
    return error.value.message


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (["a"] + [0] * 1000, "prompt.1: Input should be a valid string."),
        ([0] + [None] * 1000, "prompt.1: Input should be a valid integer."),
        ([[1]] + [[]] * 1000, "prompt.1: List should have at least 1 item after validation, not 0."),
        ([[1, None, None]] * 1000, "prompt.0.1: Input should be a valid integer."),
    ],
)
def test_a_list_ends_at_its_first_wrong_element(prompt, text):
    assert refused({"prompt": prompt}) == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [None] * 1000}, "messages.0: Input should be a valid dictionary or instance of Message."),
        ({"messages": [{}] * 1000}, "messages.0.role: Field required."),
        ({"messages": [USER] * 4097}, "messages: List should have at most 4096 items after validation, not 4097."),
        ({"messages": [USER], "tools": [None] * 1000}, "tools.0: Input should be a valid dictionary."),
        ({"messages": [USER], "metadata": {str(n): "" for n in range(17)}}, "metadata: expected at most 16 members, got 17."),
        (
            {"messages": [USER], "logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "logit_bias: expected at most 1024 members, got 1025.",
        ),
        ({"messages": [USER], "chat_template_kwargs": {str(n): 1 for n in range(65)}}, "chat_template_kwargs: expected at most 64 members"),
        ({"messages": [USER], "stop": ["a"] * 17}, "stop: List should have at most 16 items after validation, not 17."),
        (
            {"messages": [{"role": "alien", "content": "a"}]},
            "messages.0.role: Input should be 'system', 'developer', 'user', 'assistant', ",
        ),
    ],
)
def test_each_field_has_its_bound(body, text):
    assert refused(body, ChatBody).startswith(text)


def test_of_many_unknown_fields_the_first_ones_are_named():
    unknown = {f"x{number}": 1 for number in range(30_000)}
    message = refused({"prompt": "a", "max_tokens": 1, **unknown})
    assert message.startswith("x0: this field is not known; x1: ")
    assert message.endswith("x4: this field is not known; and more.")


def test_an_unknown_field_is_named_beside_all_known_ones():
    known = dict.fromkeys(("model", "n", "temperature", "top_p", "seed", "stop"))
    assert refused({"prompt": "a", **known, "best": 1}) == "best: this field is not known."


def test_a_long_name_is_cut_off():
    assert len(refused({"prompt": "a", "x" * 10_000: 1})) < 200


@pytest.mark.parametrize(
    ("element", "text"),
    [("[]", "expected at most 16384 lists and objects, got 20002."), ('{"a":1}', "16384 lists"), ("0", "at most 5000 values, got 20001.")],
)
def test_values_are_counted_before_they_are_read(element, text):
    assert text in refused(f'{{"prompt":[{",".join([element] * 20_000)}]}}'.encode(), max_values=5000)


def test_members_are_counted_before_they_are_read():
    members = ",".join(f'"{number}":1' for number in range(40_000))
    assert "expected at most 32768 members, got 40000." in refused(f"{{{members}}}".encode())


@pytest.mark.parametrize("text", ["[{,:" * 20_000, '",[' * 20_000, '\\",[' * 20_000, "\\\\" * 20_000 + '"[' * 20_000], ids=range(4))
def test_what_stands_in_texts_is_not_counted(text):
    assert parsed(json.dumps({"prompt": text}).encode(), CompletionBody, max_values=100).prompt == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"prompt": "a"', "EOF while parsing"),
        (b'{"prompt":' + b"[" * 1000, "recursion limit exceeded"),
        (b'{"prompt":"a","n":' + b"7" * 10_000 + b"}", "number out of range"),
        (b'{"prompt":"\\ud800"}', "hex escape"),
        (b'{"prompt":"\xff"}', "invalid unicode"),
        ('{"prompt":"a"}'.encode("utf-16"), "expected value"),
        (b'{"prompt":"a\x00"}', "control character"),
    ],
)
def test_what_is_no_json_is_said_to_be_none(content, text):
    assert "body: expected JSON, got an error: " in refused(content)
    assert text in refused(content)


def test_a_byte_order_mark_is_passed_over(chatting: Running):
    with chatting.client() as client:
        content = b"\xef\xbb\xbf" + json.dumps({"prompt": "A", "max_tokens": 1}).encode()
        answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


def test_a_compressed_body_is_415(chatting: Running):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with chatting.client() as client:
        answer = client.post("/v1/completions", content=gzip.compress(b'{"prompt": "A"}'), headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"][:44]) == (415, "Content-Encoding: expected none, got 'gzip'.")


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", {"prompt": ["A"] * 69}, "prompt: expected at most 68 answers at once, got 69."),
        ("/v1/chat/completions", {"messages": [USER], "n": 69}, "n: expected at most 68 answers at once, got 69."),
        ("/v1/completions", {"prompt": ["A", "A" * 10_000]}, "prompt: expected at most 128 tokens, of at most 4096 characters, got 10000"),
        ("/tokenize", {"prompt": "A" * 10_000}, "prompt: expected at most 128 tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A" * 10_000}]}, "prompt: expected at most 128 tokens"),
        ("/detokenize", {"tokens": [1] * 65_537}, "tokens: expected at most 65536, got 65537."),
    ],
)
def test_what_can_never_fit_is_refused_before_it_is_encoded(chatting: Running, monkeypatch, path, body, text):
    monkeypatch.setattr(Tokenizer, "encode_all", None)
    monkeypatch.setattr(Tokenizer, "decode", None)
    with chatting.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(text)


def test_long_texts_have_the_tokens_of_short_ones(chatting: Running):
    text = "The rabbit, and " * 200
    with chatting.client() as client:
        found = client.post("/tokenize", json={"prompt": text}).json()
        back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert found["tokens"] == Tokenizer.open(ROOT / "examples" / "tiny-llama").encode(text)
    assert back["prompt"] == "<s>" + text


def test_others_are_answered_while_a_body_is_read(chatting: Running, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def slow(*_, **__):
        begun.set()
        assert may_end.wait(60)
        raise ApiError(400, "slow")

    monkeypatch.setattr("trt_kvcache.server.http.json_bodies.parsed", slow)
    with chatting.client() as client, chatting.client() as other:
        asked = threading.Thread(target=client.post, args=["/tokenize"], kwargs={"json": {"prompt": "a" * 20_000}})
        asked.start()
        assert begun.wait(60)
        assert other.get("/health").status_code == 200
        may_end.set()
        asked.join(60)


def test_others_are_answered_while_an_answer_is_written(chatting: Running, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def slow(document):
        begun.set()
        assert may_end.wait(60)
        return as_json(document)

    monkeypatch.setattr("trt_kvcache.server.http.generation.as_json", slow)
    body = {"prompt": [[5] * 120] * 4, "max_tokens": 0, "echo": True, "logprobs": 20}
    with chatting.client() as client, chatting.client() as other:
        asked = threading.Thread(target=client.post, args=["/v1/completions"], kwargs={"json": body})
        asked.start()
        assert begun.wait(60)
        assert other.get("/health").status_code == 200
        may_end.set()
        asked.join(60)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, DetokenizeBody])
def test_an_empty_body_is_none(kind):
    assert refused(b"", kind) == "body: expected a JSON object, got nothing."


def test_json_in_pieces_is_that_of_the_library():
    choice = {"text": 'é"\n', "logprobs": {"tokens": ["a"] * 100, "top": [{"a": -0.5}] * 2000, "none": None}, "empty": [], "nothing": {}}
    document = {"choices": [choice] * 40, "list": [[[1]]], "é": True, "numbers": np.arange(65).tolist()}
    assert as_json(document) == json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
