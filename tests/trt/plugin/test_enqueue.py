"""Enqueue, with addresses and a stream that are somebody else's, against the twin in NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.kernels.attention import DECODE_CASES, FEW_CASES, PREFILL_CASES, QUANTIZED, TREE_CASES, quantized
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, need_cuda_memory, needs_standin
from tests.trt.plugin.bound import Bound
from trt_kvcache.errors import CapacityError, KVCacheError, ShapeError
from trt_kvcache.ops.borrowed_workspace import MAX_MULTIPROCESSORS
from trt_kvcache.trt.plugin import enqueue as step

need_cuda_memory()

_CASES = {name: DECODE_CASES[name] for name in ("groups", "one head", "some take no part", "window", "softcap and scale")} | {
    "chunks": replace(PREFILL_CASES["ragged"], layout="combined", packed=False)
}
#: Over quantized K and V: one new token, a few, a chunk of many.
_QUANTIZED_CASES = {
    f"{name}, {kv_dtype}, {scales}": quantized(replace(cases[name], layout="combined", packed=False, in_place=False), kv_dtype, scales)
    for kv_dtype, scales in QUANTIZED
    for cases, name in (
        (DECODE_CASES, "groups"),
        (DECODE_CASES, "some take no part"),
        (FEW_CASES, "a window inside the new tokens"),
        (FEW_CASES, "large heads, few rows"),
        (PREFILL_CASES, "ragged"),
        (PREFILL_CASES, "small heads"),
    )
}
_CASES |= _QUANTIZED_CASES

#: One of each kind of updates.
_KINDS = ["groups", "chunks", "groups, float8_e4m3fn, token", "ragged, int8, token", "groups, int8, head"]


@pytest.mark.parametrize("name", list(_CASES))
def test_the_result_is_that_of_numpy(memory, stream, name):
    bound = Bound(_CASES[name], memory, stream)
    for _ in range(2):
        bound.fill()
        bound.enqueue()
        bound.check(_CASES[name].dtype)


@pytest.mark.parametrize("name", list(_CASES))
def test_the_launches_are_those_of_attend(memory, stream, name):
    """Bit for bit, so with the same arguments: in another launch blocks would divide keys otherwise."""
    bound, other = (Bound(_CASES[name], memory, stream) for _ in range(2))
    bound.enqueue()
    other.attend()
    memory.synchronize(stream)
    assert bound.out.numpy().tobytes() == other.out.numpy().tobytes()
    for one in bound.updated:
        assert bound.tensors[one].numpy().tobytes() == other.tensors[one].numpy().tobytes()


@pytest.mark.parametrize("name", _KINDS)
def test_another_layer_may_append_the_same_rows_again(memory, stream, name):
    """A layer that reads K and V of another one does, with queries of its own, and another number of them."""
    stored = Bound(_CASES[name], memory, stream)
    reader = Bound(replace(_CASES[name], group=2 * _CASES[name].group), memory, stream)
    shared = stored.tensors.keys() - {"q"}
    reader.tensors |= {one: stored.tensors[one] for one in shared}
    reader.host |= {one: stored.host[one] for one in shared}
    stored.enqueue()
    reader.enqueue()
    stored.check(_CASES[name].dtype)
    reader.check(_CASES[name].dtype)


def test_shapes_and_addresses_may_change_between_steps(memory, stream):
    """A plugin that has run is told of other shapes, and is handed other addresses without being told."""
    first, second = (Bound(_CASES["groups"], memory, stream) for _ in range(2))
    larger = Bound(replace(_CASES["groups"], lengths=(4, 0, 9)), memory, stream)
    first.enqueue()
    second.plugin = larger.plugin = first.plugin
    second.enqueue()
    second.check("float16")
    first.plugin.on_shape_change(larger.descs, [])
    larger.enqueue()
    larger.check("float16")
    for call, rest in ((first.plugin.on_shape_change, ()), (first.plugin.enqueue, ([], [0, 0], 0, 0))):  # refused, and not run as before
        with pytest.raises(KVCacheError, match=r"^q: "):
            call(larger.descs[::-1], [], *rest)


@pytest.mark.parametrize("name", _KINDS)
def test_a_step_can_be_captured_in_a_graph(memory, stream, name):
    bound = Bound(_CASES[name], memory, stream)
    bound.enqueue()
    builder = stream.create_graph_builder()
    builder.begin_building()
    bound.enqueue()
    graph = builder.end_building().complete()
    bound.out.numpy()  # waits for all streams
    for _ in range(2):
        bound.fill()
        graph.launch(stream)
        bound.check(_CASES[name].dtype)


def test_the_default_stream_is_taken(memory, stream):
    bound = Bound(_CASES["groups"], memory, stream)
    memory.synchronize(stream)
    bound.handle = 0
    bound.enqueue()
    bound.out.numpy()  # waits for all streams
    bound.check("float16")


@pytest.mark.parametrize("name", _KINDS)
def test_what_is_not_aliased_is_copied(memory, stream, name, caplog):
    """The cache, and the scales of its tokens."""
    step._warn_of_copies.cache_clear()
    bound = Bound(_CASES[name], memory, stream)
    past = {name: bound.tensors[name] for name in bound.updated}
    present = {name: memory.to_device(np.full_like(bound.host[name], 77), stream=stream) for name in bound.updated}
    for _ in range(2):
        bound.enqueue(**{name: tensor.ptr for name, tensor in present.items()})
    memory.synchronize(stream)
    for name, tensor in past.items():
        assert tensor.numpy().tobytes() == bound.host[name].tobytes()
    bound.tensors |= present
    bound.check(bound.case.dtype)
    assert [record.getMessage() for record in caplog.records] == [
        "TensorRT gave a plugin layer separate memory for the cache's output: each step copies the layer's whole cache."
    ]


@needs_standin
def test_the_copy_neither_waits_nor_allocates(memory, stream):
    bound = Bound(_CASES["groups"], memory, stream)
    present = memory.to_device(bound.host["cache"], stream=stream)
    bound.enqueue(cache=present.ptr)
    standin = StandIn()
    bound.enqueue(cache=present.ptr)
    made = standin.take_calls()
    assert not {*made} & (WAITS | ALLOCATIONS)
    assert made.count("cuMemcpyDtoDAsync_v2") == 1


def test_after_copies_an_aliased_cache_is_updated_in_place_again(memory, stream):
    bound = Bound(_CASES["groups"], memory, stream)
    elsewhere = memory.to_device(bound.host["cache"], stream=stream)
    bound.enqueue(cache=elsewhere.ptr)
    bound.enqueue()
    bound.check("float16")


@needs_standin
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("groups", {"cuMemsetD8Async": 1, "cuLaunchKernelEx": 1}),
        ("chunks", {"cuLaunchKernelEx": 2}),
        ("groups, int8, token", {"cuMemsetD8Async": 1, "cuLaunchKernelEx": 1}),
        ("ragged, float8_e4m3fn, head", {"cuLaunchKernelEx": 2}),
    ],
)
def test_enqueue_neither_waits_nor_allocates(memory, stream, name, calls):
    bound = Bound(_CASES[name], memory, stream)
    bound.enqueue()
    standin = StandIn()
    bound.enqueue()
    made = standin.take_calls()
    assert not {*made} & (WAITS | ALLOCATIONS)
    assert {call: made.count(call) for call in made if "Launch" in call or "Memset" in call} == calls


def test_a_gpu_with_more_multiprocessors_than_the_workspace_is_for_is_refused(memory, stream, monkeypatch):
    bound = Bound(_CASES["groups"], memory, stream)
    monkeypatch.setattr(memory, "multiprocessor_count", MAX_MULTIPROCESSORS + 1)
    monkeypatch.setattr("trt_kvcache.trt.plugin.plugin.current_memory", lambda: memory)
    with raises(CapacityError, "cuda:0", expected="at most 256 multiprocessors", got=257):
        bound.enqueue()


def test_the_memory_is_that_of_the_current_device(memory):
    memory.make_current()
    assert step.current_memory() is step.current_memory()
    assert step.current_memory().device == memory.device


_TREES = ["a few tokens", "ragged", "as many tokens as a mask has bits", "a window inside the tree", "heads of 512"]
_TREE_CASES = {name: replace(TREE_CASES[name], layout="combined", packed=False, in_place=False, new=None) for name in _TREES}
_TREE_CASES |= {
    f"a few tokens, {kv_dtype}, {scales}": quantized(_TREE_CASES["a few tokens"], kv_dtype, scales) for kv_dtype, scales in QUANTIZED
}


@pytest.mark.parametrize("name", list(_TREE_CASES))
def test_trees(memory, stream, name):
    bound = Bound(_TREE_CASES[name], memory, stream, takes_trees=True)
    for _ in range(2):
        bound.fill()
        bound.enqueue()
        bound.check(_TREE_CASES[name].dtype)


@pytest.mark.parametrize("name", ["groups", "chunks", "a window inside the new tokens", "ragged"])
def test_chains_where_trees_may_be(memory, stream, name):
    """One new token, many, which are no tree, and a few, which are a tree of all bits."""
    cases = DECODE_CASES | FEW_CASES | PREFILL_CASES | _CASES
    case = replace(cases[name], layout="combined", packed=False, in_place=False)
    bound = Bound(case, memory, stream, takes_trees=True)
    bound.enqueue()
    bound.check(case.dtype)


def test_ancestors_of_fewer_slots_are_refused(memory, stream):
    bound = Bound(_TREE_CASES["a few tokens"], memory, stream, takes_trees=True)
    bound.tensors["ancestors"] = bound.tensors["ancestors"][:1]
    with raises(ShapeError, "ancestors", expected="2 slots or more", got=1):
        bound.enqueue()
