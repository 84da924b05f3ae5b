"""RMS norm with a gate, over groups of columns: what follows the states of recurrent layers."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_tokens
from trt_kvcache.kernels.recurrent_params import GatedNormParams
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
        One for all columns, or one that all groups share.
    out : DeviceTensor ``[B, s, columns]``
        Contiguous, overwritten; may be ``x`` itself if that is contiguous. Zeros behind the new tokens of a slot.
    group_size : int
        Columns of a group: a divisor of the columns.
    gate_first : bool
        Whether the gate comes before the norm.
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
    ``MambaRMSNormGated`` of Mamba-2, Bamba, Granite 4 and Nemotron-H in Hugging Face transformers, with ``gate_first`` and as many groups
    as B and C have; ``Qwen3NextRMSNormGated``, without, where a group is a head and all heads share the weight. Everything is float32
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
        backend_of(x.memory).gated_rms_norm(params, stream)
