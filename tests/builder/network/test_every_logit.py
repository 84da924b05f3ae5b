"""Networks with the logits of several new tokens per slot: their values, tensors and profiles, in one piece and in segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.models import attentions_of
from tests.sweeps import one_of_each_family, some
from trt_kvcache.builder.serialization import make_config, serialize
from trt_kvcache.trt.module import TensorRT

from .conftest import MAX_BATCH_SIZE, MAX_SEQUENCE_LENGTH, MODELS_AND_ATTENTIONS, Defined, declared
from .test_network_values import LOGITS_TOLERANCE, assert_near, runners, tokens_of
from .test_segments import WITHOUT_EXPERTS, Segments

pytestmark = pytest.mark.trt

Define = Callable[..., Defined]

LOGITS = 7


def three_steps(runner: Any, tokens: np.ndarray) -> np.ndarray:
    """Run 7, 5 and 1 tokens of all slots; return the logits ``[B, 13, vocab]`` of all of them."""
    found = [
        runner.step(tokens[:, start : start + width], [start] * len(tokens), [range(width)] * len(tokens)).copy()
        for start, width in ((0, 7), (7, 5), (12, 1))
    ]
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize(
    ("model", "attention", "dtype"),
    [
        *one_of_each_family((*case, "float32") for case in MODELS_AND_ATTENTIONS),
        ("qwen2-tied", "native", "float16"),
        ("llama", "mask", "bfloat16"),
        ("gemma2", "mask", "bfloat16"),
    ],
)
def test_a_network_has_the_logits_of_the_reference_engine(define: Define, model: str, attention: str, dtype: str) -> None:
    network, reference = runners(define(model, dtype=dtype, attention=attention, logits=LOGITS), model)
    tokens, _ = tokens_of(model)
    assert_near(three_steps(network, tokens), three_steps(reference, tokens), LOGITS_TOLERANCE[dtype])


@pytest.mark.parametrize("model", some(one_of_each_family(WITHOUT_EXPERTS), 6))
def test_they_are_those_of_a_network_with_one(define: Define, model: str) -> None:
    tokens, _ = tokens_of(model)
    attention = attentions_of(model, MAX_SEQUENCE_LENGTH)[0]
    many, one = (runners(define(model, attention=attention, logits=logits), model)[0] for logits in (LOGITS, 1))
    steps = [one.step(tokens[:, [start]], [start] * MAX_BATCH_SIZE, [0] * MAX_BATCH_SIZE) for start in range(13)]
    assert_close(three_steps(many, tokens), np.stack(steps, axis=1))


def test_other_tokens_of_each_slot(define: Define) -> None:
    network, reference = runners(define("qwen3-sharded", logits=LOGITS), "qwen3-sharded")
    tokens, _ = tokens_of("qwen3-sharded")
    chosen = [[10, 0, 3], [4, 4, 5], [9, 8, 0]]
    found, expected = (runner.step(tokens[:, :11], [0, 0, 0], chosen) for runner in (network, reference))
    assert found.shape[:2] == (3, 3)
    assert_close(found, expected)


@pytest.mark.parametrize("model", ["llama", "qwen2-tied"])
def test_segments_have_them_too(rtx: TensorRT, tmp_path: Path, define: Define, model: str) -> None:
    tokens, _ = tokens_of(model)
    segments, native = Segments(rtx, tmp_path, model, "float32", logits=LOGITS), runners(define(model, logits=LOGITS), model)[0]
    assert_close(three_steps(segments, tokens), three_steps(native, tokens))


@pytest.mark.parametrize("attention", ["native", "mask"])
@pytest.mark.parametrize(("model", "dtype"), [("llama", "float16"), ("qwen2-tied", "bfloat16"), ("qwen3-sharded", "float32")])
def test_it_builds_with_the_tensors_and_profiles_that_are_declared(
    rtx: TensorRT, define: Define, model: str, dtype: str, attention: str
) -> None:
    defined = define(model, dtype=dtype, attention=attention, logits=LOGITS)
    definition = defined.definition
    assert declared(rtx, definition.network) == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in definition.tensors}
    vocab = declared(rtx, definition.network)["logits"][2][-1]
    assert declared(rtx, definition.network)["logits"][2] == (-1, -1, vocab)
    assert [(one.name, one.max_width, one.max_logits) for one in definition.profiles] == [
        ("prefill", 11, 7),
        ("decode", 1, 1),
        ("verify", 7, 7),
    ]
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        config = make_config(definition, defined.options, rtx, messages)
        assert config.num_optimization_profiles == 3
        assert serialize(definition, config, defined.options, rtx, messages, lambda done: None).nbytes > 10_000


def test_segments_build(rtx: TensorRT, tmp_path: Path) -> None:
    segments = Segments(rtx, tmp_path, "qwen2-tied", "float16", logits=LOGITS)
    last = segments.definitions[-1]
    assert declared(rtx, last.network) == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in last.tensors}
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        config = make_config(last, segments.options, rtx, messages)
        assert serialize(last, config, segments.options, rtx, messages, lambda done: None).nbytes > 10_000
