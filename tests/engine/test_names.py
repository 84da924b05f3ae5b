from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.errors import ConfigError


def test_the_names_of_k_and_v_are_those_of_edge_llm():
    assert dataclasses.asdict(DEFAULT_NAMES) == {
        "input_ids": "input_ids",
        "kvcache_start_index": "kvcache_start_index",
        "last_token_ids": "last_token_ids",
        "logits": "logits",
        "k_cache": "k_cache_{i}",
        "v_cache": "v_cache_{i}",
        "present_k_cache": "present_k_cache_{i}",
        "present_v_cache": "present_v_cache_{i}",
        "kv_cache": "past_key_values_{i}",
        "present_kv_cache": "present_key_values_{i}",
        "kv_scales": "kv_scales_{i}",
        "present_kv_scales": "present_kv_scales_{i}",
        "new_lengths": "new_lengths",
        "recurrent_state": "recurrent_state_{i}",
        "conv_state": "conv_state_{i}",
        "present_recurrent_state": "present_recurrent_state_{i}",
        "present_conv_state": "present_conv_state_{i}",
    }


def test_the_pairs_of_states():
    assert DEFAULT_NAMES.state_pair(StateKind.RECURRENT, 3) == ("recurrent_state_3", "present_recurrent_state_3")
    assert TensorNames(conv_state="window.{i}").state_pair(StateKind.CONV, 0) == ("window.0", "present_conv_state_0")


def test_pairs_of_a_layer():
    assert DEFAULT_NAMES.cache_pairs(0) == (("k_cache_0", "present_k_cache_0"), ("v_cache_0", "present_v_cache_0"))
    assert DEFAULT_NAMES.cache_pairs(11) == (("k_cache_11", "present_k_cache_11"), ("v_cache_11", "present_v_cache_11"))


def test_the_pair_of_a_layer_whose_k_and_v_are_one_tensor():
    assert DEFAULT_NAMES.combined_pair(2) == ("past_key_values_2", "present_key_values_2")


def test_pairs_by_the_layout_of_the_cache():
    assert DEFAULT_NAMES.layer_pairs(2, combined=False) == DEFAULT_NAMES.cache_pairs(2)
    assert DEFAULT_NAMES.layer_pairs(2, combined=True) == (DEFAULT_NAMES.combined_pair(2),)


def test_an_engine_with_other_names():
    names = TensorNames(k_cache="past.{i}.key", v_cache="past.{i}.value", present_k_cache="new.{i}.key", present_v_cache="new.{i}.value")
    assert names.cache_pairs(2) == (("past.2.key", "new.2.key"), ("past.2.value", "new.2.value"))
    assert names.logits == "logits"


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_NAMES.logits = "scores"
    with pytest.raises(TypeError):
        TensorNames("tokens")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TensorNames)])
@pytest.mark.parametrize("value", ["", None, 3, b"logits"])
def test_a_name_is_a_non_empty_string(field, value):
    with raises(ConfigError, f"TensorNames.{field}", expected="non-empty string", got=repr(value)):
        TensorNames(**{field: value})


@pytest.mark.parametrize("field", ["k_cache", "v_cache", "present_k_cache", "present_v_cache", "kv_cache", "present_kv_cache"])
@pytest.mark.parametrize("value", ["k_cache", "k_cache_{layer}", "{i}_{layer}", "{i}_{", "{i.x}"])
def test_a_name_per_layer_holds_the_layer_and_nothing_else(field, value):
    with raises(ConfigError, f"TensorNames.{field}", expected="name with {i} for the layer index", got=repr(value)):
        TensorNames(**{field: value})


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ConfigError) as caught:
        TensorNames(v_cache="k_cache_{i}")
    assert str(caught.value) == "TensorNames: k_cache and v_cache are both 'k_cache_{i}'. Each tensor needs a different name."
    with pytest.raises(ConfigError, match=r"^TensorNames: input_ids and logits are both 'x'\."):
        TensorNames(input_ids="x", logits="x")
