"""Attention over a combined cache as a custom operation: RoPE, append to the cache, causal attention of the new tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trt_kvcache.dtypes import SCALED_KV_DTYPES
from trt_kvcache.engine.step_ancestors import WORDS_PER_TOKEN, ancestors_of_step
from trt_kvcache.errors import CapacityError, DTypeError, ShapeError
from trt_kvcache.kernels.attention_kernels import attend_kernel
from trt_kvcache.kernels.attention_params import HEAD_SCALES_NDIM, TOKEN_SCALES_NDIM, AttentionParams
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS
from trt_kvcache.kernels.scale_views import saved_scales
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.borrowed_workspace import MAX_MULTIPROCESSORS, BorrowedWorkspace, workspace_nbytes
from trt_kvcache.ops.custom_op import TensorType

#: Index of the cache among the inputs, and of the scales of a quantized one, or of the ancestors before these.
_CACHE, _SCALES = 3, 5


class AttentionOp:
    """Apply RoPE to q and k, append k and v to the cache, and compute causal attention (implements ``CustomOp``).

    All s new tokens of a slot are appended, padding included. NumPy computes any head dimension and dtype.
    """

    # With sinks=1 the last input is attention sinks, float32 [num_heads]. With trees=1 new tokens may be trees of draft tokens, whose
    # ancestors, int32 [slots, 64, 2], follow the lengths.

    name = "attention"

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float = 0.0, window: int = 0, softcap: float = 0.0,
        rotary_dim: int | None = None, sinks: int = 0, trees: int = 0,
    ) -> None:  # fmt: skip
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self._scores: dict[str, Any] = {"window": window, "softcap": softcap}
        self._scale = scale
        self.attributes: dict[str, int | float] = {
            "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "scale": scale, **self._scores, "rotary_dim": self._rotary_dim,
        }  # fmt: skip
        self._has_sinks, self._takes_trees = bool(sinks), bool(trees)
        self.attributes |= {name: 1 for name, given in (("sinks", sinks), ("trees", trees)) if given}
        self._workspace: BorrowedWorkspace | None = None

    def kernel_attributes(self) -> AttentionAttributes:
        """Return the attributes, checked against what the CUDA kernels support."""
        of_kernels = {name: value for name, value in self.attributes.items() if name not in ("sinks", "trees")}
        return AttentionAttributes(**of_kernels)  # type: ignore[arg-type]  # each as it was given

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """See :meth:`CustomOp.outputs <trt_kvcache.ops.custom_op.CustomOp.outputs>`."""
        shapes = [one.shape for one in inputs]
        batch, width = shapes[0][:2]
        tokens, head_dim = shapes[_CACHE][3], self._head_dim
        q, *kv = ((batch, width, heads, head_dim) for heads in (self._heads, self._kv_heads, self._kv_heads))
        cache = (batch, 2, self._kv_heads, tokens, head_dim)
        scales = self._scales_shape(inputs)
        ancestors = [(inputs[_SCALES].shape[0], MAX_TREE_TOKENS, WORDS_PER_TOKEN)] if self._takes_trees else []
        expected = [q, *kv, cache, (batch,), *ancestors, *([] if scales is None else [scales])]
        expected += [(tokens, 2, self._rotary_dim // 2)] if self._rotary_dim else []
        expected += [(self._heads,)] if self._has_sinks else []
        if shapes != expected or width > tokens:
            raise ShapeError(f"attention: expected inputs of shapes {expected} and at most {tokens} new tokens, got {shapes}.")
        dtypes = [one.dtype for one in inputs]
        stored = dtypes[0] if scales is None else dtypes[_CACHE]
        integers = ["int32"] * (1 + len(ancestors))
        if dtypes != [dtypes[0]] * 3 + [stored, *integers, *["float32"] * (len(dtypes) - 4 - len(integers))]:
            raise DTypeError(
                "attention: expected q, k and v of one dtype, the cache of the same or quantized, int32 lengths and ancestors, and float32 "
                f"cos_sin, scales and sinks, got {dtypes}."
            )
        found = TensorType(q, dtypes[0]), TensorType(cache, stored, alias=_CACHE)
        by_token = scales is not None and len(scales) == TOKEN_SCALES_NDIM
        return (*found, TensorType(scales, "float32", alias=_SCALES + len(ancestors))) if scales is not None and by_token else found

    def _scales_shape(self, inputs: Sequence[TensorType]) -> tuple[int, ...] | None:
        """Return the shape of the scales, by head or by token as the input has them; None without scales."""
        cache = inputs[_CACHE]
        if cache.dtype not in SCALED_KV_DTYPES:
            return None
        place = _SCALES + self._takes_trees
        if len(inputs) > place and len(inputs[place].shape) == HEAD_SCALES_NDIM:
            return (2, self._kv_heads)
        return (cache.shape[0], 2, self._kv_heads, saved_scales(cache.shape[3]))

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """See :meth:`CustomOp.workspace_nbytes <trt_kvcache.ops.custom_op.CustomOp.workspace_nbytes>`.

        0 for inputs that the kernels do not support, which only NumPy can compute.
        """
        served = inputs[0].dtype in ELEMENT_TYPES and self._head_dim in HEAD_DIMS
        return workspace_nbytes(self.kernel_attributes()) if served else 0

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """See :meth:`CustomOp.enqueue <trt_kvcache.ops.custom_op.CustomOp.enqueue>`. One launch for up to 32 new tokens, else two."""
        q, k, v, cache, lengths, *others = inputs
        sinks = others.pop() if self._has_sinks else None
        ancestors = ancestors_of_step(others.pop(0), q) if self._takes_trees else None
        scales, *angles = others if cache.dtype in SCALED_KV_DTYPES else (None, *others)
        call = AttentionParams(
            q=q, k=k, v=v, cache=cache, kv_scales=scales, lengths=lengths, new_lengths=None, cos_sin=angles[0] if angles else None,
            out=outputs[0], scale=self._scale or 1 / math.sqrt(self._head_dim), sinks=sinks, ancestors=ancestors,
            **self._scores,
        )  # fmt: skip
        kernel_workspace = None if cache.memory.is_host else self._kernel_workspace(workspace)
        attend_kernel(call, kernel_workspace, stream)  # type: ignore[arg-type]  # NumPy needs none

    def _kernel_workspace(self, workspace: DeviceTensor) -> BorrowedWorkspace:
        """Return the bytes as a workspace of the kernels. It is made again only when the address has changed."""
        if self._workspace is None or self._workspace.bytes.ptr != workspace.ptr:
            memory: Any = workspace.memory  # CudaMemory
            if memory.multiprocessor_count > MAX_MULTIPROCESSORS:
                raise CapacityError(f"{memory.device}: expected at most {MAX_MULTIPROCESSORS} multiprocessors, it has more.")
            self._workspace = BorrowedWorkspace(self.kernel_attributes(), memory)
            self._workspace.bytes.ptr = workspace.ptr
        return self._workspace
