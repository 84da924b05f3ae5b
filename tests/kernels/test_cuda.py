"""The CUDA kernels against those in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simt.standin import StandIn, need_cuda_memory, needs_standin
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.kernels import (
    MAX_SAVED_TENSORS,
    CompactionPlan,
    KVLayerInfos,
    StateInfos,
    compact_kv_cache_batched,
    compact_length_tensor,
    compact_rows,
    copy_rows,
    increment_length_tensor,
    instantiate_kv_cache_batched,
    instantiate_rows,
    save_kv_cache_batched,
    save_rows,
    store_length_values,
    zero_rows,
)

need_cuda_memory()

COUNTS = [*range(1, 41), 256, 257, 700]


class TestAgainstNumPy:
    @pytest.fixture(params=COUNTS)
    def pair(self, request, memory, stream):
        """A function that runs the same on both memories, with random lengths and arguments, and compares."""
        n = request.param
        random = np.random.default_rng(n)
        lengths, arguments = random.integers(0, 2**30, (2, n), np.int32)
        host = HostMemory()

        def run(operation: Any) -> None:
            results = []
            for place, on in ((host, host.create_stream()), (memory, stream)):
                padded = place.to_device(np.concatenate([[-1, -2], lengths, [-3, -4]]).astype(np.int32), stream=on)
                operation(padded[2 : 2 + n], place.to_device(arguments, stream=on), [int(value) for value in arguments], on)
                results.append(padded.numpy().tolist())
            assert results[1] == results[0]
            assert results[0][:2] + results[0][-2:] == [-1, -2, -3, -4]

        return run

    def test_increment_by_a_number(self, pair):
        pair(lambda lengths, _tensor, values, stream: increment_length_tensor(lengths, values[0], stream=stream))

    def test_increment_by_a_tensor(self, pair):
        pair(lambda lengths, tensor, _values, stream: increment_length_tensor(lengths, tensor, stream=stream))

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_store(self, pair, accumulate):
        pair(lambda lengths, _tensor, values, stream: store_length_values(lengths, values, accumulate=accumulate, stream=stream))


class Scene:
    """Two layers of three slots, saved tensors, states and lengths."""

    def __init__(self, memory: Any, stream: Any, layers: int = 2) -> None:
        def tensors(*shape: int) -> list[Any]:
            return [memory.to_device(np.full(shape, index, np.float16), stream=stream) for index in range(layers)]

        self.cache, self.saved = tensors(3, 2, 2, 5, 8), tensors(2, 2, 4, 8)
        self.states, self.rows = tensors(3, 9), tensors(9)
        self.infos, self.saved_infos = KVLayerInfos(self.cache, stream=stream), KVLayerInfos(self.saved, stream=stream)
        self.state_infos = StateInfos(self.states, stream=stream)
        self.lengths = memory.to_device(np.array([5, 4, 3], np.int32), stream=stream)
        self.mapping = memory.to_device(np.array([-1, 0, 1], np.int32), stream=stream)
        self.plan = CompactionPlan.from_host([1, 0, 2], 3, 3, [5, 4, 3])
        self.identity = CompactionPlan.from_host([0, 1, -1], 3, 2, [5, 4, 3])
        self.empty = CompactionPlan.from_host([1, 0], 2, 2, [0, 0])
        self.device_plan = CompactionPlan.from_device(self.mapping, 3, 2, self.lengths)


# How many launches each call is.
CALLS: dict[str, tuple[Any, int]] = {
    "save": (lambda s, stream: save_kv_cache_batched(s.infos, s.saved_infos, 1, 4, stream=stream), 1),
    "save no token": (lambda s, stream: save_kv_cache_batched(s.infos, s.saved_infos, 1, 0, stream=stream), 0),
    "instantiate": (lambda s, stream: instantiate_kv_cache_batched(s.infos, s.saved_infos, 1, 4, stream=stream), 1),
    "compact": (lambda s, stream: compact_kv_cache_batched(s.infos, s.plan, stream=stream), 1),
    "compact, mapped": (lambda s, stream: compact_kv_cache_batched(s.infos, s.device_plan, stream=stream), 1),
    "compact the identity": (lambda s, stream: compact_kv_cache_batched(s.infos, s.identity, stream=stream), 0),
    "compact empty slots": (lambda s, stream: compact_kv_cache_batched(s.infos, s.empty, stream=stream), 0),
    "compact rows": (lambda s, stream: compact_rows(s.state_infos, s.plan, stream=stream), 1),
    "compact rows of empty slots": (lambda s, stream: compact_rows(s.state_infos, s.empty, stream=stream), 1),
    "compact rows, mapped": (lambda s, stream: compact_rows(s.state_infos, s.device_plan, stream=stream), 1),
    "compact rows, the identity": (lambda s, stream: compact_rows(s.state_infos, s.identity, stream=stream), 0),
    "compact lengths": (lambda s, stream: compact_length_tensor(s.lengths, s.plan, stream=stream), 1),
    "compact lengths, mapped": (lambda s, stream: compact_length_tensor(s.lengths, s.device_plan, stream=stream), 1),
    "compact lengths, the identity": (lambda s, stream: compact_length_tensor(s.lengths, s.identity, stream=stream), 0),
    "zero": (lambda s, stream: zero_rows(s.state_infos, 0, count=3, stream=stream), 1),
    "zero none": (lambda s, stream: zero_rows(s.state_infos, 0, count=0, stream=stream), 0),
    "copy": (lambda s, stream: copy_rows(s.state_infos, s.state_infos, 1, count=2, stream=stream), 1),
    "save rows": (lambda s, stream: save_rows(s.state_infos, s.rows, 1, stream=stream), 1),
    "instantiate rows": (lambda s, stream: instantiate_rows(s.state_infos, s.rows, 1, stream=stream), 1),
}


@needs_standin
@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_is_one_launch_and_nothing_else(memory, stream, name):
    call, launches = CALLS[name]
    scene = Scene(memory, stream)
    call(scene, stream)  # loads the kernel
    standin = StandIn()
    call(scene, stream)
    assert standin.take_calls() == ["cuLaunchKernelEx"] * launches


@needs_standin
def test_launches_of_many_layers(memory, stream):
    scene = Scene(memory, stream, layers=MAX_SAVED_TENSORS + 1)
    expected = {"save": 2, "instantiate": 2, "compact": 1, "save rows": 2, "compact rows": 1, "zero": 1}
    for name in expected:
        CALLS[name][0](scene, stream)  # loads the kernel
    standin = StandIn()
    for name, launches in expected.items():
        CALLS[name][0](scene, stream)
        assert standin.take_calls() == ["cuLaunchKernelEx"] * launches


@needs_standin
@pytest.mark.parametrize(("n", "launches"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_launches_of_a_store(memory, stream, n, launches):
    lengths = memory.to_device(np.zeros(n, np.int32), stream=stream)
    store_length_values(lengths, [0] * n, accumulate=False, stream=stream)
    standin = StandIn()
    store_length_values(lengths, [1] * n, accumulate=False, stream=stream)
    assert standin.take_calls() == ["cuLaunchKernelEx"] * launches


def test_every_argument_is_a_python_int(memory, stream, monkeypatch):
    """cuda.core passes those as 64 bits, which the kernels read; a NumPy int32 would be 32."""
    arguments: list[Any] = []

    def record(_memory: Any, _source: str, _name: str, grid: tuple[int, int, int], given: tuple[int, ...], _stream: Any) -> None:
        arguments.extend((*grid, *given))

    for module in ("length_kernels", "kv_kernels", "state_row_kernels"):
        monkeypatch.setattr(f"trt_kvcache.kernels.{module}.launch", record)
    scene, n = Scene(memory, stream), np.int64(1)
    store_length_values(scene.lengths, list(np.ones(3, np.int32)), accumulate=np.True_, stream=stream)
    increment_length_tensor(scene.lengths, np.int32(3), stream=stream)
    increment_length_tensor(scene.lengths, scene.lengths, stream=stream)
    assert len(arguments) == 3 * 3 + 19 + 3 + 3
    save_kv_cache_batched(scene.infos, scene.saved_infos, n, n, stream=stream)
    scene.plan = CompactionPlan.from_host(np.array([1, 0]), n + 1, n + 1, np.array([3, 4]))
    scene.device_plan = CompactionPlan.from_device(scene.mapping, n + 2, n + 1, scene.lengths)
    for name in ("compact", "compact, mapped", "compact rows", "compact rows, mapped", "compact lengths", "compact lengths, mapped"):
        CALLS[name][0](scene, stream)
    zero_rows(scene.state_infos, n, count=n, stream=stream)
    save_rows(scene.state_infos, scene.rows, n, stream=stream)
    assert {type(argument) for argument in arguments} == {int}


class TestGrids:
    """How many blocks a launch has: so many as the live tokens need, whatever the size of the cache."""

    @pytest.fixture
    def grid(self, monkeypatch):
        """The grid of the one launch that a call makes."""
        grids: list[tuple[int, int, int]] = []
        for module in ("length_kernels", "kv_kernels", "state_row_kernels"):
            monkeypatch.setattr(f"trt_kvcache.kernels.{module}.launch", lambda _m, _s, _n, grid, _a, _stream: grids.append(grid))

        def call(function: Any, *arguments: Any, **named: Any) -> tuple[int, int, int]:
            function(*arguments, **named)
            (only,) = grids
            grids.clear()
            return only

        return call

    @pytest.mark.parametrize("s", [2048, 32768])
    def test_of_live_tokens(self, memory, stream, grid, s):
        allocation = memory.allocate(2 * 2 * 3 * s * 64, stream=stream)
        layers = [DeviceTensor(allocation, shape=(2, 2, heads, s, 32), dtype="float16") for heads in (3, 1)]
        infos = KVLayerInfos(layers, stream=stream)
        saved = KVLayerInfos([DeviceTensor(allocation, shape=(2, heads, s, 32), dtype="float16") for heads in (3, 1)], stream=stream)
        for tokens, blocks in ((1, 1), (256, 1), (257, 2), (2048, 8)):  # 4 units of 16 bytes a token, 1024 units a block
            plan = CompactionPlan.from_host([-1, 0], 2, 1, [s, tokens])
            assert grid(compact_kv_cache_batched, infos, plan, stream=stream) == (blocks, 6, 2)
            assert grid(save_kv_cache_batched, infos, saved, 0, tokens, stream=stream) == (blocks, 6, 2)
            assert grid(instantiate_kv_cache_batched, infos, saved, 0, tokens, stream=stream) == (blocks, 6, 2)

    def test_of_tokens_that_only_the_device_knows(self, memory, stream, grid):
        """As many as all could need, up to a number that does not count beside them."""
        for s, blocks in ((2048, 8), (2**18, 4096 // 12)):
            allocation = memory.allocate(2 * 2 * 3 * s * 64, stream=stream)
            infos = KVLayerInfos([DeviceTensor(allocation, shape=(2, 2, 3, s, 32), dtype="float16")] * 2, stream=stream)
            two = memory.to_device(np.zeros(2, np.int32), stream=stream)
            assert grid(compact_kv_cache_batched, infos, CompactionPlan.from_device(two, 2, 1, two), stream=stream) == (blocks, 6, 2)

    def test_of_rows(self, memory, stream, grid):
        states = [memory.to_device(np.zeros((3, n), np.int8), stream=stream) for n in (16 * 1024 + 1, 5)]
        infos = StateInfos(states, stream=stream)
        assert grid(zero_rows, infos, 1, count=2, stream=stream) == (2, 2, 2)
        assert grid(copy_rows, infos, infos, 0, count=3, stream=stream) == (2, 3, 2)
        assert grid(compact_rows, infos, CompactionPlan.from_host([-1, 0, 1], 3, 2, [0, 0, 0]), stream=stream) == (2, 1, 2)
        assert grid(save_rows, infos, [tensor[:1].reshape(tensor.shape[1]) for tensor in states], 1, stream=stream) == (2, 1, 2)


class TestCaptured:
    """With a mapping on the device a compaction can be captured, and a replay reads mapping and lengths anew."""

    def test_replay(self, memory, stream):
        scene = Scene(memory, stream)
        content = np.arange(scene.cache[0].nbytes // 2, dtype=np.float16).reshape(scene.cache[0].shape)
        calls = [CALLS[name][0] for name in ("compact, mapped", "compact rows, mapped", "compact lengths, mapped")]
        for call in calls:
            call(scene, stream)  # loads the kernels
        memory.synchronize(stream)
        builder = stream.create_graph_builder()
        builder.begin_building()
        for call in calls:
            call(scene, builder)
        graph = builder.end_building().complete()
        for mapping, lengths in (([-1, 0, 1], [5, 4, 3]), ([0, -1, 1], [1, 2, 5]), ([0, 1, 2], [1, 1, 1])):
            memory.upload(scene.cache[0], content, stream=stream)
            memory.upload(scene.mapping, np.array(mapping, np.int32), stream=stream)
            memory.upload(scene.lengths, np.array(lengths, np.int32), stream=stream)
            graph.launch(stream)
            memory.synchronize(stream)
            expected = content.copy()
            for old, new in enumerate(mapping):
                if new >= 0:
                    expected[new, :, :, : lengths[old]] = content[old, :, :, : lengths[old]]
            kept = [old for old, new in enumerate(mapping) if new >= 0]
            assert np.array_equal(scene.cache[0].numpy(), expected)
            assert scene.lengths.numpy()[: len(kept)].tolist() == [lengths[old] for old in kept]
        graph.close()
        builder.close()
