"""Bodies that are not what they should be: each is 4xx in OpenAI's shape, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

from tests.server.http.running import Running  # noqa: E402

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")

FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "logit_bias", "stream", "stream_options", "response_format", "echo", "logprobs", "top_logprobs", "tools"),
    *("tool_choice", "best_of", "suffix", "tokens", "chat_template_kwargs", "stop_token_ids", "repetition_penalty", "user"),
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "tiny", "json_schema", "user", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "role", "content", "type", "schema"]), inner, max_size=3)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6).map(lambda body: json.dumps(body).encode())
BYTES = st.binary(max_size=60) | st.sampled_from([b"[" * 50_000, b'{"a":' * 5_000, b"", b"null", b'{"prompt": "a"} x', b'{"prompt": NaN}'])


@pytest.fixture(scope="module")
def answers(chatting: Running):
    """How many answers had which status."""
    counts: dict[int, int] = {}
    return counts


@pytest.fixture(scope="module")
def client(chatting: Running):
    with chatting.client() as one:
        yield one


def send(client: Any, path: str, content: bytes, answers: dict[int, int]) -> None:
    """Send a body, and check the answer."""
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    answers[answer.status_code] = answers.get(answer.status_code, 0) + 1
    if answer.status_code == 200:
        return  # it happened to be good
    assert 400 <= answer.status_code < 500, (answer.status_code, content, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


FUZZED = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(hypothesis.HealthCheck)}


@hypothesis.settings(max_examples=100, **FUZZED)
@hypothesis.given(path=st.sampled_from(PATHS), content=BODIES | BYTES)
def test_a_hundred_bodies(client: Any, answers: dict[int, int], path: str, content: bytes):
    send(client, path, content, answers)


@pytest.mark.long
@hypothesis.settings(max_examples=1000, **FUZZED)
@hypothesis.given(path=st.sampled_from(PATHS), content=BODIES | BYTES)
def test_a_thousand_bodies(client: Any, answers: dict[int, int], path: str, content: bytes):
    send(client, path, content, answers)


def test_nothing_has_changed_by_them(chatting: Running, answers: dict[int, int]):
    assert answers.get(400, 0) > sum(answers.values()) / 2 or not answers
    chatting.wait_until_idle()
    with chatting.client() as fresh:
        body = {"prompt": "Alice was", "max_tokens": 8}
        assert fresh.post("/v1/completions", json=body).json()["choices"][0]["text"] == " beginning to get very"
        assert fresh.get("/health").status_code == 200
