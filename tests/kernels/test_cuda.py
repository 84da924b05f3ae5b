"""The CUDA kernels against those in NumPy."""

import numpy as np
import pytest

from tests.kernels.layers import check
from tests.kernels.scene import Scene
from tests.simt.standin import StandIn, need_cuda_memory, needs_standin
from trt_kvcache import HostMemory
from trt_kvcache.kernels import MAX_SAVED_TENSORS, CompactionPlan, increment_length_tensor, store_length_values

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


def launches(call, *arguments):
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
        *[(name, {}, 1) for name in (*COMPACTIONS, "single", "batched", "rows", "zero", "copy", "increment")],
        *[(name, {"plan": IDENTITY}, 0) for name in COMPACTIONS],
        *[(name, {"plan": "mapped"}, 1) for name in COMPACTIONS],
        ("compact", {"plan": EMPTY}, 0),
        ("compact_rows", {"plan": EMPTY}, 1),
        ("batched", {"tokens": 0}, 0),
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
    for call in Scene(memory, stream, pairs=MAX_SAVED_TENSORS // 2 + 1).calls(name, {}):
        assert launches(call) == expected


def test_a_replayed_compaction_reads_mapping_and_lengths_anew(memory, stream):
    scene = Scene(memory, stream)
    builder = stream.create_graph_builder()

    def compact(on):
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
