"""A plugin with tensors that are somebody else's, and what the twin in NumPy makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from kernels.attention import TOLERANCE, Case

from attention_plugin.stand_in import DataType, tensorrt
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.attention_plugin import AttentionFields, plugin_class
from trt_kvcache.attention_plugin.shapes import workspace_nbytes
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import AttentionWorkspace, attend

_TYPES = {"float16": DataType.HALF, "bfloat16": DataType.BF16, "float32": DataType.FLOAT, "int32": DataType.INT32}


class Bound:
    """A plugin with its tensors, on the device and on the host. Behind ``out`` there is one slot more, which stays as it is."""

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
        self.out = memory.to_device(np.full((slots + 1, *rows["q"][1:]), np.nan, dtype), stream=stream)
        self.workspace = memory.to_device(np.empty(workspace_nbytes(self.fields, slots, case.width), np.uint8), stream=stream)
        self.fill()
        self.plugin = plugin_class(tensorrt())(self.fields)

    def fill(self) -> None:
        """Leave in the workspace, and in ``out``, what another layer might: all bits are ones."""
        for tensor in (self.workspace, self.out):
            ones = DeviceTensor(tensor.allocation, shape=(tensor.nbytes,), dtype="uint8")
            self.memory.upload(ones, np.full(ones.shape, 0xFF, np.uint8), stream=self.stream)
        self.memory.synchronize(self.stream)

    @property
    def descs(self) -> list[Any]:
        return [SimpleNamespace(dims=tensor.shape, type=_TYPES[tensor.dtype]) for tensor in self.tensors.values()]

    def enqueue(self, **changed: int) -> None:
        inputs = [tensor.ptr for tensor in self.tensors.values()]
        outputs = [self.out.ptr, changed.get("cache", self.tensors["cache"].ptr)]
        self.plugin.enqueue(self.descs, [], inputs, outputs, self.workspace.ptr, self.handle)

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
        *out, behind = self.out.numpy().astype(np.float64)
        assert np.isnan(behind).all()
        error, size = (np.abs(x).max(axis=(1, 3)) for x in (np.array(out) - expected, expected))
        assert (error <= 2 * TOLERANCE[dtype] * size).all()  # both are rounded
        assert self.tensors["cache"].numpy().tobytes() == cache.tobytes()
