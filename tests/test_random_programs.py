"""Random programs beside an oracle that knows no layout: dicts of NumPy arrays, and Python numbers for the lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trt_kvcache import CacheConfig, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache
from trt_kvcache.errors import CapacityError, KVCacheError, LengthsUnknown, RangeError, ShapeError, SlotError

B, S = 3, 7
HEADS = [(2, 16), (1, 32)]

# The memory is one for all examples of a test: each example makes and closes a cache of its own.
SHARED_MEMORY = settings(settings.default, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Oracle:
    """What a cache holds. Each operation returns the errors that would be right; with none it has taken effect."""

    def __init__(self, heads: list[tuple[int, int]]) -> None:
        self.lengths: list[int] = []
        self.bounds: list[int] = []
        self.known: list[bool] = []
        self.rows = {
            (layer, which, slot): np.zeros((h, S, d), np.float32)
            for layer, (h, d) in enumerate(heads)
            for which in (0, 1)
            for slot in range(B)
        }

    def reset(self, values: list[int]) -> set[type[KVCacheError]]:
        if len(values) > B or not all(0 <= value <= S for value in values):
            return {RangeError}
        self.lengths, self.bounds, self.known = list(values), list(values), [True] * len(values)
        return set()

    def _commit(self, values: list[int], limits: list[int], known: bool) -> set[type[KVCacheError]]:
        wrong: set[type[KVCacheError]] = set()
        if len(limits) != len(self.lengths):
            return {ShapeError}
        if any(limit < 0 for limit in limits):
            wrong.add(RangeError)
        if any(bound + limit > S for bound, limit in zip(self.bounds, limits, strict=True)):
            wrong.add(CapacityError)
        if not wrong:
            self.lengths = [length + value for length, value in zip(self.lengths, values, strict=True)]
            self.bounds = [bound + limit for bound, limit in zip(self.bounds, limits, strict=True)]
            self.known = [old and known for old in self.known]
        return wrong

    def commit(self, increment: int) -> set[type[KVCacheError]]:
        if increment < 0:
            return {RangeError}
        return self._commit([increment] * len(self.lengths), [increment] * len(self.lengths), True)

    def commit_values(self, values: list[int]) -> set[type[KVCacheError]]:
        return self._commit(values, values, True)

    def commit_tensor(self, values: list[int], max_increment: int) -> set[type[KVCacheError]]:
        return self._commit(values, [max_increment] * len(values), False)

    def set_active(self, count: int) -> set[type[KVCacheError]]:
        if not 0 <= count <= B:
            return {RangeError}
        new = count - len(self.lengths)
        self.lengths = self.lengths[:count] + [0] * new
        self.bounds = self.bounds[:count] + [0] * new
        self.known = self.known[:count] + [True] * new
        return set()

    def clear(self, slot: int) -> set[type[KVCacheError]]:
        if not 0 <= slot < len(self.lengths):
            return {SlotError}
        self.lengths[slot], self.bounds[slot], self.known[slot] = 0, 0, True
        return set()

    def rewind(self, slot: int, length: int) -> set[type[KVCacheError]]:
        if not 0 <= slot < len(self.lengths):
            return {SlotError}
        if not self.known[slot]:
            return {LengthsUnknown}
        if not 0 <= length <= self.lengths[slot]:
            return {RangeError}
        self.lengths[slot] = self.bounds[slot] = length
        return set()

    def sync(self) -> set[type[KVCacheError]]:
        self.bounds, self.known = list(self.lengths), [True] * len(self.lengths)
        return set()


class Program:
    """Runs operations on a manager and its oracle, and compares all there is to see after each."""

    def __init__(self, cache: Any, heads: list[tuple[int, int]]) -> None:
        self.cache, self.oracle, self.heads = cache, Oracle(heads), heads
        self.memory, self.stream = cache.memory, cache.memory.create_stream()
        self.addresses = [cache.lengths.tensor.ptr, *(cache.get_combined_kv_cache(layer).ptr for layer in range(len(heads)))]

    def run(self, name: str, *arguments: Any) -> None:
        expected = getattr(self, name)(*arguments)
        if expected is not None:
            errors, call = expected
            if errors:
                with pytest.raises(tuple(errors)):
                    call()
            else:
                call()
        self.compare()

    def reset(self, values: list[int]) -> Any:
        return self.oracle.reset(values), lambda: self.cache.reset_for_new_sequences(values, stream=self.stream)

    def commit(self, increment: int) -> Any:
        return self.oracle.commit(increment), lambda: self.cache.commit_sequence_length(increment, stream=self.stream)

    def commit_values(self, values: list[int], as_array: bool, extra: int) -> Any:
        values = values[: max(0, len(self.oracle.lengths) + extra)]
        given = np.array(values, np.int32) if as_array else values
        return self.oracle.commit_values(values), lambda: self.cache.commit_sequence_length(given, stream=self.stream)

    def commit_tensor(self, values: list[int], slack: int, extra: int) -> Any:
        values = [max(0, value) for value in values[: max(0, len(self.oracle.lengths) + extra)]]
        limit = max(values, default=0) + slack
        tensor = self.memory.to_device(np.array(values, np.int32), stream=self.stream)
        errors = self.oracle.commit_tensor(values, limit)
        return errors, lambda: self.cache.commit_sequence_length(tensor, max_increment=limit, stream=self.stream)

    def set_active(self, count: int) -> Any:
        return self.oracle.set_active(count), lambda: self.cache.set_active_batch_size(count, stream=self.stream)

    def clear(self, slot: int) -> Any:
        return self.oracle.clear(slot), lambda: self.cache.clear_slot(slot, stream=self.stream)

    def rewind(self, slot: int, length: int) -> Any:
        return self.oracle.rewind(slot, length), lambda: self.cache.rewind(slot, length, stream=self.stream)

    def sync(self) -> Any:
        return self.oracle.sync(), lambda: self.cache.sync_lengths(stream=self.stream)

    def write(self, layer: int, which: int, slot: int, position: int, seed: int) -> None:
        """What an enqueue does: put the row of one token into K or V of one slot, through the views."""
        h, d = self.heads[layer]
        row = np.random.default_rng(seed).integers(-99, 99, (h, d)).astype(np.float32)
        self.oracle.rows[layer, which, slot][:, position] = row
        view = self.cache.get_separate_kv_cache(layer)[which][slot : slot + 1]
        rows = view.numpy()
        rows[0, :, position] = row
        self.memory.upload(view, rows, stream=self.stream)
        self.memory.synchronize(self.stream)

    def compare(self) -> None:
        cache, oracle = self.cache, self.oracle
        assert cache.active_batch_size == len(oracle.lengths)
        assert cache.kv_cache_lengths.numpy().tolist() == oracle.lengths
        assert cache.lengths.upper_bounds == tuple(oracle.bounds)
        if all(oracle.known):
            assert cache.host_kv_cache_lengths == tuple(oracle.lengths)
        else:
            with pytest.raises(LengthsUnknown):
                _ = cache.host_kv_cache_lengths
        assert cache.kv_cache_all_empty is (not any(oracle.bounds))
        addresses = [cache.lengths.tensor.ptr]
        for layer in range(len(self.heads)):
            combined = cache.get_combined_kv_cache(layer)
            separate = [view.numpy() for view in cache.get_separate_kv_cache(layer)]
            addresses.append(combined.ptr)
            rows = combined.numpy()
            for slot in range(B):
                for which in (0, 1):
                    assert np.array_equal(rows[slot, which], oracle.rows[layer, which, slot])
                    assert np.array_equal(separate[which][slot], oracle.rows[layer, which, slot])
        assert addresses == self.addresses


def _usually(inside: Any, outside: Any) -> Any:
    """Nine in ten from inside the valid range, so that programs get somewhere."""
    return st.integers(0, 9).flatmap(lambda dice: outside if dice == 0 else inside)


SLOTS = _usually(st.integers(0, B - 1), st.sampled_from([-1, B]))
INCREMENTS = _usually(st.integers(0, 3), st.sampled_from([-1, S, S + 1]))
PER_SLOT = st.lists(INCREMENTS, min_size=B + 1, max_size=B + 1)
EXTRA = _usually(st.just(0), st.sampled_from([-1, 1]))
RESET_LENGTHS = _usually(st.integers(0, S), st.sampled_from([-1, S + 1]))

OPERATIONS = st.one_of(
    st.tuples(st.just("reset"), st.lists(RESET_LENGTHS, max_size=B)),
    st.tuples(st.just("reset"), st.lists(st.integers(0, 2), min_size=2, max_size=B + 1)),
    st.tuples(st.just("commit"), INCREMENTS),
    st.tuples(st.just("commit_values"), PER_SLOT, st.booleans(), EXTRA),
    st.tuples(st.just("commit_tensor"), PER_SLOT, st.integers(0, 2), EXTRA),
    st.tuples(st.just("set_active"), _usually(st.integers(0, B), st.sampled_from([-1, B + 1]))),
    st.tuples(st.just("clear"), SLOTS),
    st.tuples(st.just("rewind"), SLOTS, st.integers(-1, S)),
    st.tuples(st.just("sync")),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 1), st.integers(0, B - 1), st.integers(0, S - 1), st.integers(0, 999)),
)
PROGRAMS = st.tuples(st.lists(st.integers(0, 3), min_size=B, max_size=B), st.lists(OPERATIONS, max_size=16))


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
@SHARED_MEMORY
@given(PROGRAMS)
def test_manager_of_layers_that_differ(memory, layout, program):
    first, operations = program
    config = KVCacheConfig(
        layers=[KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in HEADS],
        max_batch_size=B,
        max_sequence_length=S,
        dtype="float32",
        layout=layout,
    )
    with KVCacheManager(config, memory=memory) as cache:
        run = Program(cache, HEADS).run
        run("reset", first)
        for operation in operations:
            run(*operation)


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
@SHARED_MEMORY
@given(PROGRAMS)
def test_linear_cache(memory, layout, program):
    first, operations = program
    config = CacheConfig(
        num_attention_layers=2, max_batch_size=B, max_sequence_length=S, num_kv_heads=2, head_dim=16, dtype="float32", layout=layout
    )
    with LinearKVCache(config, memory=memory) as cache:
        run = Program(cache, [HEADS[0]] * 2).run
        run("reset", first)
        for operation in operations:
            run(*operation)
