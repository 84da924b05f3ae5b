"""The selective state space of Mamba-2 layers, over the new tokens of each slot and the state before them."""

from __future__ import annotations

import math
from typing import Any

from trt_kvcache.errors import RangeError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_states, check_tokens, check_vectors
from trt_kvcache.kernels.recurrent_params import Mamba2Params
from trt_kvcache.memory.tensor import DeviceTensor

#: The largest state size.
MAX_STATE_SIZE = 256

#: What divides head dims and state sizes.
SIZE_GRANULE = 8


def mamba2_scan(
    x: DeviceTensor,
    dt: DeviceTensor,
    b: DeviceTensor,
    c: DeviceTensor,
    past: DeviceTensor,
    *,
    a: DeviceTensor,
    present: DeviceTensor,
    out: DeviceTensor,
    d: DeviceTensor | None = None,
    dt_bias: DeviceTensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    new_lengths: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Run the new tokens of each slot through the state space, and move the state on.

    For each token and head, ``step = clip(softplus(dt + dt_bias), *dt_limits)``,
    ``state = exp(step * a) * state + step * outer(x, b)`` and ``out = state @ c + d * x``. One new token for each slot is a decode step;
    more are a chunk or a whole prompt.

    Parameters
    ----------
    x : DeviceTensor ``[B, s, heads, head_dim]`` float16, bfloat16 or float32
        New tokens, after the convolution. Slots and tokens may be strided, at multiples of 16 bytes; head_dim is a multiple of 8.
    dt : DeviceTensor ``[B, s, heads]``
        Time steps, before bias and softplus. Slots and tokens may be strided.
    b, c : DeviceTensor ``[B, s, groups, state_size]``
        Strided as ``x`` may be. Each group serves ``heads / groups`` heads that follow each other. state_size is a multiple of 8, up to
        256.
    past : DeviceTensor ``[B, heads, head_dim, state_size]``, of the dtype of ``x`` or float32
        The state before the new tokens; zeros before the first one. A recurrent state of the cache.
    a : DeviceTensor ``[heads]`` float32
        Negative: ``-exp(A_log)`` of a checkpoint. On a GPU it, ``d`` and ``dt_bias`` are read before earlier launches on the stream have
        ended: none of those may still write them.
    present : DeviceTensor like ``past``
        Overwritten with the state after the new tokens. May be ``past`` itself; otherwise they must not overlap.
    out : DeviceTensor ``[B, s, heads, head_dim]``
        Contiguous, overwritten; it must not overlap the inputs. Zeros behind the new tokens of a slot.
    d : DeviceTensor ``[heads]`` float32, optional
        Of the skip connection.
    dt_bias : DeviceTensor ``[heads]`` float32, optional
        Added to ``dt``.
    dt_limits : tuple of float
        Smallest and largest time step.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s. The rest is padding, of any content, and leaves no trace; a slot of none keeps its state bit for
        bit. By default all s are new.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, RangeError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    "Transformers are SSMs" (Dao and Gu, 2024): ``selective_state_update`` and ``mamba_chunk_scan_combined`` of Mamba-2, Bamba, Granite 4
    and Nemotron-H. Time steps, states and sums are float32 within a call; the state is rounded to its dtype at the end of one. The limits
    hold for a single token too, so that results do not depend on how tokens are split into calls. From 17 new tokens on, a GPU computes
    activations of 16 bits with tensor cores, for state sizes of 64 and 128: the matrix of a chunk, and the state that its outputs see, are
    then rounded to the dtype of ``x``, in which float16 ends at 65504.

    Examples
    --------
    A state of 8 by 8, after one token of ones with a time step of log(2), in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import mamba2_scan
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def ones(*shape):
    ...     return memory.to_device(np.ones(shape, np.float32), stream=stream)
    >>> x, b, c, state, out = ones(1, 1, 1, 8), ones(1, 1, 1, 8), ones(1, 1, 1, 8), ones(1, 1, 8, 8), ones(1, 1, 1, 8)
    >>> dt, a = (memory.to_device(np.full(shape, value, np.float32), stream=stream) for shape, value in (((1, 1, 1), 0), (1, -1)))
    >>> mamba2_scan(x, dt, b, c, state, a=a, present=state, out=out, stream=stream)
    >>> bool(np.allclose(state.numpy(), 0.5 + np.log(2))), bool(np.allclose(out.numpy(), 4 + 8 * np.log(2)))
    (True, True)
    """
    check_first("x", x, "[B, s, heads, head_dim]")
    slots, width, heads, head_dim = x.shape
    check_tokens("x", x, x, x.shape)
    check_tokens("dt", dt, x, (slots, width, heads))
    if not isinstance(b, DeviceTensor) or b.ndim != x.ndim or not b.shape[2] or heads % b.shape[2]:
        raise ShapeError(f"b: expected a tensor [{slots}, {width}, groups, state_size] with groups a divisor of {heads}, got {b!r}.")
    state_size = b.shape[3]
    if head_dim % SIZE_GRANULE:
        raise ShapeError(f"x: expected a head_dim that is a multiple of {SIZE_GRANULE}, got {x!r}.")
    if state_size % SIZE_GRANULE or not 0 < state_size <= MAX_STATE_SIZE:
        raise ShapeError(f"b: expected a state_size that is a multiple of {SIZE_GRANULE}, up to {MAX_STATE_SIZE}, got {b!r}.")
    for name, tensor, shape in (("x", x, x.shape), ("b", b, b.shape), ("c", c, b.shape)):
        check_tokens(name, tensor, x, shape)
        check_vectors(name, tensor)
    check_states(past, present, x, (slots, heads, head_dim, state_size))
    check_dense("a", a, x, "float32", (heads,))
    for name, parameter in (("d", d), ("dt_bias", dt_bias)):
        if parameter is not None:
            check_dense(name, parameter, x, "float32", (heads,))
    check_dense("out", out, x, x.dtype, x.shape)
    low, high = map(float, dt_limits)
    if not 0 <= low <= high:
        raise RangeError(f"dt_limits: expected 0 <= smallest <= largest, got {low} and {high}.")
    check_new_lengths(new_lengths, x)
    x.memory.check_stream(stream)
    params = Mamba2Params(
        x=x, dt=dt, b=b, c=c, past=past, a=a, present=present, out=out, d=d, dt_bias=dt_bias, dt_limits=(low, high), new_lengths=new_lengths
    )
    if slots:
        backend_of(x.memory).mamba2_scan(params, stream)
