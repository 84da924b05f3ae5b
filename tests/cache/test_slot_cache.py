"""``SlotCache``: what every manager shares. Life of the memory, lengths of the slots, shared lengths, refused arguments."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    fill_all,
    make_cache,
    next_states_of,
    rows_of,
    states_of,
    whole,
)
from tests.helpers.observe import fill_kv, unchanged
from trt_kvcache import (
    CacheConfig,
    HostMemory,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    Lengths,
    LinearKVCache,
)
from trt_kvcache.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DTypeError,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
KINDS = pytest.mark.parametrize("kind", [KVCacheManager, LinearKVCache], ids=lambda kind: kind.__name__)
# B=3, S=7; layers of (H, D)
HEADS = [(2, 16), (1, 32), (4, 48)]
B, S = 3, 7


def kv_config(heads=HEADS, **changes):
    layers = [KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in heads]
    return KVCacheConfig(**{"layers": layers, "max_batch_size": B, "max_sequence_length": S, **changes})


def make(kind, memory, **changes):
    """A cache of the kind, of two layers."""
    if kind is KVCacheManager:
        return KVCacheManager(kv_config(HEADS[:2], **changes), memory=memory)
    fields = {"num_attention_layers": 2, "max_batch_size": B, "max_sequence_length": S, "num_kv_heads": 2, "head_dim": 16}
    return LinearKVCache(CacheConfig(**{**fields, **changes}), memory=memory)


def as_bytes(tensor):
    """The elements of a view as bytes [..., itemsize]: NaN compares equal to itself."""
    array = np.ascontiguousarray(tensor.numpy())
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def infos_nbytes(cache):
    """Bytes of the arrays that tell kernels where the layers are."""
    return sum(group.device_layer_infos.nbytes for group in cache.kv_head_dim_groups)


def every_operation(cache, stream):
    memory = cache.memory
    cache.reset_for_new_sequences([1, 5], stream=stream)
    cache.commit_sequence_length(1, stream=stream)
    cache.commit_sequence_length([1, 0], stream=stream)
    cache.commit_sequence_length(memory.to_device(np.array([0, 1], np.int32), stream=stream), max_increment=1, stream=stream)
    cache.sync_lengths(stream=stream)
    cache.set_active_batch_size(3, stream=stream)
    cache.rewind(0, 2, stream=stream)
    cache.clear_slot(1, stream=stream)
    assert cache.host_kv_cache_lengths == (2, 0, 0)


@KINDS
@LAYOUTS
def test_no_operation_touches_k_and_v_or_moves_them(memory, stream, kind, layout):
    with make(kind, memory, layout=layout) as cache:
        written = fill_kv(cache, stream=stream)
        views = [cache.get_combined_kv_cache(index) for index in range(2)]
        before = [view.ptr for view in views], cache.lengths.tensor.ptr, memory.live_nbytes
        every_operation(cache, stream)
        gc.collect()
        views = [cache.get_combined_kv_cache(index) for index in range(2)]
        assert ([view.ptr for view in views], cache.lengths.tensor.ptr, memory.live_nbytes) == before
        for view, expected in zip(views, written, strict=False):
            assert np.array_equal(whole(view).numpy(), expected)


def test_operations_do_not_allocate():
    class Counting(HostMemory):
        allocations = 0

        def allocate(self, nbytes, *, zeroed=False, stream):
            self.allocations += 1
            return super().allocate(nbytes, zeroed=zeroed, stream=stream)

    memory = Counting()
    with KVCacheManager(kv_config(dtype="int8"), memory=memory) as cache:
        made = len(HEADS) + 1 + len(HEADS) + 1  # layers, scales, infos of three head dims, lengths
        assert memory.allocations == made
        stream = memory.create_stream()
        every_operation(cache, stream)
        cache.compact_batch([2, 0, 1], 3, 3, stream=stream)
        assert memory.allocations == made + 1  # the test's own tensor


class TestSharedLengths:
    def test_two_managers_over_one_object(self, memory, stream):
        lengths = Lengths(B, S, memory=memory)
        first = KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        second = LinearKVCache(
            CacheConfig(num_attention_layers=2, max_batch_size=B, max_sequence_length=S, num_kv_heads=2, head_dim=16),
            memory=memory,
            lengths=lengths,
        )
        first.reset_for_new_sequences([1, 2], stream=stream)
        second.commit_sequence_length(3, stream=stream)
        assert first.lengths is second.lengths is lengths
        assert first.host_kv_cache_lengths == second.host_kv_cache_lengths == (4, 5)
        assert first.kv_cache_lengths.ptr == second.kv_cache_lengths.ptr
        infos = infos_nbytes(first) + infos_nbytes(second)
        assert memory.live_nbytes == first.nbytes + second.nbytes + lengths.nbytes + infos
        first.close()
        second.commit_sequence_length(1, stream=stream)
        second.close()
        assert memory.live_nbytes == lengths.nbytes
        lengths.close()

    @pytest.mark.parametrize(("batch", "length"), [(B + 1, S), (B, S - 1)])
    def test_of_other_sizes_are_refused(self, memory, batch, length):
        lengths = Lengths(batch, length, memory=memory)
        with pytest.raises(ConfigError) as caught:
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        assert str(caught.value) == f"lengths: expected those of 3 slots of 7 tokens, got {batch} slots of {length}."
        assert memory.live_nbytes == lengths.nbytes
        lengths.close()

    def test_of_another_memory_are_refused(self, memory):
        lengths = Lengths(B, S, memory=HostMemory())
        before = memory.live_nbytes
        with pytest.raises(PlaceError) as caught:
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        assert str(caught.value) == "lengths: expected those of the memory that the cache is in, got another one's (cpu)."
        assert memory.live_nbytes == before


class TestLife:
    @KINDS
    def test_close_is_idempotent_and_the_context_manager_closes(self, memory, kind):
        before = memory.live_nbytes
        with make(kind, memory) as cache:
            assert not cache.closed
        assert cache.closed
        assert memory.live_nbytes == before
        cache.close()
        cache.close()
        assert memory.live_nbytes == before

    def test_an_error_inside_closes_and_passes(self, memory):
        before = memory.live_nbytes
        with pytest.raises(ZeroDivisionError), make(KVCacheManager, memory):
            _ = 1 / 0
        assert memory.live_nbytes == before

    @KINDS
    def test_after_close_every_operation_and_address_is_refused(self, memory, stream, kind):
        cache = make(kind, memory, dtype="int8")
        tensors = [cache.get_combined_kv_cache(0), *cache.get_separate_kv_cache(1), cache.kv_scales, cache.lengths.tensor]
        increments = memory.to_device(np.zeros(0, np.int32), stream=stream)
        cache.close()
        for call in (
            lambda: cache.reset_for_new_sequences([], stream=stream),
            lambda: cache.commit_sequence_length(0, stream=stream),
            lambda: cache.commit_sequence_length([], stream=stream),
            lambda: cache.commit_sequence_length(increments, max_increment=0, stream=stream),
            lambda: cache.set_active_batch_size(0, stream=stream),
            lambda: cache.clear_slot(0, stream=stream),
            lambda: cache.rewind(0, 0, stream=stream),
            lambda: cache.sync_lengths(stream=stream),
            lambda: cache.compact_batch([], 0, 0, stream=stream),
            lambda: cache.capture_kv_cache(0, 1, stream=stream),
            lambda: cache.restore_kv_cache([], 0, stream=stream),
            lambda: cache.kv_head_dim_groups,
            lambda: cache.get_combined_kv_cache(0),
            lambda: cache.get_separate_kv_cache(0),
            lambda: cache.kv_cache_lengths,
            lambda: cache.kv_scales,
            lambda: cache.__enter__(),
        ):
            with pytest.raises(ClosedError) as caught:
                call()
            assert str(caught.value) == f"this {kind.__name__} is closed."
        for tensor in tensors:
            for read in (lambda tensor=tensor: tensor.ptr, tensor.numpy, tensor.__dlpack__):
                with pytest.raises(ClosedError, match="closed"):
                    read()

    @KINDS
    def test_a_manager_is_never_copied(self, memory, kind):
        with make(kind, memory) as cache:
            for operation in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError) as caught:
                    operation(cache)
                assert str(caught.value) == f"a {kind.__name__} owns device memory and cannot be copied or pickled."

    @KINDS
    def test_a_view_keeps_its_owner_alive(self, memory, stream, kind):
        before = memory.live_nbytes
        cache = make(kind, memory)
        fill_kv(cache, stream=stream)
        view = cache.get_separate_kv_cache(0)[1][1:2]
        expected = as_bytes(view)
        owner = view.allocation.nbytes
        del cache
        gc.collect()
        assert memory.live_nbytes - before == owner
        assert np.array_equal(as_bytes(view), expected)
        del view
        gc.collect()
        assert memory.live_nbytes == before

    @KINDS
    def test_the_last_dlpack_consumer_frees_the_memory(self, kind):
        memory = HostMemory()
        cache = make(kind, memory)
        fill_kv(cache, stream=memory.create_stream())
        view = cache.get_combined_kv_cache(1)
        owner = view.allocation.storage
        while owner.base is not None:
            owner = owner.base
        storage = weakref.ref(owner)
        del owner
        expected = as_bytes(view)
        first, second = np.from_dlpack(view), np.from_dlpack(view[1:2])
        cache.close()
        assert memory.live_nbytes == 0
        with pytest.raises(ClosedError):
            _ = view.ptr
        del cache, view
        gc.collect()
        assert np.array_equal(np.ascontiguousarray(first).view(np.uint8).reshape(expected.shape), expected)
        del first
        gc.collect()
        assert storage() is not None
        assert np.array_equal(np.ascontiguousarray(second).view(np.uint8).reshape(expected[1:2].shape), expected[1:2])
        del second
        gc.collect()
        assert storage() is None


class FailingMemory(HostMemory):
    """Host memory whose n-th call of one operation fails."""

    def __init__(self, operation, fails_at):
        super().__init__()
        self.operation, self.left = operation, fails_at

    def _count(self, operation):
        self.left -= operation == self.operation
        if self.left == 0:
            raise CapacityError(f"the {operation} failed.")

    def allocate(self, nbytes, *, zeroed=False, stream):
        self._count("allocate")
        return super().allocate(nbytes, zeroed=zeroed, stream=stream)

    def upload(self, destination, source, *, stream):
        self._count("upload")
        super().upload(destination, source, stream=stream)

    def synchronize(self, stream):
        self._count("synchronize")
        super().synchronize(stream)

    def create_stream(self):
        self._count("create_stream")
        return super().create_stream()


# An int8 cache: lengths, its layers (3, or 1 buffer), scales, infos of its head dims (3, or 1).
STEPS = [
    *[(KVCacheManager, "allocate", step) for step in range(1, 9)],
    *[(LinearKVCache, "allocate", step) for step in range(1, 5)],
    *[(kind, "upload", 1) for kind in (KVCacheManager, LinearKVCache)],
    *[(kind, what, step) for kind in (KVCacheManager, LinearKVCache) for what in ("synchronize", "create_stream") for step in (1, 2)],
]


def make_int8(kind, memory):
    return KVCacheManager(kv_config(dtype="int8"), memory=memory) if kind is KVCacheManager else make(kind, memory, dtype="int8")


@pytest.mark.parametrize(("kind", "operation", "step"), STEPS)
def test_a_failed_construction_releases_everything(kind, operation, step):
    memory = FailingMemory(operation, step)
    gc.disable()  # release is not left to the garbage collector
    try:
        with pytest.raises(CapacityError) as caught:
            make_int8(kind, memory)
        assert str(caught.value) == f"the {operation} failed."
        assert memory.live_nbytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("kind", "operation", "calls"), [(KVCacheManager, "allocate", 8), (LinearKVCache, "allocate", 4)])
def test_the_steps_above_are_all_there_are(kind, operation, calls):
    memory = FailingMemory(operation, calls + 1)
    cache = make_int8(kind, memory)
    assert memory.left == 1
    cache.close()


def test_no_room_on_the_host():
    memory = HostMemory()
    kv = kv_config([(1 << 30, 16), (1, 16)], max_batch_size=2**31 - 1, max_sequence_length=2**31 - 1)
    with pytest.raises(CapacityError, match="could not be allocated"):
        KVCacheManager(kv, memory=memory)
    assert memory.live_nbytes == 0


#: Called on lengths [3, 4] of B=3, S=7. All forms of nonsense are in test_lengths.py; here K and V are watched too.
BAD = [
    ("reset_for_new_sequences", ([1] * 4,), RangeError, "reuse_lengths: expected at most max_batch_size=3 lengths, got 4."),
    ("reset_for_new_sequences", ([0, S + 1],), RangeError, "reuse_lengths[1]: expected an integer from 0 to 7, got 8."),
    ("reset_for_new_sequences", (np.array([0.5]),), DTypeError, "reuse_lengths: expected int32 values on the host, got float64."),
    ("commit_sequence_length", (-1,), RangeError, "increment: expected at least 0, got -1."),
    ("commit_sequence_length", ([0, -1],), RangeError, "increment[1]: expected at least 0, got -1."),
    ("commit_sequence_length", ([0],), ShapeError, "increment: expected one value for each of 2 active slots, got 1."),
    (
        "commit_sequence_length",
        (4,),
        CapacityError,
        "slot 1 holds 4 tokens; committing 4 more exceeds max_sequence_length=7. Nothing was changed.",
    ),
    (
        "commit_sequence_length",
        ([5, 4],),
        CapacityError,
        "slot 0 holds 3 tokens; committing 5 more exceeds max_sequence_length=7. Nothing was changed.",
    ),
    ("set_active_batch_size", (4,), RangeError, "active batch size: expected an integer from 0 to 3, got 4."),
    ("set_active_batch_size", (-1,), RangeError, "active batch size: expected an integer from 0 to 3, got -1."),
    ("clear_slot", (2,), SlotError, "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    ("clear_slot", (-1,), SlotError, "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    ("rewind", (-1, 0), SlotError, "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    ("rewind", (1, 5), RangeError, "rewind: slot 1 holds 4 tokens; expected 0 to 4, got 5."),
]


@KINDS
@pytest.mark.parametrize(("operation", "arguments", "error", "text"), BAD)
def test_bad_arguments_change_nothing(memory, stream, kind, operation, arguments, error, text):
    with make(kind, memory) as cache:
        fill_kv(cache, stream=stream)
        cache.reset_for_new_sequences([3, 4], stream=stream)
        with unchanged(cache), pytest.raises(error) as caught:
            getattr(cache, operation)(*arguments, stream=stream)
        assert str(caught.value) == text


@KINDS
def test_a_stream_is_asked_for_by_name_and_must_be_one(memory, stream, kind):
    operations = {
        "reset_for_new_sequences": ([1],),
        "commit_sequence_length": (1,),
        "set_active_batch_size": (1,),
        "clear_slot": (0,),
        "rewind": (0, 0),
        "sync_lengths": (),
    }
    with make(kind, memory) as cache:
        fill_kv(cache, stream=stream)
        cache.reset_for_new_sequences([3, 4], stream=stream)
        with unchanged(cache):
            for operation, arguments in operations.items():
                with pytest.raises(PlaceError, match=r"^stream: expected"):
                    getattr(cache, operation)(*arguments, stream=None)
                with pytest.raises(TypeError, match="stream"):
                    getattr(cache, operation)(*arguments)
                with pytest.raises(TypeError, match="positional"):
                    getattr(cache, operation)(*arguments, stream)


@pytest.mark.parametrize("name", ["active_batch_size", "host_kv_cache_lengths", "kv_cache_all_empty", "kv_cache_lengths"])
def test_lengths_are_not_told_after_close(name):
    cache = KVCacheManager(
        KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=1, head_dim=8)], max_batch_size=2, max_sequence_length=3), memory=HostMemory()
    )
    cache.close()
    with pytest.raises(ClosedError, match=r"^this KVCacheManager is closed\."):
        getattr(cache, name)


ATTENTION_GETTERS = ["get_combined_kv_cache", "get_separate_kv_cache", "get_layer_config"]


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
class TestLifeWithStates:
    """Of the managers with states. That of the K/V caches is in test_kv_cache_manager.py."""

    def test_after_close_every_operation_and_address_is_refused(self, memory, stream, kind):
        before = memory.live_nbytes
        cache = make_cache(kind, memory, ping_pong=True, dtype="int8")
        tensors = [*rows_of(cache), *states_of(cache), *next_states_of(cache), cache.lengths.tensor]
        managers = [] if kind == "mamba" else [cache.kv_cache_manager, cache.mamba_cache_manager]
        cache.close()
        cache.close()
        assert memory.live_nbytes == before
        arguments = {
            "reset_for_new_sequences": ([],),
            "commit_sequence_length": (0,),
            "set_active_batch_size": (0,),
            "clear_slot": (0,),
            "sync_lengths": (),
            "compact_batch": ([], 0, 0),
            "copy_back": (0, 1),
            "clear_mamba_states": (),
        }
        calls = [lambda name=name, given=given: getattr(cache, name)(*given, stream=stream) for name, given in arguments.items()]
        calls += [lambda: cache.get_recurrent_state(0), lambda: cache.get_next_conv_state(0), lambda: cache.kv_cache_lengths]
        calls += [cache.swap, cache.__enter__]
        if kind == "hybrid":
            names = ["kv_cache_manager", "mamba_cache_manager", "kv_head_dim_groups", "kv_scales"]
            calls += [lambda name=name: getattr(cache, name) for name in names]
            calls += [lambda name=name: getattr(cache, name)(1) for name in ATTENTION_GETTERS]
        for call in calls:
            with pytest.raises(ClosedError, match=rf"^this {type(cache).__name__} is closed\.$"):
                call()
        assert all(manager.closed for manager in managers)
        for tensor in tensors:
            with pytest.raises(ClosedError):
                _ = tensor.ptr

    def test_it_is_never_copied(self, memory, kind):
        with make_cache(kind, memory) as cache:
            for operation in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"a {type(cache).__name__} owns device memory and cannot be copied or pickled"):
                    operation(cache)

    def test_views_keep_their_owners_alive(self, memory, stream, kind):
        before = memory.live_nbytes
        cache = make_cache(kind, memory)
        fill_all(cache, stream)
        views = [cache.get_recurrent_state(0)[2:4], cache.get_conv_state(0), *rows_of(cache)[1:2]]
        owners, expected = sum(view.allocation.nbytes for view in views), [view.numpy().tobytes() for view in views]
        del cache
        gc.collect()
        assert memory.live_nbytes - before == owners
        assert [view.numpy().tobytes() for view in views] == expected

    @pytest.mark.parametrize(
        ("operation", "calls"),
        [("allocate", {"mamba": 9, "hybrid": 15}), ("synchronize", {"mamba": 2, "hybrid": 4}), ("upload", {"mamba": 0, "hybrid": 1})],
    )
    def test_a_failed_construction_releases_everything(self, kind, operation, calls):
        """Allocations: lengths; three layers, scales, two groups; two buffers and their infos of two kinds."""

        class Failing(HostMemory):
            left = 0

            def count(self, name):
                self.left -= name == operation
                if name == operation and not self.left:
                    raise CapacityError(f"the {operation} failed.")

            def allocate(self, nbytes, *, zeroed=False, stream):
                self.count("allocate")
                return super().allocate(nbytes, zeroed=zeroed, stream=stream)

            def upload(self, destination, source, *, stream):
                self.count("upload")
                super().upload(destination, source, stream=stream)

            def synchronize(self, stream):
                self.count("synchronize")
                super().synchronize(stream)

        gc.disable()  # release is not left to the garbage collector
        try:
            for step in range(1, calls[kind] + 1):
                memory = Failing()
                memory.left = step
                with pytest.raises(CapacityError, match=f"the {operation} failed"):
                    make_cache(kind, memory, dtype="int8", ping_pong=True)
                assert memory.live_nbytes == 0
        finally:
            gc.enable()
        memory = Failing()
        memory.left = calls[kind] + 1
        make_cache(kind, memory, dtype="int8", ping_pong=True).close()
        assert memory.left == 1
