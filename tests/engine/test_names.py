import dataclasses

import pytest

from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(TensorNames)]
PER_LAYER = ("k_cache", "v_cache", "present_k_cache", "present_v_cache")


def test_the_names_are_those_of_edge_llm():
    single = ("input_ids", "kvcache_start_index", "last_token_ids", "logits")
    combined = {"kv_cache": "past_key_values_{i}", "present_kv_cache": "present_key_values_{i}"}
    separate = {name: f"{name}_{{i}}" for name in PER_LAYER}
    assert dataclasses.asdict(DEFAULT_NAMES) == {**{name: name for name in single}, **separate, **combined}


def test_pairs_of_a_layer():
    assert DEFAULT_NAMES.cache_pairs(11) == (("k_cache_11", "present_k_cache_11"), ("v_cache_11", "present_v_cache_11"))
    names = TensorNames(k_cache="past.{i}.key", v_cache="past.{i}.value", present_k_cache="new.{i}.key", present_v_cache="new.{i}.value")
    assert names.cache_pairs(2) == (("past.2.key", "new.2.key"), ("past.2.value", "new.2.value"))
    assert names.logits == "logits"
    assert names.combined_pair(2) == ("past_key_values_2", "present_key_values_2")
    assert [names.layer_pairs(2, combined=each) for each in (False, True)] == [names.cache_pairs(2), (names.combined_pair(2),)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({field: value}, f".{field}: expected a non-empty string, got {value!r}.")
            for field in FIELDS
            for value in ("", None, 3, b"logits")
        ),
        *(
            ({field: value}, f".{field}: expected a name with {{i}} for the layer index, got {value!r}.")
            for field in (*PER_LAYER, "kv_cache", "present_kv_cache")
            for value in ("k_cache", "k_cache_{layer}", "{i}_{layer}", "{i}_{", "{i.x}")
        ),
        ({"v_cache": "k_cache_{i}"}, ": k_cache and v_cache are both 'k_cache_{i}'. Tensors of an engine have names of their own."),
        ({"input_ids": "x", "logits": "x"}, ": input_ids and logits are both 'x'. Tensors of an engine have names of their own."),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        TensorNames(**changes)
    assert str(caught.value) == f"TensorNames{message}"
