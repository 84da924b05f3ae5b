"""A server of a model with adapters: each is a model for clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.helpers.adapters import write_two_adapters
from tests.server.http.running import NAME, Running, chat_model, events_of, serving
from trt_kvcache import Checkpoint, InferenceSession
from trt_kvcache.errors import ConfigError
from trt_kvcache.server import AsyncEngine

MODELS = (NAME, "sql", "poems")
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    model = chat_model(place / "model")
    with Checkpoint.open(model) as checkpoint:
        return {"model": model, **write_two_adapters(place, checkpoint.config)}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Running]:
    adapters = {name: str(folders[name]) for name in MODELS[1:]}
    with serving(3, folder=folders["model"], prompt_cache_bytes=1 << 22, adapters=adapters) as running:
        yield running


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path]) -> dict[str, str]:
    """Return the text of each model, of a session with its adapter merged."""
    found = {}
    for name in MODELS:
        adapter = None if name == NAME else folders[name]
        with InferenceSession.from_model(folders["model"], engine="reference", dtype="float32", adapter=adapter) as session:
            found[name] = session.generate(PROMPT["prompt"], max_new_tokens=6, ignore_eos=True).text
    assert len(set(found.values())) == 3
    return found


def test_models_are_listed(server: Running):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        found = client.models.list().data
        assert tuple(model.id for model in found) == MODELS
        assert [getattr(model, "parent", None) for model in found] == [None, NAME, NAME]
        for name in MODELS:
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError, match="expected 'tiny', 'sql', 'poems', got 'other'"):
            client.models.retrieve("other")


def test_a_completion_names_its_model(server: Running, texts: dict[str, str]):
    with server.client() as client:
        for name in (*MODELS, *MODELS):  # the second time, with the prefix cache
            done = client.post("/v1/completions", json={**PROMPT, "model": name}).json()
            assert (done["model"], done["choices"][0]["text"]) == (name, texts[name])
        assert client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"] == texts[NAME]
        refused = client.post("/v1/completions", json={**PROMPT, "model": "other"})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


def test_concurrent_streams_of_different_models(server: Running, texts: dict[str, str]):
    def stream(name: str) -> str:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={**PROMPT, "model": name, "stream": True}) as response,
        ):
            events = events_of(response)
        assert {event["model"] for event in events} == {name}
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(3) as pool, server.held():
        found = {name: pool.submit(stream, name) for name in MODELS}
        while server.engine.num_live < 3:
            time.sleep(0.005)
        server.pace.go()
    assert {name: text.result(60) for name, text in found.items()} == texts


def test_chats_and_several_answers(server: Running):
    body = {"messages": [{"role": "user", "content": "Alice"}], "max_tokens": 5, "temperature": 0, "n": 2}
    with server.client() as client:
        found = {name: client.post("/v1/chat/completions", json={**body, "model": name}).json() for name in MODELS}
        assert client.post("/v1/chat/completions", json={**body, "model": "other"}).status_code == 404
        assert client.post("/tokenize", json={"prompt": "Alice", "model": "sql"}).status_code == 200
        assert client.post("/tokenize", json={"prompt": "Alice", "model": "other"}).status_code == 404
    answers = {name: [choice["message"]["content"] for choice in done["choices"]] for name, done in found.items()}
    assert all(len(set(of)) == 1 for of in answers.values())
    assert len({of[0] for of in answers.values()}) == 3
    assert [done["model"] for done in found.values()] == [*MODELS]


def test_statistics_name_the_adapters(server: Running):
    with server.client() as client:
        assert json.loads(client.get("/stats").text)["config"]["adapters"] == ["sql", "poems"]


def test_an_adapter_with_the_name_of_the_model_is_refused(folders: dict[str, Path]):
    options = {"engine": "reference", "adapters": {"tiny": str(folders["sql"])}}
    engine = AsyncEngine(lambda: InferenceSession.from_model(folders["model"], **options), model="tiny")

    async def start() -> None:
        try:
            with pytest.raises(ConfigError, match="expected another name than those of the adapters, tiny, got 'tiny'"):
                await engine.start()
        finally:
            await engine.cleanup()

    asyncio.run(start())
