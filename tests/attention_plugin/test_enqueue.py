"""Enqueue, with addresses and a stream that are somebody else's, against the twin in NumPy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernels.attention import DECODE_CASES, PREFILL_CASES, TOLERANCE, Case
from simt.standin import ALLOCATIONS, WAITS, StandIn, need_cuda_memory, needs_standin

from attention_plugin.stand_in import DataType, tensorrt
from trt_kvcache import HostMemory
from trt_kvcache.attention_plugin import AttentionFields, plugin_class, step
from trt_kvcache.attention_plugin.shapes import MOST_MULTIPROCESSORS, workspace_nbytes
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import BindingError, CapacityError
from trt_kvcache.kernels import AttentionWorkspace, attend

need_cuda_memory()

_TYPES = {"float16": DataType.HALF, "bfloat16": DataType.BF16, "float32": DataType.FLOAT, "int32": DataType.INT32}
_CASES = {name: DECODE_CASES[name] for name in ("groups", "some take no part", "window", "softcap and scale")} | {
    "chunks": replace(PREFILL_CASES["ragged"], layout="combined", packed=False)
}


class Bound:
    """A plugin with its tensors, on the device and on the host, and a workspace full of ones."""

    def __init__(self, case: Case, memory: Any, stream: Any) -> None:
        random, dtype = np.random.default_rng(1), numpy_dtype(case.dtype)
        slots, heads, dim = len(case.lengths), case.kv_heads * case.group, case.head_dim
        rotary = dim if case.rotary_dim is None else case.rotary_dim
        self.fields = AttentionFields(
            num_heads=heads, num_kv_heads=case.kv_heads, head_dim=dim, scale=case.scale or 0.0, window=case.window,
            softcap=case.softcap, rotary_dim=rotary,
        )  # fmt: skip
        rows = {name: (slots, case.width, count, dim) for name, count in (("q", heads), ("k", case.kv_heads), ("v", case.kv_heads))}
        self.host = {name: random.standard_normal(shape).astype(dtype) for name, shape in rows.items()}
        cache = np.full((slots, 2, case.kv_heads, case.tokens, dim), np.nan, dtype)
        for slot, past in enumerate(case.lengths):
            cache[slot, :, :, :past] = random.standard_normal((2, case.kv_heads, past, dim)).astype(dtype)
        self.host |= {"cache": cache, "lengths": np.array(case.lengths, np.int32)}
        if rotary:
            self.host["cos_sin"] = random.standard_normal((case.tokens, 2, rotary // 2)).astype(np.float32)
        if case.new is not None:
            self.host["new_lengths"] = np.array(case.new, np.int32)
        self.memory, self.stream, self.handle = memory, stream, int(stream.__cuda_stream__()[1])
        self.tensors = {name: memory.to_device(array, stream=stream) for name, array in self.host.items()}
        self.out = memory.to_device(np.full(rows["q"], np.nan, dtype), stream=stream)
        needed = workspace_nbytes(self.fields, slots, case.width)
        self.workspace = memory.to_device(np.full(needed, 0xFF, np.uint8), stream=stream)
        self.plugin = plugin_class(tensorrt())(self.fields)

    def enqueue(self, **changed: int) -> None:
        descs = [SimpleNamespace(dims=tensor.shape, type=_TYPES[tensor.dtype]) for tensor in self.tensors.values()]
        inputs = [tensor.ptr for tensor in self.tensors.values()]
        outputs = [self.out.ptr, changed.get("cache", self.tensors["cache"].ptr)]
        self.plugin.enqueue(descs, [], inputs, outputs, self.workspace.ptr, self.handle)

    def twin(self) -> tuple[Any, Any]:
        """Return out and the cache as the kernels' twin leaves them."""
        memory = HostMemory()
        stream = memory.create_stream()
        tensors = {name: memory.to_device(array, stream=stream) for name, array in self.host.items()}
        fields, slots = self.fields, len(self.host["q"])
        sizes = {"num_heads": fields.num_heads, "num_kv_heads": fields.num_kv_heads, "head_dim": fields.head_dim}
        attend(
            **tensors, out=(out := memory.to_device(self.host["q"], stream=stream)), scale=fields.scale or None, window=fields.window,
            softcap=fields.softcap, workspace=AttentionWorkspace(memory, max_batch_size=slots, **sizes, stream=stream), stream=stream,
        )  # fmt: skip
        return out.numpy().astype(np.float64), tensors["cache"].numpy()

    def check(self, dtype: str) -> None:
        self.memory.synchronize(self.stream)
        expected, cache = self.twin()
        error, size = (np.abs(x).max(axis=(1, 3)) for x in (self.out.numpy().astype(np.float64) - expected, expected))
        assert (error <= 2 * TOLERANCE[dtype] * size).all()  # both are rounded
        assert self.tensors["cache"].numpy().tobytes() == cache.tobytes()


@pytest.mark.parametrize("name", list(_CASES))
def test_as_the_twin(memory, stream, name):
    bound = Bound(_CASES[name], memory, stream)
    for _ in range(2):
        bound.enqueue()
    bound.check(_CASES[name].dtype)


def test_new_shapes_and_addresses(memory, stream):
    """A plugin that has run is told of other shapes, and is handed other addresses without being told."""
    first, second = (Bound(_CASES["groups"], memory, stream) for _ in range(2))
    larger = Bound(replace(_CASES["groups"], lengths=(4, 0, 9)), memory, stream)
    first.enqueue()
    second.plugin = larger.plugin = first.plugin
    second.enqueue()
    second.check("float16")
    first.plugin.on_shape_change([SimpleNamespace(dims=tensor.shape, type=_TYPES[tensor.dtype]) for tensor in larger.tensors.values()], [])
    larger.enqueue()
    larger.check("float16")


@pytest.mark.parametrize("name", ["groups", "chunks"])
def test_in_a_graph(memory, stream, name):
    bound = Bound(_CASES[name], memory, stream)
    bound.enqueue()
    builder = stream.create_graph_builder()
    builder.begin_building()
    bound.enqueue()
    graph = builder.end_building().complete()
    for _ in range(2):
        memory.zero(bound.out, stream=stream)
        graph.launch(stream)
    bound.check(_CASES[name].dtype)


def test_the_default_stream(memory, stream):
    bound = Bound(_CASES["groups"], memory, stream)
    memory.synchronize(stream)
    bound.handle = 0
    bound.enqueue()
    bound.out.numpy()  # waits for all streams
    bound.check("float16")


def test_a_cache_that_is_not_aliased(memory, stream):
    bound = Bound(_CASES["groups"], memory, stream)
    with pytest.raises(BindingError, match=r"^cache: expected the output at the address of the input 0x\w+, got 0x100\. Build with allow_"):
        bound.enqueue(cache=0x100)
    assert bound.tensors["cache"].numpy().tobytes() == bound.host["cache"].tobytes()


@needs_standin
@pytest.mark.parametrize(
    ("name", "calls"), [("groups", {"cuMemsetD8Async": 1, "cuLaunchKernelEx": 1}), ("chunks", {"cuLaunchKernelEx": 2})]
)
def test_neither_waits_nor_allocates(memory, stream, name, calls):
    bound = Bound(_CASES[name], memory, stream)
    bound.enqueue()
    standin = StandIn()
    bound.enqueue()
    made = standin.take_calls()
    assert not {*made} & (WAITS | ALLOCATIONS)
    assert {call: made.count(call) for call in made if "Launch" in call or "Memset" in call} == calls


def test_more_multiprocessors_than_the_workspace_is_for(memory, stream, monkeypatch):
    bound = Bound(_CASES["groups"], memory, stream)
    monkeypatch.setattr(memory, "multiprocessor_count", MOST_MULTIPROCESSORS + 1)
    monkeypatch.setattr("trt_kvcache.attention_plugin.plugin.current_memory", lambda: memory)
    with pytest.raises(CapacityError, match=r"^cuda:0: expected at most 256 multiprocessors, got 257\.$"):
        bound.enqueue()


def test_the_memory_is_that_of_the_device(memory):
    memory.make_current()
    assert step.current_memory() is step.current_memory()
    assert step.current_memory().device == memory.device
