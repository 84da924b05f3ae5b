"""Reprs of caches: kind, sizes, dtype and slots in use."""

from __future__ import annotations

import pytest

from tests.helpers.recording import kv_config
from trt_kvcache import (
    HostMemory,
    KVCacheManager,
    MambaCacheConfig,
    MambaCacheManager,
    PromptCache,
    SequenceCacheManager,
)


@pytest.fixture
def cache():
    memory = HostMemory()
    with KVCacheManager(kv_config(slots=3, limit=16), memory=memory) as made:
        made.reset_for_new_sequences([2, 0], stream=memory.create_stream())
        yield made


def test_a_cache_shows_its_sizes_and_state(cache):
    layers, dtype = cache.kv_config.num_layers, cache.kv_config.dtype
    head = f"KVCacheManager({layers} attention layers in {dtype}, 3 slots of 16 tokens, "
    assert repr(cache) == f"{head}2 active, on cpu)"
    cache.close()
    assert repr(cache) == f"{head}closed, on cpu)"


def test_a_cache_of_states_shows_no_length():
    config = MambaCacheConfig(num_layers=2, max_batch_size=4, conv_dim=64, conv_kernel=3)
    with MambaCacheManager(config, memory=HostMemory()) as cache:
        assert repr(cache) == "MambaCacheManager(2 layers of states, 4 slots of any length, 0 active, on cpu)"


def test_what_works_on_a_cache_shows_itself(cache):
    with PromptCache(cache, max_bytes=1 << 20) as prompts:
        assert repr(prompts) == "PromptCache(entries=0, nbytes=0 of 1048576, hits=0, misses=0)"
    assert repr(prompts) == "PromptCache(closed, hits=0, misses=0)"
    assert repr(cache.memory) == f"HostMemory(live_nbytes={cache.memory.live_nbytes})"
    assert repr(PromptCache(cache)).startswith("PromptCache(")


def test_sequences_show_their_cache():
    memory = HostMemory()
    with KVCacheManager(kv_config(slots=3, limit=16), memory=memory) as cache, SequenceCacheManager(cache) as sequences:
        assert repr(sequences) == f"SequenceCacheManager(0 sequences, over {cache!r})"


def test_a_commit_without_an_active_slot_changes_nothing():
    memory = HostMemory()
    with KVCacheManager(kv_config(slots=3, limit=16), memory=memory) as cache:
        stream = memory.create_stream()
        cache.commit_sequence_length(3, stream=stream)
        assert cache.host_kv_cache_lengths == ()
        cache.reset_for_new_sequences([0], stream=stream)
        assert cache.host_kv_cache_lengths == (0,)
