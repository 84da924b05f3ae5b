"""``examples/triton``: the model repository for Triton's Python backend, in a stand-in for that backend."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers.sessions import Pace
from tests.paths import ROOT
from tests.server.engines import read_all
from tests.server.needs_libraries import need_libraries

need_libraries()

from tests.server.triton_stand_in import Instance, Sender, TritonError, utils  # noqa: E402
from trt_kvcache import InferenceSession, SessionSource  # noqa: E402
from trt_kvcache.errors import CheckpointError  # noqa: E402

FOLDER = ROOT / "examples" / "triton" / "tiny_llama"
SESSION = {"engine": "reference", "max_batch_size": 4, "prompt_cache_bytes": 4194304}
PARAMETERS = {"model": "examples/tiny-llama", "session": json.dumps(SESSION), "max_queue": "64", "max_seconds": "600"}

#: What Triton makes of config.pbtxt, as it passes it on: numbers of 64 bits are texts.
CONFIG = {
    "name": "tiny_llama",
    "backend": "python",
    "model_transaction_policy": {"decoupled": True},
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
    "input": [
        {"name": "token_ids", "data_type": "TYPE_INT32", "dims": ["-1"], "optional": True},
        {"name": "text", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
        {"name": "options", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
    ],
    "output": [
        {"name": "token_ids", "data_type": "TYPE_INT32", "dims": ["-1"]},
        {"name": "text", "data_type": "TYPE_STRING", "dims": ["1"]},
        {"name": "index", "data_type": "TYPE_INT32", "dims": ["1"]},
        {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": ["1"]},
    ],
    "parameters": {name: {"string_value": value} for name, value in PARAMETERS.items()},
}


def test_the_configuration_is_one_of_triton():
    pytest.importorskip("tritonclient", reason="tritonclient is not installed: `make test-ray` installs it")
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    read = text_format.Parse((FOLDER / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    assert json_format.MessageToDict(read, preserving_proto_field_name=True) == CONFIG


@pytest.fixture
def load(monkeypatch) -> Any:
    """Loads the model as Triton does, and unloads it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils())
    spec = importlib.util.spec_from_file_location("model", FOLDER / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = []

    def start(**parameters: str) -> Instance:
        given = {**CONFIG, "parameters": {name: {"string_value": value} for name, value in {**PARAMETERS, **parameters}.items()}}
        instance = Instance(module.TritonPythonModel(), given, {"model_config": json.dumps(given), "model_name": "tiny_llama"})
        loaded.append(instance)
        return instance

    yield start
    for instance in loaded:
        instance.end()


@pytest.fixture
def pace(monkeypatch) -> Pace:
    """Of the steps of all sessions."""
    one, step = Pace(), InferenceSession.step
    monkeypatch.setattr(InferenceSession, "step", lambda session: step(session) if one.may_step() else [])
    return one


def text_of(value: Any) -> np.ndarray:
    return np.array([value.encode() if isinstance(value, str) else json.dumps(value).encode()], np.object_)


def options(**more: Any) -> dict[str, Any]:
    return {"sampling_options": {"temperature": 0.9, "seed": 3}, "stop_conditions": {"max_tokens": 9, "ignore_eos": True}, **more}


def ended(sender: Sender) -> list[Any]:
    """Return the responses, when the last one is there."""
    assert sender.closed.wait(60), "no message had the final flag"
    return sender.responses


def error_of(sender: Sender) -> tuple[int, str]:
    """Return code and text of the error with which an answer ends."""
    error = ended(sender)[-1].error
    return error.code(), error.message()


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_streams_are_those_of_the_session(load):
    instance = load()
    texts = [f"The rabbit {i}" for i in range(6)]
    senders = [instance.request(text=text_of(text), options=text_of(options())) for text in texts]
    with SessionSource(ROOT / "examples" / "tiny-llama", **SESSION)() as session:
        for text, sender in zip(texts, senders, strict=True):
            tokens, said = read_all(session, text, {"temperature": 0.9, "seed": 3, "max_new_tokens": 9, "ignore_eos": True})
            parts = ended(sender)
            assert np.concatenate([part.tensors["token_ids"] for part in parts]).tolist() == tokens
            assert b"".join(part.tensors["text"][0] for part in parts).decode() == said
            assert [part.tensors["finish_reason"][0] for part in parts] == [b""] * (len(parts) - 1) + [b"length"]


def test_token_ids_and_several_answers(load):
    sender = load().request(
        token_ids=np.array([5, 6, 7], np.int32), options=text_of({"sampling_options": {"n": 2}, "stop_conditions": {"max_tokens": 3}})
    )
    lengths = {0: 0, 1: 0}
    for part in ended(sender):
        lengths[int(part.tensors["index"][0])] += part.tensors["token_ids"].size
    assert lengths == {0: 3, 1: 3}


def test_a_request_that_was_cancelled_leaves_its_slot(load, pace):
    instance = load(session=json.dumps({**SESSION, "max_batch_size": 1}))
    pace.hold().allow(3)
    long = instance.request(text=text_of("Alice"), options=text_of({"stop_conditions": {"max_tokens": 400, "ignore_eos": True}}))
    behind = instance.request(text=text_of("Alice"), options=text_of({"stop_conditions": {"max_tokens": 400, "ignore_eos": True}}))
    wait_until(lambda: bool(long.responses))
    long.cancelled = behind.cancelled = True
    assert error_of(long) == error_of(behind) == (TritonError.CANCELLED, "the client has gone away")
    assert 0 < sum(part.tensors["token_ids"].size for part in long.responses[:-1]) <= 3
    pace.go()
    assert [part.tensors["finish_reason"][0] for part in ended(instance.request(text=text_of("Alice")))][-1]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "input: expected token_ids or text."),
        ({"text": text_of("a"), "token_ids": np.array([1], np.int32)}, "input: expected token_ids or text."),
        ({"text": text_of("a"), "options": text_of("{")}, "Expecting property name"),
        ({"text": text_of("a"), "options": text_of({"sampling": {}})}, "expected adapter, client, output_options, sampling_options"),
        ({"text": text_of("a"), "options": text_of({"client": 3})}, "client: expected a text"),
        ({"token_ids": np.array([320], np.int32)}, "320"),
        ({"token_ids": np.array([], np.int32)}, "token_ids: expected the ids of at least one token"),
        ({"token_ids": np.zeros(600, np.int32)}, "600"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(load, inputs, said):
    code, message = error_of(load().request(**inputs))
    assert code == TritonError.INVALID_ARG
    assert said in message


def test_a_full_queue_is_unavailable(load, pace):
    instance = load(session=json.dumps({**SESSION, "max_batch_size": 1}), max_queue="0")
    pace.hold()
    first = instance.request(text=text_of("Alice"), options=text_of({"stop_conditions": {"max_tokens": 400, "ignore_eos": True}}))
    code, said = error_of(instance.request(text=text_of("Alice")))
    assert (code, said.partition(":")[0]) == (TritonError.UNAVAILABLE, "queue")
    pace.go()
    assert ended(first)[-1].tensors["finish_reason"][0] == b"length"


def test_a_request_that_lasts_too_long_is_ended(load, pace):
    pace.slow(0.001)
    sender = load(max_seconds="0.001").request(text=text_of("Alice"), options=text_of({"stop_conditions": {"max_tokens": 400}}))
    code, said = error_of(sender)
    assert code == TritonError.UNAVAILABLE
    assert "expected to end within 0.001 seconds" in said


def test_unloading_lets_answers_end(load):
    instance = load()
    sender = instance.request(text=text_of("Alice"), options=text_of(options()))
    wait_until(lambda: bool(sender.responses))
    instance.end()
    assert ended(sender)[-1].tensors["finish_reason"][0] == b"length"
    instance.end = lambda: None


def test_a_model_that_is_not_there_fails_to_load(load):
    with pytest.raises((CheckpointError, FileNotFoundError, ValueError)):
        load(model="examples/no-such-model")
