"""Caches with something in their slots, and what is left of a sequence that moves from one slot to another."""

from __future__ import annotations

from typing import Any

from cache_cases import MAMBA, Image, fill_all, make_cache, mamba_config

from trt_kvcache import HybridCacheConfig, HybridCacheManager

#: Caches whose slots hold whole sequences; the last has no attention layers.
SEQUENCE_KINDS = ("manager", "linear", "hybrid", "states")


def cache_holding(kind: str, memory: Any, stream: Any, *lengths: int, **changes: Any) -> Any:
    """A cache whose active slots hold these many tokens, every byte at random."""
    if kind == "states":
        cache: Any = HybridCacheManager(HybridCacheConfig(layer_types=[MAMBA, MAMBA], mamba=mamba_config()), memory=memory)
    else:
        cache = make_cache(kind, memory, **changes)
    cache.reset_for_new_sequences(lengths, stream=stream)
    fill_all(cache, stream)
    return cache


def move(expected: Image, slot: int, taken: Image, from_slot: int, count: int) -> None:
    """Write the first tokens of a slot of one image, and its states, into another."""
    if count:
        for into, source in zip(expected.rows, taken.rows, strict=True):
            into[slot, :, :, :count] = source[from_slot, :, :, :count]
        for into, source in zip(expected.states, taken.states, strict=True):
            into[slot] = source[from_slot]
