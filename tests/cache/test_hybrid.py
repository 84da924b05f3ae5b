"""``HybridCacheManager``: routing, shared slots, groups by head dim. Moves of bytes are in test_compaction, _capture, _mamba."""

import pytest

from tests.helpers.cache_cases import (
    HEADS,
    LAYER_TYPES,
    Image,
    Unchanged,
    fill_all,
    hybrid_config,
    kv_config,
    make_cache,
    rows_of,
    states_of,
)
from trt_kvcache import HybridCacheManager, KVLayout
from trt_kvcache.errors import ClosedError, ConfigError, ShapeError, SlotError


def test_what_it_says_about_itself(memory):
    config = hybrid_config()
    with HybridCacheManager(config, memory=memory) as cache:
        assert (cache.config, cache.kv_config, cache.layer_types) == (config, config.kv, tuple(LAYER_TYPES))
        assert (cache.num_layers, cache.num_recurrent_layers, cache.max_batch_size, cache.memory) == (5, 2, 5, memory)
        assert (cache.lengths.max_batch_size, cache.lengths.max_sequence_length) == (5, 7)
        assert cache.kv_cache_manager.lengths is cache.mamba_cache_manager.lengths is cache.lengths
        assert (cache.active_batch_size, cache.host_kv_cache_lengths, cache.kv_cache_all_empty, cache.parity) == (0, (), True, 0)
        parts = cache.kv_cache_manager, cache.mamba_cache_manager
        tensors = [*rows_of(cache), *states_of(cache), cache.lengths.tensor]
    cache.close()
    assert [memory.live_nbytes, parts[0].closed, parts[1].closed] == [0, True, True]
    for tensor in tensors:
        with pytest.raises(ClosedError):
            _ = tensor.ptr


@pytest.mark.parametrize("ping_pong", [False, True])
def test_layers_are_routed_by_their_absolute_index(memory, ping_pong):
    with make_cache("hybrid", memory, ping_pong=ping_pong) as cache:
        kv, mamba = cache.kv_cache_manager, cache.mamba_cache_manager
        for layer, inner in ((1, 0), (2, 1), (4, 2)):
            assert cache.get_combined_kv_cache(layer).ptr == kv.get_combined_kv_cache(inner).ptr
            assert cache.get_combined_kv_cache(layer).shape == (5, 2, HEADS[inner][0], 7, HEADS[inner][1])
        for name in ("get_recurrent_state", "get_conv_state", "get_next_recurrent_state", "get_next_conv_state"):
            assert [getattr(cache, name)(layer).ptr for layer in (0, 3)] == [getattr(mamba, name)(inner).ptr for inner in (0, 1)]
        cache.swap()
        assert (cache.parity, mamba.parity) == ((1, 1) if ping_pong else (0, 0))


@pytest.mark.parametrize("asked", ["kv_cache_manager", "mamba_cache_manager", "lengths"])
def test_slots_are_one_whichever_manager_is_asked(memory, stream, asked):
    with make_cache("hybrid", memory) as cache:
        inner = getattr(cache, asked)
        reset = inner.reset if asked == "lengths" else inner.reset_for_new_sequences
        compact = inner.compact if asked == "lengths" else inner.compact_batch
        fill_all(cache, stream)
        expected = Image(cache)

        reset([3, 0, 2], stream=stream)
        expected.zero_states(1)
        expected.check(cache)
        compact([-1, 1, 0], 3, 2, stream=stream)
        expected.compact([-1, 1, 0], [3, 0, 2])
        expected.check(cache)
        inner.clear_slot(0, stream=stream)
        expected.zero_states(0)
        expected.check(cache)
        inner.set_active_batch_size(4, stream=stream)
        expected.zero_states(2, 3)
        expected.check(cache)
        with Unchanged(cache), pytest.raises(ConfigError, match=r"^rewind: recurrent states cannot go back"):
            inner.rewind(1, 0, stream=stream)
        assert cache.host_kv_cache_lengths == (0, 0, 0, 0)


def test_groups_are_one_for_each_head_dim_and_what_kernels_take(memory, stream):
    with make_cache("hybrid", memory, layout=KVLayout.COMBINED) as cache:
        fill_all(cache, stream)
        groups = cache.kv_head_dim_groups
        assert [(g.head_dim, g.num_layers, g.max_kv_heads, g.attn_layer_indices) for g in groups] == [(16, 2, 3, (0, 2)), (48, 1, 1, (1,))]
        for group in groups:
            layers = [cache.get_combined_kv_cache([1, 2, 4][index]) for index in group.attn_layer_indices]
            array = group.device_layer_infos
            assert (array.memory, array.shape, array.dtype) == (memory, (group.num_layers, 5), "int64")
            assert [info.data for info in group.layer_infos.host] == array.numpy()[:, 0].tolist() == [layer.ptr for layer in layers]
            assert [info.num_kv_heads for info in group.layer_infos.host] == [layer.shape[2] for layer in layers]
        assert [group.layer_infos for group in cache.kv_cache_manager.kv_head_dim_groups] == [group.layer_infos for group in groups]
    with pytest.raises(ClosedError):
        _ = groups[0].device_layer_infos


NO_TENSOR = "saved: expected no tensor, as there is no"


def test_attention_alone(memory, stream):
    with make_cache("attention", memory) as cache:
        assert (cache.mamba_cache_manager, cache.num_recurrent_layers, cache.parity) == (None, 0, 0)
        assert cache.config.nbytes == cache.nbytes == kv_config().nbytes
        cache.reset_for_new_sequences([3, 5], stream=stream)
        with Unchanged(cache):
            cache.swap()
            cache.copy_back(0, 2, stream=stream)
            cache.clear_mamba_states(stream=stream)
            assert cache.capture_recurrent_states(0, stream=stream) == cache.capture_conv_states(0, stream=stream) == []
            cache.restore_recurrent_states([], 0, stream=stream)
            with pytest.raises(ShapeError, match=f"^{NO_TENSOR} recurrent layer, got 1"):
                cache.restore_conv_states([cache.lengths.tensor], 0, stream=stream)
        cache.rewind(1, 2, stream=stream)
        assert cache.host_kv_cache_lengths == (3, 2)


def test_mamba_alone(memory, stream):
    with make_cache("states", memory) as cache:
        assert (cache.kv_cache_manager, cache.kv_config, cache.kv_head_dim_groups, cache.kv_scales) == (None, None, (), None)
        assert cache.lengths.max_sequence_length == 2**31 - 1
        cache.reset_for_new_sequences([3, 0], stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.compact([1, 0], [3, 0])
        cache.compact_batch([1, 0], 2, 2, stream=stream)
        expected.check(cache)
        capture, restore = cache.capture_kv_cache, cache.restore_kv_cache
        with Unchanged(cache):
            assert capture(0, 3, stream=stream) == []
            restore([], 0, stream=stream)
            with pytest.raises(ShapeError, match=f"^{NO_TENSOR} attention layer, got 1"):
                restore([cache.lengths.tensor], 0, stream=stream)
            with pytest.raises(SlotError, match="slot 5"):
                restore([], 5, stream=stream)
