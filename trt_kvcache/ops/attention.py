"""Attention over the combined cache as a custom operation: RoPE, append and attention of the new tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trt_kvcache.errors import CapacityError, DTypeError, ShapeError
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_fields import AttentionFields
from trt_kvcache.ops.attention_shapes import MOST_MULTIPROCESSORS, workspace_nbytes
from trt_kvcache.ops.attention_step import BorrowedWorkspace
from trt_kvcache.ops.custom_op import TensorType

_CACHE = 3


class AttentionOp:
    """:func:`trt_kvcache.kernels.attend` without ``new_lengths``: all tokens of a step are appended.

    Inputs: q ``[B, s, num_heads, D]``, k and v ``[B, s, num_kv_heads, D]``, cache ``[B, 2, num_kv_heads, S, D]``, lengths int32
    ``[B]``, cos_sin float32 ``[S, 2, rotary_dim / 2]`` (none where that is 0). Outputs: attended ``[B, s, num_heads, D]``, and the
    cache in its place. NumPy serves any head dim and dtype, the kernels those of
    :class:`~trt_kvcache.trt.plugin.AttentionFields`.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim : int
    scale, window, softcap, rotary_dim : optional
        As for the plugin; ``rotary_dim`` is ``head_dim`` if left out.
    """

    name = "attention"

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float = 0.0, window: int = 0, softcap: float = 0.0,
        rotary_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self._scores: dict[str, Any] = {"window": window, "softcap": softcap}
        self._scale = scale
        self.attributes: dict[str, int | float] = {
            "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "scale": scale, **self._scores, "rotary_dim": self._rotary_dim,
        }  # fmt: skip
        self._workspace: BorrowedWorkspace | None = None

    def fields(self) -> AttentionFields:
        """Return its parameters as the fields of the plugin. Raises ConfigError where the kernels do not serve them."""
        return AttentionFields(**self.attributes)  # type: ignore[arg-type]  # each as it was given

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """See :class:`~trt_kvcache.ops.custom_op.CustomOp`."""
        shapes = [one.shape for one in inputs]
        batch, width = shapes[0][:2]
        tokens, head_dim = shapes[_CACHE][3], self._head_dim
        q, *kv = ((batch, width, heads, head_dim) for heads in (self._heads, self._kv_heads, self._kv_heads))
        cache = (batch, 2, self._kv_heads, tokens, head_dim)
        expected = [q, *kv, cache, (batch,), *([(tokens, 2, self._rotary_dim // 2)] if self._rotary_dim else [])]
        if shapes != expected or width > tokens:
            raise ShapeError(f"attention: expected inputs of shapes {expected} and at most {tokens} new tokens, got {shapes}.")
        dtypes = [one.dtype for one in inputs]
        if dtypes != [dtypes[0]] * 4 + ["int32", "float32"][: len(dtypes) - 4]:
            raise DTypeError(f"attention: expected q, k, v and cache of one dtype, int32 lengths and float32 cos_sin, got {dtypes}.")
        return TensorType(q, dtypes[0]), TensorType(cache, dtypes[0], alias=_CACHE)

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """See :class:`~trt_kvcache.ops.custom_op.CustomOp`. None where NumPy alone serves."""
        served = inputs[0].dtype in ELEMENT_TYPES and self._head_dim in HEAD_DIMS
        return workspace_nbytes(self.fields(), 1) if served else 0

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """Launch it: one launch for a decode step, else two."""
        q, k, v, cache, lengths, *angles = inputs
        call = AttentionParams(
            q=q, k=k, v=v, cache=cache, lengths=lengths, new_lengths=None, cos_sin=angles[0] if angles else None,
            out=outputs[0], scale=self._scale or 1 / math.sqrt(self._head_dim), **self._scores,
        )  # fmt: skip
        borrowed = None if cache.memory.is_host else self._borrow(workspace)
        backend_of(cache.memory).attend(call, borrowed, stream)  # type: ignore[arg-type]  # NumPy looks at none

    def _borrow(self, workspace: DeviceTensor) -> BorrowedWorkspace:
        """Return it as the kernel's; made again when it is another one than before."""
        if self._workspace is None or self._workspace.bytes.ptr != workspace.ptr:
            memory: Any = workspace.memory  # of a GPU
            if memory.multiprocessor_count > MOST_MULTIPROCESSORS:
                raise CapacityError(f"{memory.device}: expected at most {MOST_MULTIPROCESSORS} multiprocessors, it has more.")
            self._workspace = BorrowedWorkspace(self.fields(), memory)
            self._workspace.bytes.ptr = workspace.ptr
        return self._workspace
