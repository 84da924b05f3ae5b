"""The gated delta rule of linear attention layers, over the new tokens of each slot and the state before them."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_states, check_tokens, check_vectors
from trt_kvcache.kernels.recurrent_params import DeltaRuleParams
from trt_kvcache.memory.tensor import DeviceTensor

#: The largest size of a key.
MAX_KEY_DIM = 128

#: What divides the sizes of keys and values.
SIZE_GRANULE = 8


def gated_delta_rule(
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    a: DeviceTensor,
    b: DeviceTensor,
    past: DeviceTensor,
    *,
    decay: DeviceTensor,
    present: DeviceTensor,
    out: DeviceTensor,
    dt_bias: DeviceTensor | None = None,
    new_lengths: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Run the new tokens of each slot through the gated delta rule, and move the state on.

    For each token and head, with q and k divided by their L2 norms,
    ``state = exp(decay * softplus(a + dt_bias)) * state``, then ``state += outer(k, sigmoid(b) * (v - k @ state))``, and
    ``out = q @ state / sqrt(key_dim)``. One new token for each slot is a decode step; more are a chunk or a whole prompt.

    Parameters
    ----------
    q, k : DeviceTensor ``[B, s, key_heads, key_dim]`` float16, bfloat16 or float32
        New tokens, after the convolution. Slots and tokens may be strided, at multiples of 16 bytes; key_dim is a multiple of 8, up to 128.
    v : DeviceTensor ``[B, s, heads, value_dim]``
        Strided as ``q`` may be; value_dim is a multiple of 8. Each key head serves ``heads / key_heads`` heads that follow each other.
    a, b : DeviceTensor ``[B, s, heads]``
        What decay and strength of the change come from. Slots and tokens may be strided.
    past : DeviceTensor ``[B, heads, key_dim, value_dim]``, of the dtype of ``q`` or float32
        The state before the new tokens; zeros before the first one. A recurrent state of the cache.
    decay : DeviceTensor ``[heads]`` float32
        Negative: ``-exp(A_log)`` of a checkpoint.
    present : DeviceTensor like ``past``
        Overwritten with the state after the new tokens. May be ``past`` itself; otherwise they must not overlap.
    out : DeviceTensor ``[B, s, heads, value_dim]``
        Contiguous, overwritten; it must not overlap the inputs. Zeros behind the new tokens of a slot.
    dt_bias : DeviceTensor ``[heads]`` float32, optional
        Added to ``a``.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s. The rest is padding, of any content, and leaves no trace; a slot of none keeps its state bit for
        bit. By default all s are new.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024): ``recurrent_gated_delta_rule`` and ``chunk_gated_delta_rule`` of Qwen3-Next
    and Qwen3.5 with ``use_qk_l2norm_in_kernel``, which adds 1e-6 to the squared norms. Everything is float32 within a call; the state is
    rounded to its dtype at the end of one.

    Examples
    --------
    The first token stores its value under its key, and is read with its query, in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import gated_delta_rule
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def full(value, *shape):
    ...     return memory.to_device(np.full(shape, value, np.float32), stream=stream)
    >>> q, k, v = full(1, 1, 1, 1, 8), full(1, 1, 1, 1, 8), full(3, 1, 1, 1, 8)
    >>> a, b, decay, state, out = full(0, 1, 1, 1), full(50, 1, 1, 1), full(-1, 1), full(0, 1, 1, 8, 8), full(0, 1, 1, 1, 8)
    >>> gated_delta_rule(q, k, v, a, b, state, decay=decay, present=state, out=out, stream=stream)
    >>> bool(np.allclose(out.numpy(), 3 / np.sqrt(8)))
    True
    """
    check_first("q", q, "[B, s, key_heads, key_dim]")
    slots, width, key_heads, key_dim = q.shape
    if key_dim % SIZE_GRANULE or key_dim > MAX_KEY_DIM:
        raise ShapeError(f"q: expected a key_dim that is a multiple of {SIZE_GRANULE}, up to {MAX_KEY_DIM}, got {q!r}.")
    if not isinstance(v, DeviceTensor) or v.ndim != q.ndim or 0 in v.shape[2:] or v.shape[2] % key_heads or v.shape[3] % SIZE_GRANULE:
        raise ShapeError(
            f"v: expected a tensor [{slots}, {width}, heads, value_dim] with heads a multiple of {key_heads} "
            f"and value_dim one of {SIZE_GRANULE}, got {v!r}."
        )
    heads, value_dim = v.shape[2:]
    for name, tensor, shape in (("q", q, q.shape), ("k", k, q.shape), ("v", v, (slots, width, heads, value_dim))):
        check_tokens(name, tensor, q, shape)
        check_vectors(name, tensor)
    for name, tensor in (("a", a), ("b", b)):
        check_tokens(name, tensor, q, (slots, width, heads))
    check_states(past, present, q, (slots, heads, key_dim, value_dim))
    check_dense("decay", decay, q, "float32", (heads,))
    if dt_bias is not None:
        check_dense("dt_bias", dt_bias, q, "float32", (heads,))
    check_dense("out", out, q, q.dtype, v.shape)
    check_new_lengths(new_lengths, q)
    q.memory.check_stream(stream)
    params = DeltaRuleParams(
        q=q, k=k, v=v, a=a, b=b, past=past, decay=decay, present=present, out=out, dt_bias=dt_bias, new_lengths=new_lengths
    )
    if slots:
        backend_of(q.memory).gated_delta_rule(params, stream)
