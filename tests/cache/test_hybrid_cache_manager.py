"""``HybridCacheManager``: routing, shared slots, groups by head dim, one kind of layer alone."""

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import (
    ATTENTION,
    HEADS,
    LAYER_TYPES,
    MAMBA,
    Image,
    Unchanged,
    fill_all,
    hybrid_config,
    kv_config,
    make_cache,
    mamba_config,
)
from trt_kvcache import (
    HybridCacheConfig,
    HybridCacheManager,
    KVCacheConfig,
    KVLayerConfig,
    KVLayout,
    LayerType,
    MambaCacheConfig,
    estimate_memory,
)
from trt_kvcache.errors import ConfigError, LayerIndexError, PlaceError, RangeError, ShapeError, SlotError


def test_the_numbers_of_the_contract(memory):
    stream = memory.create_stream()
    kv = KVCacheConfig(
        layers=[KVLayerConfig(num_kv_heads=2, head_dim=64), KVLayerConfig(num_kv_heads=1, head_dim=128)],
        max_batch_size=4,
        max_sequence_length=256,
        dtype="float16",
        layout=KVLayout.COMBINED,
    )
    mamba = MambaCacheConfig(
        num_layers=1,
        max_batch_size=4,
        num_heads=8,
        head_dim=16,
        state_size=32,
        conv_dim=64,
        conv_kernel=4,
        recurrent_dtype="float32",
        conv_dtype="float16",
    )
    cache = HybridCacheManager(
        HybridCacheConfig(layer_types=[LayerType.ATTENTION, LayerType.MAMBA, LayerType.ATTENTION], kv=kv, mamba=mamba), memory=memory
    )
    cache.reset_for_new_sequences([0, 5, 0], stream=stream)
    view = cache.get_combined_kv_cache(2)
    assert (view.shape, view.is_contiguous) == ((4, 2, 1, 256, 128), True)
    assert cache.get_recurrent_state(1).shape == (4, 8, 16, 32)
    cache.commit_sequence_length(7, stream=stream)
    cache.compact_batch([0, -1, 1], 3, 2, stream=stream)
    assert cache.kv_cache_lengths.numpy().tolist() == [7, 7]
    assert cache.host_kv_cache_lengths == (7, 7)
    saved = cache.capture_kv_cache(0, 7, stream=stream)
    cache.restore_kv_cache(saved, 1, stream=stream)
    lengths = memory.to_device(np.array([3, 1], np.int32), stream=stream)
    cache.commit_sequence_length(lengths, max_increment=3, stream=stream)
    cache.set_active_batch_size(1, stream=stream)
    cache.clear_slot(0, stream=stream)
    assert estimate_memory(cache.config).nbytes == cache.config.nbytes == cache.nbytes == kv.nbytes + mamba.nbytes
    cache.close()


class TestProperties:
    @pytest.fixture
    def config(self):
        return hybrid_config()

    @pytest.fixture
    def cache(self, memory, config):
        with HybridCacheManager(config, memory=memory) as cache:
            yield cache

    def test_configurations_are_those_that_were_given(self, cache, config):
        assert cache.config is config
        assert (cache.kv_config, cache.mamba_config) == (config.kv, config.mamba)

    def test_layers(self, cache):
        assert (cache.layer_types, cache.num_layers, cache.num_recurrent_layers) == (tuple(LAYER_TYPES), 5, 2)

    def test_sizes(self, cache, memory):
        assert (cache.max_batch_size, cache.lengths.max_sequence_length, cache.memory) == (5, 7, memory)

    def test_its_managers_share_its_lengths(self, cache):
        assert cache.kv_cache_manager.lengths is cache.mamba_cache_manager.lengths is cache.lengths

    def test_no_slot_is_active_at_the_start(self, cache):
        assert (cache.active_batch_size, cache.host_kv_cache_lengths, cache.kv_cache_all_empty, cache.parity) == (0, (), True, 0)

    def test_bytes_are_those_of_its_parts(self, cache, memory):
        infos = 3 * 5 * 8 + 2 * 2 * 3 * 8  # for the kernels: layers, words, bytes (and kinds)
        assert memory.live_nbytes == cache.nbytes + cache.lengths.nbytes + infos


#: Each layer by its index among all, and among those of its kind.
ATTENTION_LAYERS, MAMBA_LAYERS = [(1, 0), (2, 1), (4, 2)], [(0, 0), (3, 1)]


@pytest.mark.parametrize("ping_pong", [False, True])
class TestRouting:
    @pytest.fixture
    def cache(self, memory, ping_pong):
        with make_cache("hybrid", memory, ping_pong=ping_pong) as cache:
            yield cache

    @pytest.mark.parametrize(("layer", "inner"), ATTENTION_LAYERS)
    def test_views_of_k_and_v(self, cache, layer, inner):
        manager = cache.kv_cache_manager
        assert cache.get_combined_kv_cache(layer).ptr == manager.get_combined_kv_cache(inner).ptr
        assert cache.get_combined_kv_cache(layer).shape == (5, 2, HEADS[inner][0], 7, HEADS[inner][1])
        assert [view.ptr for view in cache.get_separate_kv_cache(layer)] == [view.ptr for view in manager.get_separate_kv_cache(inner)]

    @pytest.mark.parametrize(("layer", "inner"), ATTENTION_LAYERS)
    def test_configurations_of_layers(self, cache, layer, inner):
        assert cache.get_layer_config(layer) == cache.kv_cache_manager.get_layer_config(inner)

    @pytest.mark.parametrize(("layer", "inner"), MAMBA_LAYERS)
    @pytest.mark.parametrize("name", ["get_recurrent_state", "get_conv_state", "get_next_recurrent_state", "get_next_conv_state"])
    def test_states(self, cache, layer, inner, name):
        assert getattr(cache, name)(layer).ptr == getattr(cache.mamba_cache_manager, name)(inner).ptr

    def test_swap(self, cache, ping_pong):
        cache.swap()
        assert cache.parity == cache.mamba_cache_manager.parity == int(ping_pong)


ATTENTION_GETTERS = ["get_combined_kv_cache", "get_separate_kv_cache", "get_layer_config"]
MAMBA_GETTERS = ["get_recurrent_state", "get_conv_state", "get_next_recurrent_state", "get_next_conv_state"]


@pytest.mark.parametrize("name", ATTENTION_GETTERS + MAMBA_GETTERS)
def test_a_layer_of_another_kind_or_out_of_range(memory, name):
    wanted, other = ("attention", "mamba") if name in ATTENTION_GETTERS else ("mamba", "attention")
    wrong = {index: f"expected a layer of kind {wanted}, got {other}." for index, kind in enumerate(LAYER_TYPES) if kind.value == other}
    wrong |= dict.fromkeys((5, -1), "expected 0 <= layer_idx < 5. Indices never wrap.")
    with make_cache("hybrid", memory) as cache:
        for index, text in wrong.items():
            with pytest.raises(LayerIndexError) as caught:
                getattr(cache, name)(index)
            assert str(caught.value) == f"layer_idx {index}: {text}"
        with raises(LayerIndexError, "layer_idx", expected="integer", got="1.0"):
            getattr(cache, name)(1.0)


@pytest.mark.parametrize("asked", ["kv_cache_manager", "mamba_cache_manager", "lengths"])
def test_slots_are_one_whichever_manager_is_asked(memory, stream, asked):
    with make_cache("hybrid", memory) as cache:
        inner = getattr(cache, asked)
        reset = inner.reset if asked == "lengths" else inner.reset_for_new_sequences
        compact = inner.compact if asked == "lengths" else inner.compact_batch
        fill_all(cache, stream)
        expected = Image(cache)
        expected.zero_states(1)
        reset([3, 0, 2], stream=stream)
        expected.check(cache)
        expected.compact([-1, 1, 0], [3, 0, 2])
        compact([-1, 1, 0], 3, 2, stream=stream)
        expected.check(cache)
        expected.zero_states(0)
        inner.clear_slot(0, stream=stream)
        expected.check(cache)
        expected.zero_states(2, 3)
        inner.set_active_batch_size(4, stream=stream)
        expected.check(cache)
        with Unchanged(cache), pytest.raises(ConfigError, match="cannot go back"):
            inner.rewind(1, 0, stream=stream)
        assert cache.host_kv_cache_lengths == (0, 0, 0, 0)


class TestOneKindOfLayer:
    def test_attention_alone(self, memory, stream):
        config = HybridCacheConfig(layer_types=[ATTENTION] * 3, kv=kv_config())
        with HybridCacheManager(config, memory=memory) as cache:
            assert (cache.mamba_cache_manager, cache.num_recurrent_layers, cache.parity) == (None, 0, 0)
            assert config.nbytes == cache.nbytes == kv_config().nbytes
            cache.reset_for_new_sequences([3, 5], stream=stream)
            with Unchanged(cache):
                cache.swap()
                cache.copy_back(0, 2, stream=stream)
                cache.clear_mamba_states(stream=stream)
                assert cache.capture_recurrent_states(0, stream=stream) == cache.capture_conv_states(0, stream=stream) == []
                cache.restore_recurrent_states([], 0, stream=stream)
                cache.restore_conv_states((), 0, stream=stream)
                tensor = memory.to_device(np.zeros((2, 3, 5), np.float32), stream=stream)
                with raises(ShapeError, "saved", expected="no tensor", got=1):
                    cache.restore_conv_states([tensor], 0, stream=stream)
                del tensor
                with pytest.raises(SlotError):
                    cache.capture_conv_states(5, stream=stream)
                with pytest.raises(PlaceError):
                    cache.clear_mamba_states(stream=None)
            cache.rewind(1, 2, stream=stream)
            assert cache.host_kv_cache_lengths == (3, 2)
            with raises(LayerIndexError, "layer_idx 0", expected="layer of kind mamba", got="attention"):
                cache.get_recurrent_state(0)

    def test_mamba_alone(self, memory, stream):
        config = HybridCacheConfig(layer_types=[MAMBA] * 2, mamba=mamba_config())
        with HybridCacheManager(config, memory=memory) as cache:
            assert (cache.kv_cache_manager, cache.kv_config, cache.kv_head_dim_groups) == (None, None, ())
            assert cache.lengths.max_sequence_length == 2**31 - 1
            cache.reset_for_new_sequences([3, 0], stream=stream)
            fill_all(cache, stream)
            expected = Image(cache)
            expected.compact([1, 0], [3, 0])
            cache.compact_batch([1, 0], 2, 2, stream=stream)
            expected.check(cache)
            with Unchanged(cache):
                assert cache.capture_kv_cache(0, 3, stream=stream) == []
                cache.restore_kv_cache([], 0, stream=stream)
                tensor = memory.to_device(np.zeros((2, 2, 3, 16), np.float16), stream=stream)
                with raises(ShapeError, "saved", expected="no tensor", got=1):
                    cache.restore_kv_cache([tensor], 0, stream=stream)
                del tensor
                for call, error in (
                    (lambda: cache.restore_kv_cache([], 5, stream=stream), SlotError),
                    (lambda: cache.capture_kv_cache(-1, 3, stream=stream), SlotError),
                    (lambda: cache.capture_kv_cache(0, -1, stream=stream), RangeError),
                    (lambda: cache.capture_kv_cache(0, 3, stream=None), PlaceError),
                    (lambda: cache.restore_kv_cache([], 0, stream=None), PlaceError),
                ):
                    with pytest.raises(error):
                        call()


def test_scales(memory):
    layers = [KVLayerConfig(num_kv_heads=h, head_dim=d, k_scale=0.5, v_scale=h) for h, d in HEADS]
    config = HybridCacheConfig(layer_types=LAYER_TYPES, kv=kv_config(layers=layers, dtype="float8_e4m3fn"), mamba=mamba_config())
    with HybridCacheManager(config, memory=memory) as cache:
        for index, layer in enumerate((1, 2, 4)):
            heads = HEADS[index][0]
            assert cache.get_kv_scales(layer).numpy().tolist() == [[0.5] * heads, [float(heads)] * heads]
            assert cache.get_kv_scales(layer).ptr == cache.kv_cache_manager.get_kv_scales(index).ptr
        assert cache.kv_scale_rows is None
    with make_cache("hybrid", memory) as other:
        assert other.get_kv_scales(1) is None
    with HybridCacheManager(HybridCacheConfig(layer_types=[MAMBA] * 2, mamba=mamba_config()), memory=memory) as other:
        assert other.kv_scale_rows is None


def test_scales_by_token(memory):
    config = HybridCacheConfig(layer_types=LAYER_TYPES, kv=kv_config(dtype="int8", scales="token"), mamba=mamba_config())
    with HybridCacheManager(config, memory=memory) as cache:
        assert [cache.get_kv_scales(layer).shape for layer in (1, 2, 4)] == [(5, 2, heads, 8) for heads, _ in HEADS]
        assert cache.kv_scale_rows is cache.kv_cache_manager.kv_scale_rows
        with raises(LayerIndexError, "layer_idx 0", expected="layer of kind attention", got="mamba"):
            cache.get_kv_scales(0)


@pytest.mark.parametrize("config", [None, kv_config(), mamba_config()], ids=["None", "kv", "mamba"])
def test_of_something_else_than_its_configuration(memory, config):
    with raises(ConfigError, "HybridCacheManager", expected="HybridCacheConfig"):
        HybridCacheManager(config, memory=memory)
