"""The table of attention variants, written out."""

from __future__ import annotations

import pytest

from trt_kvcache import KVLayout
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, attention_variant, cache_layout


def test_there_are_three_variants() -> None:
    assert ATTENTION_VARIANTS == ("native", "mask", "plugin")


@pytest.mark.parametrize(("name", "layout"), [("native", KVLayout.SEPARATE), ("mask", KVLayout.SEPARATE), ("plugin", KVLayout.COMBINED)])
def test_layout_of_the_cache(name: str, layout: KVLayout) -> None:
    assert attention_variant(name).layout is cache_layout(name) is layout


@pytest.mark.parametrize(("name", "release"), [("native", "11.0"), ("mask", "10.15"), ("plugin", "10.3")])
def test_first_release_of_full_tensorrt(name: str, release: str) -> None:
    assert attention_variant(name).first_release == release


@pytest.mark.parametrize("name", ATTENTION_VARIANTS)
def test_a_variant_knows_its_name(name: str) -> None:
    assert attention_variant(name).name == name


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(KeyError):
        attention_variant("flash")
