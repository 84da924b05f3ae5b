"""RMS norm with a gate, over groups of columns: the norm after the states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.host_arrays import array_of, new_counts
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early, token_rows
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_tokens, has_vectors
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor


def gated_rms_norm(
    x: DeviceTensor,
    gate: DeviceTensor,
    weight: DeviceTensor,
    *,
    out: DeviceTensor,
    group_size: int,
    gate_first: bool,
    eps: float,
    new_lengths: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Norm groups of columns, and multiply with the SiLU of a gate: before the norm, or after it.

    With ``gate_first``, ``out = norm(x * silu(gate)) * weight``; else ``out = norm(x) * weight * silu(gate)``. A norm divides by the root
    of the mean square of the group, to which ``eps`` is added.

    Parameters
    ----------
    x : DeviceTensor ``[B, s, columns]`` float16, bfloat16 or float32
        New tokens. Slots and tokens may be strided.
    gate : DeviceTensor ``[B, s, columns]``
        Strided as ``x`` may be.
    weight : DeviceTensor ``[columns]`` or ``[group_size]``
        One weight for each column, or one group of weights that all groups share.
    out : DeviceTensor ``[B, s, columns]``
        Contiguous, overwritten; may be ``x`` itself if that is contiguous. Zeros after the new tokens of a slot.
    group_size : int
        Columns of a group: a divisor of the columns.
    gate_first : bool
        True for the gate before the norm.
    eps : float
        Added to the mean square.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s; the rest is padding, of any content. By default all s are new.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    ``MambaRMSNormGated`` of Mamba-2, Bamba, Granite 4 and Nemotron-H in Hugging Face transformers, with ``gate_first`` and the groups
    of B and C; ``Qwen3NextRMSNormGated`` without it, where a group is a head and all heads share the weight. Everything is float32
    within a call.

    Examples
    --------
    A gate of 50, of which the SiLU is 50, in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import gated_rms_norm
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def full(value, *shape):
    ...     return memory.to_device(np.full(shape, value, np.float32), stream=stream)
    >>> x, gate, out = full(3, 1, 1, 8), full(50, 1, 1, 8), full(0, 1, 1, 8)
    >>> gated_rms_norm(x, gate, full(2, 4), out=out, group_size=4, gate_first=False, eps=0, stream=stream)
    >>> out.numpy().ravel().tolist()
    [100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0]
    """
    check_first("x", x, "[B, s, columns]")
    columns = x.shape[2]
    check_tokens("x", x, x, x.shape)
    check_tokens("gate", gate, x, x.shape)
    if not isinstance(group_size, int) or group_size < 1 or columns % group_size:
        raise ShapeError(f"group_size: expected a divisor of {columns} columns, got {group_size}.")
    shared = isinstance(weight, DeviceTensor) and weight.shape == (group_size,)
    check_dense("weight", weight, x, x.dtype, (group_size if shared else columns,))
    check_dense("out", out, x, x.dtype, x.shape)
    check_new_lengths(new_lengths, x)
    x.memory.check_stream(stream)
    params = GatedNormParams(
        x=x, gate=gate, weight=weight, out=out, group_size=group_size, gate_first=bool(gate_first), eps=float(eps), new_lengths=new_lengths
    )
    if len(x):
        gated_rms_norm_kernel(params, stream)


@dataclass(frozen=True, kw_only=True)
class GatedNormParams:
    """The arguments of :func:`~trt_kvcache.kernels.gated_rms_norm`, which describes them."""

    x: DeviceTensor
    gate: DeviceTensor
    weight: DeviceTensor
    out: DeviceTensor
    group_size: int
    gate_first: bool
    eps: float
    new_lengths: DeviceTensor | None

    @property
    def memory(self) -> Memory:
        """Memory of all tensors."""
        return self.x.memory


# --- NumPy, in float32 ---


def _gated_rms_norm_on_host(params: GatedNormParams, stream: Any) -> None:
    x, gate, out = (array_of(tensor) for tensor in (params.x, params.gate, params.out))
    columns, size = x.shape[2], params.group_size
    weight = np.resize(array_of(params.weight).astype(np.float32), columns)
    for slot, count in enumerate(new_counts(params.new_lengths, x)):
        values, gates = (array[slot, :count].astype(np.float32) for array in (x, gate))
        gates /= 1 + np.exp(-gates)
        if params.gate_first:
            values *= gates
        groups = values.reshape(count, columns // size, size)
        normed = groups / np.sqrt((groups * groups).mean(axis=2, keepdims=True) + np.float32(params.eps))
        normed = normed.reshape(count, columns) * weight
        out[slot, :count] = normed if params.gate_first else normed * gates
        out[slot, count:] = 0


# --- CUDA: launches of plugins/recurrent/gated_norm.cu ---


#: Threads of a block: ``kNormThreads`` of the source.
NORM_THREADS = 256

#: The largest group for one warp.
_WARP_GROUP = 512

_WARP = 32


def _gated_rms_norm_on_device(params: GatedNormParams, stream: Any) -> None:
    x, size = params.x, params.group_size
    slots, width, columns = x.shape
    in_vectors = size % (ROW_GRANULE // itemsize(x.dtype)) == 0 and has_vectors(x) and has_vectors(params.gate)
    warps = 1 if size <= _WARP_GROUP else NORM_THREADS // _WARP  # warps of a group
    groups = slots * width * (columns // size)
    arguments = (
        *(*token_rows(x), *token_rows(params.gate), params.weight.ptr, address(params.new_lengths), slots, width, columns),
        *(size, params.weight.shape[0], warps, int(params.gate_first), float(params.eps), int(in_vectors), params.out.ptr),
    )
    launch(
        x.memory,
        "recurrent_gated_norm",
        f"gated_rms_norm_{x.dtype}",
        (-(-groups * warps * _WARP // NORM_THREADS), 1, 1),
        arguments,
        stream,
        threads=NORM_THREADS,
        programmatic_dependent_launch=starts_early(x.memory),
    )


#: Norm groups of columns of the new tokens, with a gate before or after the norm: :class:`GatedNormParams`, stream.
gated_rms_norm_kernel = Kernel(_gated_rms_norm_on_host, _gated_rms_norm_on_device)
