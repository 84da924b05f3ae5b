"""Inputs, outputs and profiles of the engines that this package builds, written out."""

from __future__ import annotations

import pytest

from tests.helpers.models import SMALL, with_layers
from trt_kvcache import KVCacheConfig, KVLayerConfig, KVLayout
from trt_kvcache.engine.decoder_cache import cache_config
from trt_kvcache.engine.decoder_tensors import decoder_tensors, shape_at, step_shape
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.model import ModelConfig

#: 4 query heads over 2 K/V heads of 24, 37 tokens.
MODEL = ModelConfig.from_dict(SMALL)


def cache(attention: str = "native", layers: int = 1) -> KVCacheConfig:
    model = with_layers(MODEL, layers)
    return cache_config(model, max_batch_size=3, max_sequence_length=38, dtype="float16", attention=attention)


@pytest.mark.parametrize(
    ("attention", "layout"), [("native", KVLayout.SEPARATE), ("mask", KVLayout.SEPARATE), ("plugin", KVLayout.COMBINED)]
)
def test_the_cache_of_a_model(attention: str, layout: KVLayout) -> None:
    assert cache(attention, layers=2) == KVCacheConfig(
        layers=[KVLayerConfig(num_kv_heads=2, head_dim=24)] * 2,
        max_batch_size=3,
        max_sequence_length=38,
        dtype="float16",
        layout=layout,
    )


STEP_INPUTS = (
    TensorSpec.input("input_ids", (-1, -1), "int32"),
    TensorSpec.input("kvcache_start_index", (-1,), "int32"),
    TensorSpec.input("last_token_ids", (-1, 1), "int32"),
)
LOGITS = TensorSpec.output("logits", (-1, 37), "float32")


def test_tensors_over_a_separate_cache() -> None:
    rows = (-1, 2, 38, 24)
    assert decoder_tensors(MODEL, cache(), DEFAULT_NAMES) == (
        *STEP_INPUTS,
        TensorSpec.input("k_cache_0", rows, "float16"),
        TensorSpec.input("v_cache_0", rows, "float16"),
        TensorSpec.output("present_k_cache_0", rows, "float16", alias="k_cache_0"),
        TensorSpec.output("present_v_cache_0", rows, "float16", alias="v_cache_0"),
        LOGITS,
    )


def test_tensors_over_a_combined_cache() -> None:
    rows = (-1, 2, 2, 38, 24)
    assert decoder_tensors(MODEL, cache("plugin"), DEFAULT_NAMES) == (
        *STEP_INPUTS,
        TensorSpec.input("past_key_values_0", rows, "float16"),
        TensorSpec.output("present_key_values_0", rows, "float16", alias="past_key_values_0"),
        LOGITS,
    )


def test_tensors_have_the_given_names() -> None:
    names = TensorNames(input_ids="tokens", k_cache="past.{i}", present_k_cache="now.{i}", logits="scores")
    found = [spec.name for spec in decoder_tensors(MODEL, cache(layers=2), names)]
    assert found[0] == "tokens"
    assert {"past.0", "past.1", "now.0", "now.1", "v_cache_1"} <= set(found)
    assert found[-1] == "scores"


def test_with_more_logits_the_tokens_can_be_chosen() -> None:
    tensors = {spec.name: spec for spec in decoder_tensors(MODEL, cache(), DEFAULT_NAMES, max_logits_per_slot=2)}
    plain = {spec.name: spec for spec in decoder_tensors(MODEL, cache(), DEFAULT_NAMES)}
    assert list(tensors) == list(plain)
    changed = {name: spec for name, spec in tensors.items() if spec != plain[name]}
    assert changed == {
        "last_token_ids": TensorSpec.input("last_token_ids", (-1, -1), "int32"),
        "logits": TensorSpec.output("logits", (-1, -1, 37), "float32"),
    }


def test_the_shape_of_what_is_chosen_is_not_the_width() -> None:
    sizes = {"batch": 5, "width": 7, "logits": 2}
    names = TensorNames(last_token_ids="which")
    assert step_shape(TensorSpec.input("which", (-1, -1), "int32"), names, **sizes) == (5, 2)
    assert step_shape(TensorSpec.input("which", (-1, 1), "int32"), names, **sizes) == (5, 1)
    assert step_shape(TensorSpec.output("logits", (-1, -1, 37), "float32"), names, **sizes) == (5, 2, 37)
    assert step_shape(TensorSpec.input("input_ids", (-1, -1), "int32"), names, **sizes) == (5, 7)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((-1, -1), (5, 7)), ((-1, 2, 38, 24), (5, 2, 38, 24)), ((3, 4), (3, 4)), ((-1, -1, 40), (5, 7, 40)), ((), ())],
)
def test_the_shape_of_an_enqueue(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert shape_at(shape, batch=5, width=7) == expected
