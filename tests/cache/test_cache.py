"""``Cache``: the operations of all managers, shared lengths, and the life of the memory.

Compaction is in test_cache_compaction.py, what is refused in test_cache_refusals.py.
"""

import copy
import gc
import os
import pickle
import weakref

import numpy as np
import pytest

from tests.cache.scene import WITH_ROWS, driver_calls
from tests.helpers.assertions import raises
from tests.helpers.caches import (
    ALL_KINDS,
    KINDS,
    LAYOUTS,
    B,
    Image,
    S,
    Unchanged,
    cache_holding,
    fill_all,
    kv_config,
    linear_config,
    make_cache,
    mamba_config,
    next_states_of,
    on_device,
    rows_of,
    states_of,
    whole,
)
from tests.simt.standin import ALLOCATIONS, WAITS, needs_standin
from trt_kvcache import HostMemory, KVCacheManager, Lengths, LinearKVCache, MambaCacheManager
from trt_kvcache.errors import CapacityError, CaptureError, ClosedError, ConfigError, PlaceError


class TestOperations:
    """What the operations on the slots of any manager do, and what they leave alone. The numbers are those of test_lengths.py."""

    @ALL_KINDS
    def test_they_are_those_of_its_lengths(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            cache.reset_for_new_sequences([0, 5, 0], stream=stream)
            cache.set_active_batch_size(2, stream=stream)
            cache.commit_sequence_length(1, stream=stream)
            assert cache.host_kv_cache_lengths == cache.lengths.host == (1, 6)
            assert cache.kv_cache_lengths.numpy().tolist() == cache.lengths.active_tensor.numpy().tolist() == [1, 6]
            assert (cache.active_batch_size, cache.max_batch_size, cache.kv_cache_all_empty) == (2, B, False)

    @ALL_KINDS
    def test_increments_on_the_device_are_known_after_a_sync(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            cache.reset_for_new_sequences([0, 3], stream=stream)
            cache.commit_sequence_length(on_device(memory, [2, 1], stream), max_increment=2, stream=stream)
            cache.sync_lengths(stream=stream)
            assert cache.host_kv_cache_lengths == (2, 4)

    @ALL_KINDS
    def test_clear_slot_empties_one_slot(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            cache.reset_for_new_sequences([3, 4], stream=stream)
            cache.clear_slot(0, stream=stream)
            assert cache.host_kv_cache_lengths == (0, 4)

    def test_rewind_shortens_one_slot(self, memory, stream):
        with make_cache("manager", memory) as cache:
            cache.reset_for_new_sequences([3, 4], stream=stream)
            cache.rewind(1, 2, stream=stream)
            assert cache.host_kv_cache_lengths == (3, 2)

    def test_a_cache_without_states_has_none_to_keep(self, memory, stream):
        with cache_holding("manager", memory, stream, 3, 4) as cache, Unchanged(cache):
            cache.keep_states(1, stream=stream)

    @WITH_ROWS
    @LAYOUTS
    def test_none_touches_k_and_v_or_moves_anything(self, memory, stream, kind, layout):
        with cache_holding(kind, memory, stream, 1, 5, layout=layout) as cache:
            rows, addresses = Image(cache).rows, [tensor.ptr for tensor in [*rows_of(cache), *states_of(cache), cache.lengths.tensor]]
            cache.commit_sequence_length(1, stream=stream)
            cache.commit_sequence_length([1, 0], stream=stream)
            cache.commit_sequence_length(on_device(memory, [0, 1], stream), max_increment=1, stream=stream)
            cache.sync_lengths(stream=stream)
            cache.set_active_batch_size(3, stream=stream)
            cache.clear_slot(1, stream=stream)
            cache.reset_for_new_sequences([0, 2], stream=stream)
            for before, after in zip(rows, Image(cache).rows, strict=True):
                assert np.array_equal(before, after)
            assert [tensor.ptr for tensor in [*rows_of(cache), *states_of(cache), cache.lengths.tensor]] == addresses

    @needs_standin
    @ALL_KINDS
    def test_none_waits_or_allocates(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            ones, mapping = (on_device(memory, values, stream) for values in ([1, 1, 1], [0, -1]))

            def operations():
                cache.reset_for_new_sequences([3, 0, 1], stream=stream)
                cache.commit_sequence_length(1, stream=stream)
                cache.commit_sequence_length([1, 0, 2], stream=stream)
                cache.commit_sequence_length(ones, max_increment=1, stream=stream)
                cache.compact_batch([1, -1, 0], 3, 2, stream=stream)
                cache.compact_batch(mapping, 2, 1, stream=stream)

            made, launches = driver_calls(operations)
            assert launches
            assert not {*made} & (WAITS | ALLOCATIONS)
            cache.sync_lengths(stream=stream)
            assert cache.host_kv_cache_lengths == (5,)


@pytest.mark.skipif(os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host") == "host", reason="CUDA graphs: on the emulated device and on a GPU")
class TestCudaGraph:
    @pytest.fixture(params=KINDS)
    def cache(self, request, memory):
        with make_cache(request.param, memory) as cache:
            yield cache

    @pytest.fixture
    def new(self, memory, stream):
        """Increments that a graph reads at each replay."""
        return on_device(memory, [1, 2], stream)

    @pytest.fixture
    def captured(self, cache, new, memory, stream):
        """A graph of two commits, one of a number and one of a tensor, over slots of 1 and 0 tokens."""
        cache.reset_for_new_sequences([0, 0], stream=stream)
        cache.commit_sequence_length(new, max_increment=2, stream=stream)  # loads the kernel
        cache.reset_for_new_sequences([1, 0], stream=stream)
        memory.synchronize(stream)
        builder = stream.create_graph_builder().begin_building()
        cache.commit_sequence_length(1, stream=builder)
        cache.commit_sequence_length(new, max_increment=2, stream=builder)
        for call in (cache.commit_sequence_length, cache.reset_for_new_sequences):
            with pytest.raises(CaptureError):
                call([0, 1], stream=builder)
        return builder.end_building().complete()

    @pytest.mark.usefixtures("captured")
    def test_a_capture_commits_nothing(self, cache):
        assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.numpy().tolist()) == ((1, 0), [1, 0])

    def test_each_replay_commits(self, cache, captured, stream):
        for _ in range(2):
            cache.lengths.replayed(1)
            cache.lengths.replayed(2, exact=False)
            captured.launch(stream)
        cache.sync_lengths(stream=stream)
        assert cache.host_kv_cache_lengths == (5, 6)


class TestSharedLengths:
    @pytest.fixture
    def lengths(self, memory):
        lengths = Lengths(B, S, memory=memory)
        yield lengths
        lengths.close()

    @pytest.fixture
    def managers(self, memory, lengths):
        """A manager of each class that takes them."""
        made = (
            KVCacheManager(kv_config(), memory=memory, lengths=lengths),
            LinearKVCache(linear_config(), memory=memory, lengths=lengths),
            MambaCacheManager(mamba_config(), memory=memory, lengths=lengths),
        )
        yield made
        for manager in made:
            manager.close()

    def test_what_one_commits_all_have(self, managers, lengths, stream):
        managers[0].reset_for_new_sequences([1, 2], stream=stream)
        managers[1].commit_sequence_length(3, stream=stream)
        assert {manager.host_kv_cache_lengths for manager in managers} == {(4, 5)}
        assert all(manager.lengths is lengths for manager in managers)

    def test_one_that_is_closed_leaves_them_to_the_others(self, managers, lengths, stream):
        managers[0].reset_for_new_sequences([1, 2], stream=stream)
        managers[0].close()
        managers[2].commit_sequence_length(1, stream=stream)
        assert lengths.host == (2, 3)

    def test_they_are_their_owners_to_close(self, managers, lengths, memory):
        for manager in managers:
            manager.close()
        assert memory.live_nbytes == lengths.nbytes

    @pytest.mark.parametrize(("batch", "length"), [(B + 1, S), (B, S - 1)])
    def test_of_other_sizes_are_refused(self, memory, batch, length):
        lengths = Lengths(batch, length, memory=memory)
        with raises(ConfigError, "lengths", expected=f"{B} slots of {S} tokens", got=f"{batch} slots of {length}"):
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        assert memory.live_nbytes == lengths.nbytes
        lengths.close()

    def test_of_another_memory_are_refused(self, memory):
        lengths = Lengths(B, S, memory=HostMemory())
        before = memory.live_nbytes
        with raises(PlaceError, "lengths", expected="lengths in the memory of the cache", got="lengths in another one (cpu)"):
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        assert memory.live_nbytes == before


class TestLife:
    @ALL_KINDS
    def test_close_releases_all_memory(self, memory, kind):
        before = memory.live_nbytes
        cache = make_cache(kind, memory, ping_pong=True, dtype="int8")
        assert (cache.closed, memory.live_nbytes > before) == (False, True)
        cache.close()
        assert (cache.closed, memory.live_nbytes) == (True, before)

    @ALL_KINDS
    def test_close_may_be_called_again(self, memory, kind):
        before = memory.live_nbytes
        cache = make_cache(kind, memory)
        for _ in range(2):
            cache.close()
        assert memory.live_nbytes == before

    @ALL_KINDS
    def test_an_error_in_the_block_closes_and_passes(self, memory, kind):
        before = memory.live_nbytes
        with pytest.raises(ZeroDivisionError), make_cache(kind, memory):
            _ = 1 / 0
        assert memory.live_nbytes == before

    @ALL_KINDS
    def test_views_of_a_closed_cache_are_refused(self, memory, kind):
        cache = make_cache(kind, memory, ping_pong=True)
        tensors = [*rows_of(cache), *states_of(cache), *next_states_of(cache), cache.lengths.tensor]
        cache.close()
        for tensor in tensors:
            for read in (lambda tensor=tensor: tensor.ptr, tensor.numpy, tensor.__dlpack__):
                with pytest.raises(ClosedError, match="the memory of this tensor is closed"):
                    read()

    def test_a_hybrid_closes_its_managers(self, memory):
        cache = make_cache("hybrid", memory)
        managers = cache.kv_cache_manager, cache.mamba_cache_manager
        cache.close()
        assert [manager.closed for manager in managers] == [True, True]

    @ALL_KINDS
    @pytest.mark.parametrize("operation", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_manager_is_never_copied(self, memory, kind, operation):
        with make_cache(kind, memory) as cache, pytest.raises(TypeError) as caught:
            operation(cache)
        assert str(caught.value) == f"a {type(cache).__name__} owns memory, or shares it, and cannot be copied or pickled."

    @ALL_KINDS
    def test_views_keep_their_owners_alive(self, memory, stream, kind):
        before = memory.live_nbytes
        cache = make_cache(kind, memory)
        fill_all(cache, stream)
        views = [tensor[1:3] for tensor in (*rows_of(cache)[1:2], *states_of(cache)[:1])]
        expected = [view.numpy().tobytes() for view in views]
        owners = {id(view.allocation): view.allocation.nbytes for view in views}
        del cache
        assert memory.live_nbytes - before == sum(owners.values())
        assert [view.numpy().tobytes() for view in views] == expected

    @ALL_KINDS
    def test_the_last_view_releases_the_memory(self, memory, stream, kind):
        before = memory.live_nbytes
        cache = make_cache(kind, memory)
        view = (rows_of(cache) or states_of(cache))[0][1:2]
        del cache
        assert memory.live_nbytes > before
        del view
        assert memory.live_nbytes == before

    @WITH_ROWS
    def test_the_last_dlpack_consumer_frees_the_memory(self, kind):
        memory = HostMemory()
        cache = make_cache(kind, memory)
        fill_all(cache, memory.create_stream())
        view = rows_of(cache)[1]
        owner = view.allocation.storage
        while owner.base is not None:
            owner = owner.base
        storage, expected = weakref.ref(owner), view[1:2].numpy().tobytes()
        consumer = np.from_dlpack(view[1:2])
        cache.close()
        del cache, view, owner
        gc.collect()
        assert memory.live_nbytes == 0
        assert (storage() is not None, consumer.tobytes()) == (True, expected)
        del consumer
        gc.collect()
        assert storage() is None


class FailingCalls(HostMemory):
    """Counts the calls of one operation, and fails one of them."""

    def __init__(self, operation, fails_at=None):
        super().__init__()
        self.operation, self.fails_at, self.calls = operation, fails_at, 0

    def _count(self, operation):
        if operation == self.operation:
            self.calls += 1
            if self.calls - 1 == self.fails_at:
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


class TestConstruction:
    """An int8 cache allocates lengths, layers, scales, infos of each head dim, and two buffers and infos of two kinds of states."""

    @pytest.fixture
    def release_at_once(self):
        """Release is not left to the garbage collector."""
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.usefixtures("release_at_once")
    @ALL_KINDS
    @pytest.mark.parametrize("operation", ["allocate", "synchronize", "create_stream", "upload"])
    def test_a_failure_releases_everything(self, kind, operation):
        counting = FailingCalls(operation)
        make_cache(kind, counting, dtype="int8", ping_pong=True).close()
        for step in range(counting.calls):
            memory = FailingCalls(operation, step)
            with pytest.raises(CapacityError) as caught:
                make_cache(kind, memory, dtype="int8", ping_pong=True)
            assert (str(caught.value), memory.live_nbytes) == (f"the {operation} failed.", 0)

    @pytest.mark.parametrize(("kind", "allocations"), [("manager", 7), ("linear", 12), ("mamba", 9), ("hybrid", 15)])
    def test_allocations_are_few_and_none_comes_later(self, kind, allocations):
        memory = FailingCalls("allocate")
        stream = memory.create_stream()
        with make_cache(kind, memory, dtype="int8", ping_pong=True) as cache:
            assert memory.calls == allocations
            cache.reset_for_new_sequences([1, 5, 0], stream=stream)
            cache.commit_sequence_length([1, 0, 2], stream=stream)
            cache.compact_batch([2, 0, 1], 3, 3, stream=stream)
            cache.set_active_batch_size(5, stream=stream)
            cache.clear_slot(1, stream=stream)
            assert memory.calls == allocations

    @ALL_KINDS
    @pytest.mark.parametrize(
        ("memory", "got"),
        [(None, "None"), ("cpu", "'cpu'"), (HostMemory, "the class HostMemory"), (3, "3")],
        ids=["None", "text", "class", "number"],
    )
    def test_something_that_is_no_memory(self, kind, memory, got):
        with raises(PlaceError, "memory", expected="HostMemory or CudaMemory", got=got):
            make_cache(kind, memory)

    def test_something_that_is_no_lengths(self):
        with raises(ConfigError, "lengths", expected="Lengths of another cache", got="[1, 2]"):
            KVCacheManager(kv_config(), memory=HostMemory(), lengths=[1, 2])

    def test_more_than_the_host_has(self):
        memory = HostMemory()
        kv = kv_config([(1 << 30, 16), (1, 16)], max_batch_size=65535, max_sequence_length=2**31 - 1)
        with pytest.raises(CapacityError, match="could not be allocated"):
            KVCacheManager(kv, memory=memory)
        assert memory.live_nbytes == 0

    @ALL_KINDS
    def test_all_bytes_start_as_zero(self, kind):
        class Stale(HostMemory):
            """Bytes are NaN in every float format until somebody asks for zeros."""

            def allocate(self, nbytes, *, zeroed=False, stream):
                allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
                if not zeroed:
                    allocation.storage[:] = 0x7F
                return allocation

        with make_cache(kind, Stale(), ping_pong=True, dtype="float8_e4m3fn") as cache:
            for tensor in [*rows_of(cache), *states_of(cache), *next_states_of(cache), cache.lengths.tensor]:
                assert not whole(tensor).numpy().any()
