"""The table of attention variants."""

import pytest

from tests.helpers.models import model_of
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.engine.attention_variants import (
    ATTENTION_VARIANTS,
    attention_variant,
    cache_layout,
    tensorrt_attention,
    why_not_native,
    window_in_cache,
)


def test_every_name_has_a_variant():
    assert ATTENTION_VARIANTS == ("native", "mask", "plugin")
    assert [attention_variant(name).name for name in ATTENTION_VARIANTS] == list(ATTENTION_VARIANTS)


@pytest.mark.parametrize(("name", "release"), [("native", "11.0"), ("mask", "10.15"), ("plugin", "10.3")])
def test_first_release_of_full_tensorrt(name, release):
    assert attention_variant(name).first_release == release


@pytest.mark.parametrize(("name", "layout"), [("native", KVLayout.SEPARATE), ("mask", KVLayout.SEPARATE), ("plugin", KVLayout.COMBINED)])
def test_layout_of_the_cache(name, layout):
    assert cache_layout(name) is layout


def test_unknown_name():
    with pytest.raises(KeyError):
        attention_variant("causal")


@pytest.mark.parametrize(("length", "window"), [(38, 7), (8, 7), (7, None)])
def test_a_window_counts_where_a_sequence_exceeds_it(length, window):
    assert window_in_cache(model_of("mistral-window").layers[0].mixer, length) == window


def test_layers_without_a_window():
    assert window_in_cache(model_of("gemma2").layers[1].mixer, 38) is None


@pytest.mark.parametrize(
    ("model", "length", "chosen", "why"),
    [
        ("llama", 64, "native", None),
        ("gemma3-bias", 38, "mask", "layers[1].mixer.window = 12, and TensorRT's attention layer has no window"),
        ("gemma3-bias", 12, "native", None),
        ("gemma2", 7, "mask", "layers[0].mixer.softcap = 2.0, and TensorRT's attention layer has no soft cap"),
    ],
)
def test_the_attention_layer_of_tensorrt_is_native_where_it_computes_the_model(model, length, chosen, why):
    assert tensorrt_attention(model_of(model), length) == chosen
    assert why_not_native(model_of(model), length) == why
