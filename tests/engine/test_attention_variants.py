"""The table of attention variants."""

import pytest

from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, attention_variant, cache_layout


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
