"""Small caches of every kind, their contents as bytes and NumPy views, and checks that a call left them unchanged."""

import numpy as np
import pytest

from trt_kvcache import (
    CacheConfig,
    DeviceTensor,
    HostMemory,
    HybridCacheConfig,
    HybridCacheManager,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LayerType,
    LinearKVCache,
    MambaCacheConfig,
    MambaCacheManager,
)
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import CapacityError, LengthsUnknown

B, S = 5, 7
#: (H, D) per attention layer: two of one head dim, with different heads.
HEADS = [(2, 16), (1, 48), (3, 16)]
#: A slot's recurrent state has 30 elements, its conv state 21: neither is a multiple of 16 bytes.
STATES = {"num_heads": 2, "head_dim": 3, "state_size": 5, "conv_dim": 7, "conv_kernel": 3}
ATTENTION, MAMBA = LayerType.ATTENTION, LayerType.MAMBA
LAYER_TYPES = [MAMBA, ATTENTION, ATTENTION, MAMBA, ATTENTION]
#: The last but one is a hybrid whose recurrent layers keep a conv state only; the last is quantized, with scales by token.
KINDS = ("manager", "linear", "mamba", "hybrid", "conv", "scaled")
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
#: Caches whose slots hold whole sequences; "states" has no attention layers.
SEQUENCE_KINDS = ("manager", "linear", "hybrid", "conv", "states", "scaled")
NO_RECURRENT_STATE = dict.fromkeys(("num_heads", "head_dim", "state_size"), 0)


def kv_config(heads=HEADS, **changes):
    layers = [KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in heads]
    return KVCacheConfig(**{"layers": layers, "max_batch_size": B, "max_sequence_length": S, **changes})


def mamba_config(**changes):
    return MambaCacheConfig(**{"num_layers": 2, "max_batch_size": B, **STATES, **changes})


def hybrid_config(layer_types=LAYER_TYPES, *, ping_pong=False, states=None, **changes):
    slots = changes.get("max_batch_size", B)
    kv = kv_config(**changes)
    states = mamba_config(ping_pong=ping_pong, max_batch_size=slots, max_sequence_length=kv.max_sequence_length, **(states or {}))
    return HybridCacheConfig(
        layer_types=layer_types, kv=kv if ATTENTION in layer_types else None, mamba=states if MAMBA in layer_types else None
    )


def linear_config(**changes):
    states = {"num_mamba_layers": 2, "mamba_num_heads": 2, "mamba_head_dim": 3, "ssm_state_size": 5, "conv_dim": 7, "conv_kernel": 3}
    kv = {"num_attention_layers": 2, "max_batch_size": B, "max_sequence_length": S, "num_kv_heads": 2, "head_dim": 16}
    return CacheConfig(**{**kv, **states, **changes})


def make_cache(kind, memory, *, ping_pong=False, **changes):
    """A cache of five slots of seven tokens; ``changes`` are for K and V. Hybrids of one kind of layers: attention and states."""
    if kind == "manager":
        return KVCacheManager(kv_config(**changes), memory=memory)
    if kind == "scaled":
        quantized = {"dtype": "float8_e4m3fn" if changes.get("dtype") == "float8_e4m3fn" else "int8", "scales": "token"}
        return KVCacheManager(kv_config(**{**changes, **quantized}), memory=memory)
    if kind == "linear":
        return LinearKVCache(linear_config(ping_pong=ping_pong, **changes), memory=memory)
    if kind == "mamba":
        return MambaCacheManager(mamba_config(ping_pong=ping_pong), memory=memory)
    if kind == "conv":
        return HybridCacheManager(hybrid_config(ping_pong=ping_pong, states=NO_RECURRENT_STATE, **changes), memory=memory)
    types = {"attention": [ATTENTION] * 3, "states": [MAMBA] * 2}.get(kind, LAYER_TYPES)
    return HybridCacheManager(hybrid_config(types, ping_pong=ping_pong, **changes), memory=memory)


def on_device(memory, values, stream):
    """These int32 values in a memory."""
    return memory.to_device(np.array(values, np.int32), stream=stream)


def _layers(cache, kind):
    """What to call the layers of one kind."""
    if isinstance(cache, HybridCacheManager):
        return [index for index, other in enumerate(cache.layer_types) if other is kind]
    if kind is MAMBA:
        return list(range(getattr(cache, "num_recurrent_layers", 0)))
    return [] if isinstance(cache, MambaCacheManager) else list(range(cache.num_layers))


def rows_of(cache):
    return [cache.get_combined_kv_cache(index) for index in _layers(cache, ATTENTION)]


def scales_of(cache):
    """Scales by token of each attention layer, [B, 2, H, S']."""
    found = [cache.get_kv_scales(index) for index in _layers(cache, ATTENTION)] if cache.kv_scale_rows is not None else []
    return [one for one in found if one is not None]


def _has_recurrent_states(cache):
    return cache.mamba_config is not None and cache.mamba_config.recurrent_storage is not None


def states_of(cache):
    """Current recurrent, then current conv states."""
    layers = _layers(cache, MAMBA)
    recurrent = layers if _has_recurrent_states(cache) else []
    return [cache.get_recurrent_state(index) for index in recurrent] + [cache.get_conv_state(index) for index in layers]


def next_states_of(cache):
    layers = _layers(cache, MAMBA)
    recurrent = layers if _has_recurrent_states(cache) else []
    return [cache.get_next_recurrent_state(index) for index in recurrent] + [cache.get_next_conv_state(index) for index in layers]


def whole(tensor):
    """All bytes of the allocation behind a view."""
    return DeviceTensor(tensor.allocation, shape=(tensor.allocation.nbytes,), dtype="uint8")


def fill_all(cache, stream, seed=0, *, value=None):
    """Overwrite every byte of K, V, scales and states, padding included, at random or with a value; return one array per allocation."""
    random, written = np.random.default_rng(seed), {}
    for tensor in map(whole, [*rows_of(cache), *scales_of(cache), *states_of(cache), *next_states_of(cache)]):
        if tensor.ptr not in written:
            content = random.integers(0, 256, tensor.shape, np.uint8) if value is None else np.full(tensor.shape, value, np.uint8)
            cache.memory.upload(tensor, written.setdefault(tensor.ptr, content), stream=stream)
    cache.memory.synchronize(stream)
    return list(written.values())


def cache_holding(kind, memory, stream, *lengths, **changes):
    """A cache whose active slots hold these many tokens, every byte at random."""
    cache = make_cache(kind, memory, **changes)
    cache.reset_for_new_sequences(lengths, stream=stream)
    fill_all(cache, stream)
    return cache


class Image:
    """A copy of every byte of a cache. What is written into its views is what the cache should hold later."""

    def __init__(self, cache):
        #: The views that were copied: of rows, of current states, of next states, of scales by token.
        self.tensors = rows_of(cache), states_of(cache), next_states_of(cache), scales_of(cache)
        self._bytes = {id(tensor.allocation): whole(tensor).numpy() for tensors in self.tensors for tensor in tensors}
        #: Bytes that may differ: scales behind the last token of a slot move with those of the four that it is among, or do not.
        self._unknown = {name: np.zeros(content.shape, bool) for name, content in self._bytes.items()}
        #: K and V of each attention layer, bytes [B, 2, H, S, row]; states of each recurrent layer, bytes [B, ..., row].
        self.rows, self.states, self.next_states = ([self._view(tensor) for tensor in tensors] for tensors in self.tensors[:3])
        #: Scales by token of each attention layer, bytes [B, 2, H, S', 4].
        self.scales = [self._scales_view(tensor, self._bytes) for tensor in self.tensors[3]]
        self._unknown_scales = [self._scales_view(tensor, self._unknown) for tensor in self.tensors[3]]

    def _view(self, tensor):
        size = itemsize(tensor.dtype)
        shape = (*tensor.shape[:-1], tensor.shape[-1] * size)
        strides = (*(stride * size for stride in tensor.strides[:-1]), 1)
        return np.ndarray(shape, np.uint8, self._bytes[id(tensor.allocation)], tensor.offset, strides)

    def _scales_view(self, tensor, contents):
        strides = (*(stride * 4 for stride in tensor.strides), 1)
        content = contents[id(tensor.allocation)]
        return np.ndarray((*tensor.shape, 4), content.dtype, content, tensor.offset, strides)

    def move_scales(self, slot, sources, from_slot, count):
        """Write the scales of the first tokens of a slot of other scales into a slot of this image."""
        for into, unknown, source in zip(self.scales, self._unknown_scales, sources, strict=True):
            into[slot, :, :, :count] = source[from_slot, :, :, :count]
            unknown[slot, :, :, :count] = False
            unknown[slot, :, :, count : -(-count // 4) * 4] = True

    def compact(self, mapping, lengths):
        """Move the first tokens, and the states, of each slot that is kept."""
        before = [[array.copy() for array in arrays] for arrays in (self.rows, self.states, self.scales)]
        for old, new in enumerate(mapping):
            if new >= 0:
                self.move_scales(new, before[2], old, lengths[old])
                for array, source in zip(self.rows, before[0], strict=True):
                    array[new, :, :, : lengths[old]] = source[old, :, :, : lengths[old]]
                for array, source in zip(self.states, before[1], strict=True):
                    array[new] = source[old]

    def move(self, slot, taken, from_slot, count):
        """Write the first tokens of a slot of another image, and its states, into a slot of this one."""
        if count:
            for into, source in zip(self.rows, taken.rows, strict=True):
                into[slot, :, :, :count] = source[from_slot, :, :, :count]
            self.move_scales(slot, taken.scales, from_slot, count)
            for into, source in zip(self.states, taken.states, strict=True):
                into[slot] = source[from_slot]

    def zero_states(self, *slots):
        for array in self.states:
            array[list(slots)] = 0

    def clear_states(self):
        """Zero the current states, padding included."""
        for tensor in self.tensors[1]:
            self._bytes[id(tensor.allocation)][:] = 0

    def check(self, cache):
        """Every byte is as this image says, and nothing has moved."""
        tensors = rows_of(cache), states_of(cache), next_states_of(cache), scales_of(cache)
        for before, now in zip(self.tensors, tensors, strict=True):
            assert [tensor.ptr for tensor in now] == [tensor.ptr for tensor in before]
            for tensor in now:
                name = id(tensor.allocation)
                assert ((whole(tensor).numpy() == self._bytes[name]) | self._unknown[name]).all()


def state_of_lengths(lengths):
    """Everything that an operation could change in a ``Lengths``."""
    try:
        host = lengths.host
    except LengthsUnknown as error:
        host = str(error)
    return {
        "device": lengths.tensor.numpy().tolist(),
        "active": (lengths.active_batch_size, lengths.active_tensor.shape, lengths.active_tensor.ptr, lengths.tensor.ptr),
        "mirror": (host, lengths.upper_bounds, lengths.all_empty),
    }


def state_of(cache):
    """Everything beside K, V and states that an operation could change."""
    return {**state_of_lengths(cache.lengths), "cache": (cache.active_batch_size, getattr(cache, "parity", 0))}


class Unchanged:
    """Inside, neither a byte nor the state of a cache changes."""

    def __init__(self, cache):
        self.cache = cache

    def __enter__(self):
        self.before = Image(self.cache), state_of(self.cache), self.cache.memory.live_nbytes

    def __exit__(self, kind, error, trace):
        if error is None:
            self.before[0].check(self.cache)
            assert state_of(self.cache) == self.before[1]
            assert self.cache.memory.live_nbytes <= self.before[2]  # less: what nothing refers to was collected meanwhile


class CapturingMemory(HostMemory):
    """Host memory that can claim to capture. What is launched meanwhile runs."""

    capturing = False

    def is_capturing(self, stream):
        self.check_stream(stream)
        return self.capturing


class FailingMemory(CapturingMemory):
    """Host memory whose allocations, those of page-locked memory too, fail: ``failures`` of them, after ``left`` others."""

    left, failures, error = 0, 0, CapacityError

    def allocate(self, *arguments, **keywords):
        self._count()
        return super().allocate(*arguments, **keywords)

    def staging(self, *arguments):
        self._count()
        return super().staging(*arguments)

    def _count(self):
        if self.failures and not self.left:
            self.failures -= 1
            raise self.error("no room.")
        self.left = max(0, self.left - 1)
