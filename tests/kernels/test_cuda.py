"""The CUDA kernels against those in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simt.standin import StandIn, need_cuda_memory, needs_standin

from kernels.layers import check
from kernels.scene import Scene
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.kernels import (
    MAX_SAVED,
    CompactionPlan,
    KVLayerInfos,
    StateInfos,
    compact_kv_cache_batched,
    compact_rows,
    copy_rows,
    increment_length_tensor,
    instantiate_kv_cache_batched,
    save_kv_cache_batched,
    save_rows,
    store_length_values,
    zero_rows,
)

need_cuda_memory()


@pytest.mark.parametrize("operation", ["number", "tensor", "store", "accumulate"])
@pytest.mark.parametrize("n", [*range(1, 41), 256, 257, 700])
def test_lengths_as_by_numpy(memory, stream, n, operation):
    host, results = HostMemory(), []
    lengths, arguments = np.random.default_rng(n).integers(0, 2**30, (2, n), np.int32)
    for place, on in ((host, host.create_stream()), (memory, stream)):
        padded = place.to_device(np.concatenate([[-1, -2], lengths, [-3, -4]]).astype(np.int32), stream=on)
        if operation in ("number", "tensor"):
            by = arguments[0] if operation == "number" else place.to_device(arguments, stream=on)
            increment_length_tensor(padded[2 : 2 + n], by, stream=on)
        else:
            store_length_values(padded[2 : 2 + n], arguments.tolist(), accumulate=operation == "accumulate", stream=on)
        results.append(padded.numpy().tolist())
    assert results[1] == results[0]
    assert results[0][:2] + results[0][-2:] == [-1, -2, -3, -4]


def launches(call: Any, *arguments: Any) -> int:
    """Make a call twice, of which the first loads the kernel; the second one launches so often, and does nothing else."""
    call(*arguments)
    standin = StandIn()
    call(*arguments)
    made = standin.take_calls()
    assert made == ["cuLaunchKernelEx"] * len(made)
    return len(made)


COMPACTIONS = ("compact", "compact_rows", "compact_lengths")
IDENTITY, EMPTY = CompactionPlan.from_host([0, 1, -1], 3, 2, [5, 4, 3]), CompactionPlan.from_host([1, 0], 2, 2, [0, 0])


@needs_standin
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        *[
            (name, {}, 1)
            for name in ("single", "batched", "rows", "compact", "compact_rows", "compact_lengths", "zero", "copy", "increment")
        ],
        *[(name, {"plan": IDENTITY}, 0) for name in COMPACTIONS],
        *[(name, {"plan": "mapped"}, 1) for name in COMPACTIONS],
        ("compact", {"plan": EMPTY}, 0),
        ("compact_rows", {"plan": EMPTY}, 1),
        ("batched", {"tokens": 0}, 0),
        ("zero", {"count": 0}, 0),
    ],
    ids=str,
)
def test_launches_of_a_call(memory, stream, name, given, expected):
    scene = Scene(memory, stream)
    for call in scene.calls(name, {"plan": scene.mapped} if given == {"plan": "mapped"} else given):
        assert launches(call) == expected


@needs_standin
@pytest.mark.parametrize(("name", "expected"), [("batched", 2), ("rows", 2), ("compact", 1), ("compact_rows", 1), ("zero", 1)])
def test_launches_of_many_layers(memory, stream, name, expected):
    for call in Scene(memory, stream, pairs=MAX_SAVED // 2 + 1).calls(name, {}):
        assert launches(call) == expected


@needs_standin
@pytest.mark.parametrize(("n", "expected"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_launches_of_a_store(memory, stream, n, expected):
    lengths = memory.to_device(np.zeros(n, np.int32), stream=stream)
    assert launches(lambda: store_length_values(lengths, [1] * n, accumulate=False, stream=stream)) == expected


@pytest.fixture
def launched(monkeypatch):
    """Nothing is launched: grid and arguments of each launch come here."""
    launched: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = []
    for module in ("lengths", "kv", "rows"):
        monkeypatch.setattr(f"trt_kvcache.kernels.cuda.{module}.launch", lambda _m, _s, _n, grid, given, _: launched.append((grid, given)))
    return launched


def test_every_argument_is_a_python_int(memory, stream, launched):
    """cuda.core passes those as 64 bits, which the kernels read; a NumPy int32 would be 32."""
    scene, n = Scene(memory, stream), np.int64(1)
    store_length_values(scene.lengths, list(np.ones(3, np.int32)), accumulate=np.True_, stream=stream)
    increment_length_tensor(scene.lengths, np.int32(3), stream=stream)
    increment_length_tensor(scene.lengths, scene.lengths, stream=stream)
    assert [len(given) for _, given in launched] == [19, 3, 3]
    plan = CompactionPlan.from_host(np.array([1, 0]), n + 1, n + 1, np.array([3, 4]))
    mapped = CompactionPlan.from_device(scene.mapping, n + 2, n + 1, scene.lengths)
    calls = (
        scene.calls("batched", {"slot": n, "tokens": n}) + scene.calls("zero", {"slot": n, "count": n}) + scene.calls("rows", {"slot": n})
    )
    for name in COMPACTIONS:
        calls += scene.calls(name, {"plan": plan}) + scene.calls(name, {"plan": mapped})
    for call in calls:
        call()
    assert len(launched) == 3 + 5 + 6
    assert {type(argument) for grid, given in launched for argument in (*grid, *given)} == {int}


class TestGrids:
    """How many blocks a launch has: so many as the live tokens need, whatever the size of the cache."""

    @pytest.fixture
    def grid(self, launched):
        """The grid of the one launch that a call makes."""

        def call(function: Any, *arguments: Any, **named: Any) -> tuple[int, int, int]:
            function(*arguments, **named)
            ((only, _),) = launched
            launched.clear()
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


def test_a_replayed_compaction_reads_mapping_and_lengths_anew(memory, stream):
    scene = Scene(memory, stream)
    builder = stream.create_graph_builder()

    def compact(on: Any) -> None:
        for name in COMPACTIONS:
            for call in scene.calls(name, {"plan": scene.mapped, "stream": on}):
                call()

    contents = [layer.expected.copy() for layer in scene.made]
    compact(stream)  # loads the kernels
    memory.synchronize(stream)
    builder.begin_building()
    compact(builder)
    graph = builder.end_building().complete()
    for mapping, lengths in (([-1, 0, 1], [5, 4, 3]), ([0, -1, 1], [1, 2, 5]), ([0, 1, 2], [1, 1, 1])):
        kept = [old for old in range(3) if mapping[old] >= 0]
        memory.upload(scene.mapping, np.array(mapping, np.int32), stream=stream)
        memory.upload(scene.lengths, np.array(lengths, np.int32), stream=stream)
        for layer, content in zip(scene.made, contents, strict=True):
            memory.upload(layer.whole, content, stream=stream)
            layer.expected[:] = content
            for new, old in enumerate(kept):
                layer.slots[new, :, :, : lengths[old]] = layer.slots[old, :, :, : lengths[old]]
        graph.launch(stream)
        memory.synchronize(stream)
        check(scene.made)
        assert scene.lengths.numpy()[: len(kept)].tolist() == [lengths[old] for old in kept]
    graph.close()
    builder.close()
