"""No answer names a path of the server's disk."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.server.http.running import chat_model, serving
from trt_kvcache.checkpoint import Tokenizer

TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such role') }}{% elif messages[0].content == 'divide' %}{{ 1 // 0 }}"
    "{% elif messages[0].content == 'filter' %}{{ messages | first | attr('x') | join(3, 4, 5) }}"
    "{% elif messages[0].content == 'long' %}{{ 'x' * 20000000 }}{% else %}x{% endif %}"
)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


REQUESTS = [
    *(("/v1/chat/completions", chat(content)) for content in ("refuse", "divide", "filter", "long")),
    ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}),
    ("/v1/chat/completions", chat("x", response_format={"type": "grammar", "grammar": "start: %import common.X"})),
    ("/v1/chat/completions", chat("x", response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}})),
    ("/v1/chat/completions", chat("x", response_format={"type": "regex", "regex": "("})),
    ("/v1/completions", {"prompt": [5], "logit_bias": {"999": 1}}),
    ("/v1/completions", {"prompt": [5] * 200}),
    ("/v1/completions", {"prompt": [5], "n": 100}),
    ("/v1/completions", {"prompt": [5], "model": "/etc"}),
    ("/detokenize", {"tokens": [999]}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = chat_model(tmp_path_factory.mktemp("secret place") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(1, folder=folder) as one:
        yield one


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=range(len(REQUESTS)))
def test_what_a_request_is_refused_with(server, path, body):
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code in (200, 400, 404)
    assert "secret" not in answer.text
    assert "site-packages" not in answer.text
    assert "trt_kvcache/" not in answer.text


def test_the_log_of_the_server_names_the_template(server, caplog):
    with caplog.at_level(logging.INFO, "trt_kvcache.checkpoint"), server.client() as client:
        answer = client.post("/v1/chat/completions", json=chat("refuse"))
    assert answer.json()["error"]["message"] == "chat_template.jinja: the chat template refuses these messages: no such role"
    assert "secret place" in caplog.text


@pytest.mark.parametrize(
    ("fails", "path", "body"),
    [
        ("apply_chat_template", "/v1/chat/completions", chat("x")),
        ("encode", "/tokenize", {"prompt": "a"}),
        ("decode", "/detokenize", {"tokens": [5]}),
    ],
)
def test_of_a_failure_of_the_server_the_log_says_where_it_was(server, monkeypatch, caplog, fails, path, body):
    def failing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "No such file", "/a secret place")

    monkeypatch.setattr(Tokenizer, fails, failing)
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a secret place" in caplog.text
