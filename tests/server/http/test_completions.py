"""``/v1/completions`` through the client of OpenAI: texts, token ids, scores, streams."""

from __future__ import annotations

import json

import openai
import pytest

from tests.helpers.models import write_model
from tests.server.engines import read_all, source
from tests.server.http.running import NAME, Running, events_of, serving

PROMPTS = ["Alice was", "The Queen", "Down, down", "Oh dear!"]


@pytest.fixture(scope="module")
def session():
    with source(1)() as one:
        yield one


@pytest.fixture
def client(chatting: Running):
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def text_of(session, prompt, **options):
    return read_all(session, prompt, options)[1]


def test_a_text_is_continued_as_by_the_session(client, session):
    answer = client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=12, temperature=0.9, seed=3)
    assert answer.choices[0].text == text_of(session, PROMPTS[0], max_new_tokens=12, temperature=0.9, seed=3)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 12, 16)


def test_sixteen_tokens_are_the_default(client):
    assert client.completions.create(model=NAME, prompt="Alice was").usage.completion_tokens == 16


def test_prompts_in_all_four_forms(client, session):
    ids = [session.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [text_of(session, prompt, max_new_tokens=5) for prompt in PROMPTS]
    for prompt in (PROMPTS, ids):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=5)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 20
    for prompt in (PROMPTS[1], ids[1]):
        assert client.completions.create(model=NAME, prompt=prompt, max_tokens=5).choices[0].text == expected[1]


def test_several_answers_to_several_prompts(client, session):
    options = {"temperature": 1.2, "seed": 5}
    answer = client.completions.create(model=NAME, prompt=PROMPTS[:2], max_tokens=6, n=3, **options)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [
        text_of(session, prompt, max_new_tokens=6, temperature=1.2, seed=5 + index) for prompt in PROMPTS[:2] for index in range(3)
    ]
    assert answer.usage.prompt_tokens == sum(len(session.tokenizer.encode(prompt)) for prompt in PROMPTS[:2])


def test_a_prompt_of_several_answers_counts_as_run(client):
    prompt = [9, *range(40, 90)]
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=3, n=3, extra_body={"ignore_eos": True})
    assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (51, 0)


def test_stop_texts_and_tokens(client, session):
    whole = text_of(session, PROMPTS[0], max_new_tokens=12)
    answer = client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=12, stop=whole[5:8])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(whole[5:8])], "stop")
    several = client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=12, stop=["never there", whole[5:8]])
    assert several.choices[0].text == answer.choices[0].text
    token = session.tokenizer.encode(PROMPTS[0] + whole)[5]
    ended = client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=12, extra_body={"stop_token_ids": [token]})
    assert ended.choices[0].finish_reason == "stop"


def test_log_probabilities_of_an_echoed_prompt(client, session):
    answer = client.completions.create(model=NAME, prompt="Alice was", max_tokens=2, echo=True, logprobs=1)
    [score] = session.score("Alice was", top_logprobs=1)
    events = list(session.generate("Alice was", max_new_tokens=2, logprobs=1))
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == "Alice was" + "".join(event.text for event in events)
    assert found.tokens == ["<s>", "A", "lice", " was", " be", "g"]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([*score.logprobs[1:], *(event.logprob for event in events)], rel=1e-4)
    assert found.text_offset == [0, 0, 1, 5, 9, 12]  # <s> is not in the text
    assert all(
        answer.choices[0].text[place:].startswith(token) for token, place in zip(found.tokens[1:], found.text_offset[1:], strict=True)
    )
    assert all(token in top for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True))


def test_a_prompt_is_scored_without_an_answer(client, session):
    answer = client.completions.create(model=NAME, prompt="Alice was", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "Alice was"
    assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(session.score("Alice was")[0].logprobs[1:], rel=1e-4)
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 2}, {"n": 2}])
def test_a_stream_has_what_the_whole_answer_has(client, options):
    asked = {"model": NAME, "prompt": PROMPTS[:2], "max_tokens": 8, "temperature": 0.9, "seed": 4, **options}
    whole = client.completions.create(**asked)
    texts, reasons, tokens, values = {}, {}, {}, {}
    *parts, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for part in parts:
        assert part.usage is None
        [choice] = part.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
        if choice.logprobs:
            tokens.setdefault(choice.index, []).extend(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
            values.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert [texts[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert [reasons[choice.index] for choice in whole.choices] == [choice.finish_reason for choice in whole.choices]
    for choice in whole.choices if "logprobs" in options else ():
        assert tokens[choice.index] == list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
        known = [value for value in values[choice.index] if value is not None]
        assert known == pytest.approx([value for value in choice.logprobs.token_logprobs if value is not None], rel=1e-4)


def test_an_answer_in_json_follows_its_schema(client):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    answer = client.completions.create(
        model=NAME, prompt="A", max_tokens=40, temperature=1.0, seed=1, extra_body={"response_format": wanted}
    )
    assert json.loads(answer.choices[0].text)["a"] in ("x", "y")
    assert answer.choices[0].finish_reason == "stop"
    grammar = {"type": "grammar", "grammar": 'start: "cat" | "hat"'}
    answer = client.completions.create(model=NAME, prompt="A", max_tokens=40, extra_body={"response_format": grammar})
    assert answer.choices[0].text in ("cat", "hat")


def test_a_prompt_of_a_full_slot_and_one_token_more(client, chatting):
    full = chatting.engine.config.context_length
    answer = client.completions.create(model=NAME, prompt=[5] * full, max_tokens=4)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")
    with pytest.raises(openai.BadRequestError, match=f"expected at most {full} tokens, got {full + 1}") as caught:
        client.completions.create(model=NAME, prompt=[5] * (full + 1), max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        ({"prompt": "A", "max_tokns": 3}, 400, "max_tokns", "max_tokns: this field is not known"),
        ({"prompt": "A", "stream_options": {"include": True}}, 400, "stream_options.include", "not known"),
        ({"prompt": "A", "max_tokens": "3"}, 400, "max_tokens", "valid integer"),
        ({"prompt": "A", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"prompt": "A", "top_p": -0.1}, 400, "top_p", "greater than or equal to 0"),
        ({"prompt": "A", "n": 0}, 400, "n", "greater than or equal to 1"),
        ({"prompt": "A", "suffix": "b"}, 400, "suffix", "None"),
        ({"prompt": "A", "best_of": 3}, 400, "best_of", "best_of: expected the value of n"),
        ({"prompt": "A", "stream_options": {}}, 400, "stream_options", "stream_options: expected stream to be true"),
        ({"prompt": "A", "max_tokens": 0}, 400, "max_tokens", "max_tokens: expected at least 1, or echo"),
        ({"prompt": "A", "logit_bias": {"a": 1}}, 400, "logit_bias", "logit_bias: expected token ids as keys"),
        ({"prompt": "A", "logit_bias": {"320": 1}}, 400, "logit_bias", "logit_bias: expected an integer from 0 to 319"),
        ({"prompt": [1, 320]}, 400, "prompt", "expected token ids from 0 to 319, got 320"),
        ({"prompt": []}, 400, "prompt", "prompt: expected a text, texts, token ids or lists of token ids, at least one."),
        ({"prompt": None}, 400, "prompt", "prompt: expected a text, texts, token ids"),
        ({"prompt": ["a", 5]}, 400, "prompt.1", "prompt.1: Input should be a valid string."),
        ({"prompt": [[5], [-1]]}, 400, "prompt.1.0", "prompt.1.0: Input should be greater than or equal to 0."),
        ({"prompt": "A", "stop": ""}, 400, "stop.0", "stop.0: String should have at least 1 character."),
        ({"prompt": "A", "metadata": {}}, 400, "metadata", "this field is not known"),
        ({}, 400, "prompt", "Field required"),
        ({"prompt": "A", "model": "gpt"}, 404, "model", "expected 'tiny', got 'gpt'"),
        ({"prompt": ["A"] * 69, "max_tokens": 1}, 400, "prompt", "expected at most 68 answers at once, got 69"),
        ({"prompt": "A", "response_format": {"type": "grammar", "grammar": "start: ((("}}, 400, None, "expected a grammar that compiles"),
        ({"prompt": "A", "n": 69, "max_tokens": 1}, 400, "n", "n: expected at most 68 answers at once, got 69."),
        (
            {"prompt": "A", "response_format": {"type": "regex", "regex": "é+"}},
            400,
            None,
            "a grammar of texts that the tokenizer can write, got one",
        ),
        ({"prompt": "A", "response_format": {"type": "regex"}}, 400, "response_format", "expected regex with the type"),
    ],
)
def test_what_is_wrong_is_an_error_of_openais_shape(chatting, body, status, param, text):
    with chatting.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert error["param"] == param
    assert "Value error" not in error["message"]


def test_a_stream_that_cannot_begin_is_an_error_with_a_status(chatting):
    with chatting.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "A", "stream": True, "logit_bias": {"320": 1}})
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        ok = client.post("/v1/completions", json={"prompt": "A", "stream": True, "max_tokens": 2})
        assert ok.headers["content-type"].startswith("text/event-stream")
        assert events_of(ok)[-1]["choices"][0]["finish_reason"] == "length"  # tokens that are there together are one event


@pytest.mark.parametrize(
    ("content", "content_type", "status", "text"),
    [
        (b'{"prompt": "A"}', "text/plain", 415, "Content-Type: expected application/json, got 'text/plain'."),
        (b'{"prompt": "A"}', "", 415, "Content-Type: expected application/json, got none."),
        (b'{"prompt": "A", ', "application/json", 400, "body: expected JSON, got an error: "),
        (b"[]", "application/json", 400, "body: Input should be a valid dictionary"),
        (b"", "application/json", 400, "body: expected a JSON object, got nothing."),
    ],
)
def test_a_body_that_is_no_json_object(chatting, content, content_type, status, text):
    with chatting.client() as client:
        answer = client.post("/v1/completions", content=content, headers={"Content-Type": content_type} if content_type else {})
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(text)
    assert answer.json()["error"]["param"] is None


def test_values_of_openai_that_ours_do_not_have(client, session):
    most_likely = text_of(session, "Alice was", max_new_tokens=6)
    assert client.completions.create(model=NAME, prompt="Alice was", max_tokens=6, temperature=1.5, top_p=0).choices[0].text == most_likely
    asked = {"model": NAME, "prompt": "Alice was", "max_tokens": 6, "temperature": 1.5}
    negative = client.completions.create(**asked, seed=-3).choices[0].text
    assert negative == text_of(session, "Alice was", max_new_tokens=6, temperature=1.5, seed=2**63 - 3)


def test_a_model_without_a_tokenizer_continues_token_ids(tmp_path):
    folder = write_model(tmp_path / "model")
    with serving(1, folder=folder, max_sequence_length=32) as server, server.client() as client:
        found = [client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}) for prompt in ([5, 6], "text")]
    assert [answer.status_code for answer in found] == [200, 400]
    assert "expected a model folder with tokenizer.json, got none. Send token ids." in found[1].json()["error"]["message"]
