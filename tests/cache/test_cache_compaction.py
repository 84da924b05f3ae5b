"""``compact_batch`` of every manager: which bytes move, what the host knows afterwards, and what is refused."""

import gc
import os
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from tests.helpers.caches import (
    ALL_KINDS,
    KINDS,
    LAYOUTS,
    CapturingMemory,
    Image,
    Unchanged,
    fill_all,
    kv_config,
    make_cache,
    mamba_config,
    state_of,
)
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from trt_kvcache import HostMemory, KVCacheManager, KVLayout, Lengths, MambaCacheManager
from trt_kvcache.errors import CaptureError, ClosedError, DTypeError, LengthsUnknown, MappingError, PlaceError, RangeError, ShapeError

# lengths, mapping, lengths afterwards. A slot of seven tokens is full.
MAPPINGS = [
    ([3, 5, 0, 7], [0, -1, 1, 2], [3, 0, 7]),
    ([3, 5, 0, 7], [-1, -1, -1, 0], [7]),
    ([3, 5, 0, 7, 1], [-1, 0, 1, 2, 3], [5, 0, 7, 1]),
    ([3, 5], [-1, 0], [5]),
    ([3, 5], [1, 0], [5, 3]),  # a cycle of two: the shorter one goes over the longer one
    ([3, 5, 2, 7, 1], [1, 2, 3, 4, 0], [1, 3, 5, 2, 7]),  # a cycle of all
    ([3, 5, 2, 7, 1], [2, 4, 0, 3, 1], [2, 1, 3, 7, 5]),  # two cycles, one that stays
    ([3, 5, 2, 7, 1], [2, -1, 0, 1, -1], [2, 7, 3]),  # a cycle and a move
    ([3, 5, 2, 7, 1], [3, 2, -1, 1, 0], [1, 7, 5, 3]),  # a path that goes up: 1 -> 2, 3 -> 1, 0 -> 3, 4 -> 0
    ([0, 0, 4], [-1, 1, 0], [4, 0]),
    ([7, 7, 7, 7, 7], [-1, 3, 2, 1, 0], [7, 7, 7, 7]),
]


@ALL_KINDS
@LAYOUTS
@pytest.mark.parametrize("form", ["list", "array"])
def test_what_moves_and_what_stays(memory, stream, kind, layout, form):
    with make_cache(kind, memory, layout=layout) as cache:
        for seed, (lengths, mapping, after) in enumerate(MAPPINGS):
            cache.reset_for_new_sequences(lengths, stream=stream)
            fill_all(cache, stream, seed)
            expected = Image(cache)
            expected.compact(mapping, lengths)
            cache.compact_batch(np.array(mapping) if form == "array" else mapping, len(mapping), len(after), stream=stream)
            expected.check(cache)
            assert cache.active_batch_size == len(after)
            assert cache.host_kv_cache_lengths == cache.lengths.upper_bounds == tuple(after)
            assert cache.kv_cache_lengths.numpy().tolist() == after
            assert cache.kv_cache_all_empty is (not any(after))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_every_dtype(memory, stream, dtype):
    lengths, mapping, after = MAPPINGS[8]
    with make_cache("manager", memory, dtype=dtype, layout=KVLayout.COMBINED) as cache:
        cache.reset_for_new_sequences(lengths, stream=stream)
        fill_all(cache, stream)
        scales = [None if scale is None else scale.numpy().tobytes() for scale in map(cache.get_kv_scales, range(3))]
        expected = Image(cache)
        expected.compact(mapping, lengths)
        cache.compact_batch(mapping, len(mapping), len(after), stream=stream)
        expected.check(cache)
        assert [None if scale is None else scale.numpy().tobytes() for scale in map(cache.get_kv_scales, range(3))] == scales


@st.composite
def programs(draw):
    old = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 7), min_size=old, max_size=old))
    kept = draw(st.lists(st.booleans(), min_size=old, max_size=old))
    places = draw(st.permutations(range(sum(kept))))
    mapping = [-1] * old
    for slot, place in zip([slot for slot in range(old) if kept[slot]], places, strict=True):
        mapping[slot] = place
    return draw(st.sampled_from(KINDS)), draw(st.sampled_from(KVLayout)), lengths, mapping


@given(programs())
def test_any_mapping_at_random(memory, program):
    kind, layout, lengths, mapping = program
    stream = memory.create_stream()
    with make_cache(kind, memory, layout=layout) as cache:
        cache.reset_for_new_sequences(lengths, stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.compact(mapping, lengths)
        survivors = sum(slot >= 0 for slot in mapping)
        cache.compact_batch(mapping, len(mapping), survivors, stream=stream)
        expected.check(cache)
        assert cache.host_kv_cache_lengths == tuple(lengths[mapping.index(slot)] for slot in range(survivors))


def test_all_permutations_of_four_slots():
    memory = HostMemory()
    stream = memory.create_stream()
    with make_cache("hybrid", memory) as cache:
        for order in permutations(range(4)):
            cache.reset_for_new_sequences([3, 5, 2, 7], stream=stream)
            fill_all(cache, stream)
            expected = Image(cache)
            expected.compact(order, [3, 5, 2, 7])
            cache.compact_batch(order, 4, 4, stream=stream)
            expected.check(cache)


def test_numbers_of_the_contract(memory, stream):
    with KVCacheManager(kv_config(max_sequence_length=16), memory=memory) as cache:
        cache.reset_for_new_sequences([0, 5, 0], stream=stream)
        cache.set_active_batch_size(2, stream=stream)
        cache.commit_sequence_length(7, stream=stream)
        assert cache.kv_cache_lengths.numpy().tolist() == [7, 12]
        cache.reset_for_new_sequences([11, 12, 13, 14], stream=stream)
        cache.compact_batch([-1, 0, -1, 1], 4, 2, stream=stream)
        assert (cache.kv_cache_lengths.numpy().tolist(), cache.host_kv_cache_lengths) == ([12, 14], (12, 14))


class Followed:
    """Something that slots hold, which writes down what it is told."""

    is_recurrent = False

    def __init__(self):
        self.told = []

    def compact(self, plan, *, stream):
        self.told.append((plan.old_batch, plan.new_batch))

    def resize(self, lengths, *, stream):
        """Slots that leave are told apart from slots that move."""

    def reset_slots(self, slots, *, stream):
        self.told.append(list(slots))


@pytest.mark.parametrize(("mapping", "after"), [([0, 1, 2], 3), ([0, 1, -1], 2), ([-1, -1, -1], 0), ([], 0)])
def test_identity_does_nothing(memory, stream, mapping, after):
    """Nor is there anything to do where the last slots go: none moves."""
    with make_cache("hybrid", memory) as cache:
        cache.reset_for_new_sequences([3, 5, 2][: len(mapping)], stream=stream)
        fill_all(cache, stream)
        followed = Followed()
        cache.lengths.attach(followed)
        expected, device = Image(cache), cache.lengths.tensor.numpy().tolist()
        cache.compact_batch(mapping, len(mapping), after, stream=stream)
        expected.check(cache)
        assert (followed.told, cache.lengths.tensor.numpy().tolist()) == ([], device)
        assert cache.host_kv_cache_lengths == (3, 5, 2)[:after]
        assert cache.kv_cache_lengths.shape == (after,)


@ALL_KINDS
def test_going_on_afterwards(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([3, 5, 2], stream=stream)
        cache.compact_batch([-1, 1, 0], 3, 2, stream=stream)
        cache.commit_sequence_length([1, 2], stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.zero_states(2)
        cache.set_active_batch_size(3, stream=stream)
        assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.numpy().tolist()) == ((3, 7, 0), [3, 7, 0])
        expected.check(cache)
        cache.compact_batch([-1, -1, -1], 3, 0, stream=stream)
        assert (cache.active_batch_size, cache.host_kv_cache_lengths, cache.kv_cache_all_empty) == (0, (), True)
        cache.reset_for_new_sequences([1], stream=stream)


def test_where_the_host_knows_a_bound_that_many_tokens_move(memory, stream):
    with make_cache("manager", memory) as cache:
        cache.reset_for_new_sequences([1, 2, 3], stream=stream)
        cache.commit_sequence_length(memory.to_device(np.array([0, 1, 2], np.int32), stream=stream), max_increment=2, stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.compact([-1, 1, 0], [3, 4, 5])
        cache.compact_batch([-1, 1, 0], 3, 2, stream=stream)
        expected.check(cache)
        assert cache.lengths.upper_bounds == (5, 4)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0, 1\] were changed by values that only the device has"):
            _ = cache.host_kv_cache_lengths
        cache.sync_lengths(stream=stream)
        assert cache.host_kv_cache_lengths == (5, 3)
        cache.clear_slot(1, stream=stream)
        cache.commit_sequence_length(memory.to_device(np.array([1, 0], np.int32), stream=stream), max_increment=1, stream=stream)
        cache.clear_slot(0, stream=stream)
        cache.compact_batch([1, 0], 2, 2, stream=stream)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0\] were"):
            _ = cache.host_kv_cache_lengths


TEXT = "batch_mapping: expected"
#: On three active slots: mapping, old, new, error, text.
BAD = [
    ([0, 1], 2, 2, MappingError, "compact_batch: expected old_batch=3, the active batch size, got 2."),
    ([0, 1, 2, -1], 4, 3, MappingError, "compact_batch: expected old_batch=3, the active batch size, got 4."),
    ([0, 1, 2], 3.0, 3, RangeError, "old_batch: expected an integer, got 3.0."),
    ([0, 1, 2], 3, 4, RangeError, "new_batch: expected an integer from 0 to 3, got 4."),
    ([0, 1, 2], 3, -1, RangeError, "new_batch: expected an integer from 0 to 3, got -1."),
    ([0, 1, 2], 3, None, RangeError, "new_batch: expected an integer, got None."),
    ([0, 1], 3, 2, MappingError, f"{TEXT} old_batch=3 entries, got 2."),
    ([0, 1, 2, -1], 3, 3, MappingError, f"{TEXT} old_batch=3 entries, got 4."),
    ([0, 1, 1], 3, 3, MappingError, "batch_mapping: old slots 1 and 2 both go to slot 1."),
    ([0, -1, 0], 3, 1, MappingError, "batch_mapping: old slots 0 and 2 both go to slot 0."),
    ([0, 3, -1], 3, 2, MappingError, "batch_mapping[1]: expected -1 or a slot below new_batch=2, got 3."),
    ([0, 2, -1], 3, 2, MappingError, "batch_mapping[1]: expected -1 or a slot below new_batch=2, got 2."),
    ([0, -2, 1], 3, 2, MappingError, "batch_mapping[1]: expected -1 or a slot below new_batch=2, got -2."),
    ([0, -1, -1], 3, 2, MappingError, f"{TEXT} survivors for all of new_batch=2 slots, got none for [1]."),
    ([-1, 2, 0], 3, 3, MappingError, f"{TEXT} survivors for all of new_batch=3 slots, got none for [1]."),
    ([0, 1, 2], 3, 2, MappingError, "batch_mapping[2]: expected -1 or a slot below new_batch=2, got 2."),
    ([0, 1.0, 2], 3, 3, MappingError, "batch_mapping[1]: expected an integer, got 1.0."),
    ([0, True, 2], 3, 3, MappingError, "batch_mapping[1]: expected an integer, got True."),
    (np.array([0.0, 1.0, 2.0]), 3, 3, MappingError, f"{TEXT} integers of shape (old_batch,), got float64 (3,)."),
    (np.array([[0, 1, 2]]), 3, 3, MappingError, f"{TEXT} integers of shape (old_batch,), got int64 (1, 3)."),
    ("012", 3, 3, MappingError, f"{TEXT} a sequence of integers, got str."),
    ({0: 0, 1: 1, 2: 2}, 3, 3, MappingError, f"{TEXT} a sequence of integers, got dict."),
    (None, 3, 3, MappingError, f"{TEXT} a sequence of integers, got NoneType."),
]


@ALL_KINDS
def test_what_is_refused_changes_nothing(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([3, 5, 2], stream=stream)
        fill_all(cache, stream)
        for mapping, old, new, error, text in BAD:
            with Unchanged(cache), pytest.raises(error) as caught:
                cache.compact_batch(mapping, old, new, stream=stream)
            assert str(caught.value) == text
        for mapping in ([0, 1, 2], [1, 0, 2]):
            with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
                cache.compact_batch(mapping, 3, 3, stream=None)
        with pytest.raises(TypeError, match="stream"):
            cache.compact_batch([0, 1, 2], 3, 3)
    with pytest.raises(ClosedError, match=f"^this {type(cache).__name__} is closed"):
        cache.compact_batch([0, 1, 2], 3, 3, stream=stream)


class TestDeviceMapping:
    def on_device(self, memory, mapping, stream, dtype=np.int32):
        return memory.to_device(np.array(mapping, dtype), stream=stream)

    @ALL_KINDS
    @LAYOUTS
    def test_does_what_the_same_mapping_on_the_host_does(self, memory, stream, kind, layout):
        with make_cache(kind, memory, layout=layout) as cache:
            for seed, (lengths, mapping, after) in enumerate(MAPPINGS[:4]):
                cache.reset_for_new_sequences(lengths, stream=stream)
                fill_all(cache, stream, seed)
                expected = Image(cache)
                expected.compact(mapping, lengths)
                tensor = self.on_device(memory, mapping, stream)
                cache.compact_batch(tensor, len(mapping), len(after), stream=stream)
                expected.check(cache)
                assert cache.kv_cache_lengths.numpy().tolist() == after
                cache.sync_lengths(stream=stream)
                assert cache.host_kv_cache_lengths == tuple(after)

    def test_leaves_the_host_with_bounds(self, memory, stream):
        with make_cache("manager", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 0, 2], stream=stream)
            cache.compact_batch(self.on_device(memory, [0, -1, 1, 2], stream), 4, 3, stream=stream)
            # Slot 0 was 0 or 1, slot 1 was 1 or 2, slot 2 was 2 or 3.
            assert (cache.lengths.upper_bounds, cache.active_batch_size) == ((5, 5, 2), 3)
            with pytest.raises(LengthsUnknown):
                _ = cache.host_kv_cache_lengths
            cache.compact_batch(self.on_device(memory, [-1, -1, -1], stream), 3, 0, stream=stream)
            assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.shape) == ((), (0,))

    def test_of_no_slots(self, memory, stream):
        with make_cache("hybrid", memory) as cache:
            cache.compact_batch(self.on_device(memory, [], stream), 0, 0, stream=stream)
            assert cache.active_batch_size == 0

    def test_what_is_refused_changes_nothing(self, memory, stream):
        host = HostMemory()
        good = self.on_device(memory, [-1, 0, 1], stream)
        other = host.to_device(np.array([-1, 0, 1], np.int32), stream=host.create_stream())
        bad = [
            (good, 2, 2, MappingError, "compact_batch: expected old_batch=3, the active batch size, got 2."),
            (good, 3, 4, RangeError, "new_batch: expected an integer from 0 to 3, got 4."),
            (good, 3, -1, RangeError, "new_batch: expected an integer from 0 to 3, got -1."),
            (good[:2], 3, 2, ShapeError, f"batch_mapping: expected a dense tensor of shape (3,), got {good[:2]!r}."),
            (other, 3, 2, PlaceError, f"batch_mapping: expected a tensor of {memory.device}, got one of cpu."),
            (self.on_device(memory, [-1, 0, 1], stream, np.int64), 3, 2, DTypeError, "batch_mapping: expected int32, got int64."),
        ]
        with make_cache("hybrid", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream)
            for mapping, old, new, error, text in bad:
                with Unchanged(cache), pytest.raises(error) as caught:
                    cache.compact_batch(mapping, old, new, stream=stream)
                assert str(caught.value) == text
            with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
                cache.compact_batch(good, 3, 2, stream=None)

    @pytest.mark.parametrize(
        ("mapping", "new", "text"),
        [
            ([1, 0, -1], 2, "batch_mapping: a mapping on the device must keep the order of the slots, got [1, 0, -1]."),
            ([0, 0, -1], 1, "batch_mapping: old slots 0 and 1 both go to slot 0."),
            ([0, -1, -1], 2, "batch_mapping: expected survivors for all of new_batch=2 slots, got none for [1]."),
            ([0, 7, -1], 2, "batch_mapping[1]: expected -1 or a slot below new_batch=2, got 7."),
        ],
    )
    def test_is_checked_where_the_switch_says_so(self, memory, stream, monkeypatch, mapping, new, text):
        with make_cache("hybrid", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream)
            tensor = self.on_device(memory, mapping, stream)
            monkeypatch.setenv("TRT_KVCACHE_DEBUG", "1")
            with Unchanged(cache), pytest.raises(MappingError) as caught:
                cache.compact_batch(tensor, 3, new, stream=stream)
            assert str(caught.value) == text
            cache.compact_batch(self.on_device(memory, [-1, 0, 1], stream), 3, 2, stream=stream)
            assert cache.kv_cache_lengths.numpy().tolist() == [5, 2]
            monkeypatch.setenv("TRT_KVCACHE_DEBUG", "0")
            cache.compact_batch(tensor[:2], 2, min(new, 2), stream=stream)

    def test_is_captured_and_leaves_the_host_alone(self):
        memory = CapturingMemory()
        stream = memory.create_stream()
        with make_cache("hybrid", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream)
            expected, before = Image(cache), state_of(cache)
            expected.compact([-1, 0, 1], [3, 5, 2])
            mapping = self.on_device(memory, [-1, 0, 1], stream)
            memory.capturing = True
            cache.compact_batch(mapping, 3, 2, stream=stream)
            expected.check(cache)
            assert (state_of(cache)["mirror"], state_of(cache)["active"]) == (before["mirror"], before["active"])
            memory.capturing = False
            cache.lengths.replayed_compaction(3, 2)
            assert (cache.active_batch_size, cache.lengths.upper_bounds) == (2, (5, 5))
            assert cache.kv_cache_lengths.numpy().tolist() == [5, 2]

    def test_a_replay_needs_the_captured_batch(self, memory, stream):
        with make_cache("manager", memory) as cache:
            cache.reset_for_new_sequences([3, 5], stream=stream)
            with Unchanged(cache), raises(MappingError, "compact_batch", expected="old_batch=2", got=3):
                cache.lengths.replayed_compaction(3, 2)
            with Unchanged(cache), raises(RangeError, "new_batch", expected="0 to 2", got=3):
                cache.lengths.replayed_compaction(2, 3)
        with pytest.raises(ClosedError):
            cache.lengths.replayed_compaction(2, 1)


@ALL_KINDS
def test_a_host_mapping_is_not_captured(kind):
    memory = CapturingMemory()
    stream = memory.create_stream()
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        memory.capturing = True
        for mapping in ([1, 0], [0, 1]):
            with Unchanged(cache), pytest.raises(CaptureError) as caught:
                cache.compact_batch(mapping, 2, 2, stream=stream)
            assert str(caught.value) == (
                "compact_batch with a host mapping cannot be captured: its host values would be frozen into the CUDA graph. Capture "
                "commits of a number or a device tensor, and compactions with a device mapping. Nothing was changed."
            )


def make_mamba(memory, lengths):
    return MambaCacheManager(mamba_config(), memory=memory, lengths=lengths)


class TestCompactionOfSharedLengths:
    """Managers over one ``Lengths`` have their slots in common: what is done to the slots of one is done to those of all."""

    @pytest.mark.parametrize("asked", [0, 1])
    def test_managers_are_compacted_together(self, memory, stream, asked):
        lengths = Lengths(5, 7, memory=memory)
        caches = [KVCacheManager(kv_config(), memory=memory, lengths=lengths), make_mamba(memory, lengths)]
        caches[0].reset_for_new_sequences([3, 5, 2], stream=stream)
        for cache in caches:
            fill_all(cache, stream)
        images = [Image(cache) for cache in caches]
        caches[asked].compact_batch([1, -1, 0], 3, 2, stream=stream)
        assert lengths.host == (2, 3)
        for image, cache in zip(images, caches, strict=True):
            image.compact([1, -1, 0], [3, 5, 2])
            image.check(cache)
            cache.close()
        lengths.close()

    def test_one_that_is_closed_or_gone_is_left_out(self, memory, stream):
        lengths = Lengths(5, 7, memory=memory)
        closed, gone, stays = (make_mamba(memory, lengths) for _ in range(3))
        closed.close()
        del gone
        gc.collect()
        stays.reset_for_new_sequences([0, 3], stream=stream)
        stays.compact_batch([1, 0], 2, 2, stream=stream)
        stays.set_active_batch_size(3, stream=stream)
        assert lengths.host == (3, 0, 0)
        stays.close()
        assert not lengths.is_recurrent
        lengths.close()


@pytest.mark.skipif(
    os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host") == "host",
    reason="CUDA graphs: on the emulated device (tests/simt/run.py) and on a GPU",
)
@ALL_KINDS
def test_a_cuda_graph_replays_a_device_mapping(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        mapping = memory.to_device(np.array([0, 1, 2], np.int32), stream=stream)
        cache.reset_for_new_sequences([3, 5, 2], stream=stream)
        saved = None if kind == "mamba" else cache.capture_kv_cache(0, 2, stream=stream)
        cache.compact_batch(mapping, 3, 3, stream=stream)  # loads the kernels
        cache.sync_lengths(stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        builder = stream.create_graph_builder().begin_building()
        cache.compact_batch(mapping, 3, 2, stream=builder)
        for call in (
            lambda: cache.compact_batch([-1, 0, 1], 3, 2, stream=builder),
            lambda: cache.set_active_batch_size(4, stream=builder),
            lambda: cache.reset_for_new_sequences([1], stream=builder),
            lambda: cache.clear_slot(0, stream=builder),
            *([] if saved is None else [lambda: cache.restore_kv_cache(saved, 0, stream=builder)]),
        ):
            with pytest.raises(CaptureError):
                call()
        graph = builder.end_building().complete()
        expected.check(cache)
        assert cache.host_kv_cache_lengths == (3, 5, 2)
        for lengths, slots in (([3, 5, 2], [-1, 0, 1]), ([7, 1, 4], [0, -1, 1]), ([2, 2, 6], [0, 1, -1])):
            cache.reset_for_new_sequences(lengths, stream=stream)
            fill_all(cache, stream, sum(lengths))
            memory.upload(mapping, np.array(slots, np.int32), stream=stream)
            memory.synchronize(stream)
            expected = Image(cache)
            expected.compact(slots, lengths)
            cache.lengths.replayed_compaction(3, 2)
            graph.launch(stream)
            expected.check(cache)
            cache.sync_lengths(stream=stream)
            assert cache.host_kv_cache_lengths == tuple(lengths[slots.index(slot)] for slot in range(2))


@needs_standin
@ALL_KINDS
@pytest.mark.parametrize("where", ["host", "device"])
def test_neither_waits_nor_allocates_and_launches_once_per_group_and_kind(memory, stream, kind, where):
    with make_cache(kind, memory) as cache:
        mapping = [-1, 1, 0] if where == "host" else memory.to_device(np.array([-1, 0, 1], np.int32), stream=stream)
        for run in range(2):  # the first one loads the kernels
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            standin = StandIn()
            cache.compact_batch(mapping, 3, 2, stream=stream)
            calls = standin.take_calls()
            if run:
                assert not {*calls} & (WAITS | ALLOCATIONS)
                groups, kinds = {"manager": (2, 0), "linear": (1, 2), "mamba": (0, 2), "hybrid": (2, 2), "conv": (2, 1), "scaled": (3, 0)}[
                    kind
                ]
                assert sum(call.startswith("cuLaunchKernel") for call in calls) == groups + kinds + 1
