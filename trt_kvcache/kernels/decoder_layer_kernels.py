"""Elementwise kernels of a decoder layer: residual and norm in one launch, norms of q and k, and the gate of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trt_kvcache._util.checks import one_of
from trt_kvcache.errors import DTypeError, LayoutError, ShapeError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, address, launch, starts_early
from trt_kvcache.kernels.layer_views import check_place
from trt_kvcache.memory.shapes import is_dense
from trt_kvcache.memory.tensor import DeviceTensor

#: Rows of a call, at most: the limit of a grid along y.
MAX_ROWS = 65535

_QKV_NDIM = 3


def add_rms_norm(
    hidden: DeviceTensor,
    change: DeviceTensor,
    weight: DeviceTensor | None,
    *,
    out: DeviceTensor | None,
    eps: float,
    weight_offset: float = 0.0,
    change_weight: DeviceTensor | None = None,
    change_factor: float = 1.0,
    scale: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Add ``change`` to ``hidden`` and write the RMS norm of the sum, times ``weight_offset + weight``, into ``out``.

    Optionally the norm of ``change`` is added instead (post-norm), a factor multiplies it, and a scale multiplies the sum.

    Parameters
    ----------
    hidden : DeviceTensor ``[rows, columns]`` float16 or bfloat16
        The residual stream; an even number of columns. Overwritten with the rounded sum, times ``scale``.
    change : DeviceTensor ``[rows, columns]``
        Output of attention or of the MLP.
    weight : DeviceTensor ``[columns]``, or None
        Weight of the norm. On a GPU weights are read before earlier launches on the stream have ended: none of them may still write them.
        None, with ``out`` None: only the sum.
    out : DeviceTensor ``[rows, columns]``, or None
        Overwritten.
    eps : float
        Epsilon of the norms, added to mean squares.
    weight_offset : float
        Added to weights, in float32.
    change_weight : DeviceTensor ``[columns]``, optional
        Weight of the norm of ``change``, with the same ``eps`` and ``weight_offset``. By default ``change`` is not normalized.
    change_factor : float
        Factor of ``change``, after its norm.
    scale : DeviceTensor ``[1]``, optional
        Factor of the sum, before its norm. On a GPU it is read early, as ``weight`` is.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    Sums are float32, over the rounded values. The norm of ``change``, its product with the factor, the sum and its product with the scale
    are each rounded, as if they were stored. Gemma and OLMo 2 have post-norms, Granite has a factor, Gemma 4 a scale.
    """
    _check("hidden", hidden, hidden)
    if hidden.ndim != 2 or hidden.shape[1] % 2 or len(hidden) > MAX_ROWS:
        raise ShapeError(f"hidden: expected [up to {MAX_ROWS} rows, an even number of columns], got {hidden!r}.")
    if (weight is None) != (out is None):
        raise ShapeError(f"out: expected None where weight is None, and nowhere else, got {out!r} with {weight!r}.")
    rows, columns = hidden.shape, hidden.shape[1:]
    _check_shape("change", change, hidden, rows)
    others = (("weight", weight, columns), ("out", out, rows), ("change_weight", change_weight, columns), ("scale", scale, (1,)))
    for name, tensor, shape in others:
        if tensor is not None:
            _check_shape(name, tensor, hidden, shape)
    hidden.memory.check_stream(stream)
    if hidden.nbytes:
        options = (eps, weight_offset, change_weight, change_factor, scale)
        add_rms_norm_kernel(hidden, change, weight, out, *options, stream)


def qk_rms_norm(
    qkv: DeviceTensor,
    q_weight: DeviceTensor,
    k_weight: DeviceTensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    weight_offset: float = 0.0,
    v_eps: float | None = None,
    stream: Any,
) -> None:
    """Replace q and k by their RMS norms, times ``weight_offset`` + weight: each head alone, or all heads of a row together.

    Optionally each head of v is replaced by its RMS norm too, without a weight.

    Parameters
    ----------
    qkv : DeviceTensor ``[rows, heads, D]`` float16 or bfloat16
        Query heads, then K heads, then V heads if they get a norm, then others, which are not changed. D is even; rows may be strided by
        an even number of elements.
    q_weight : DeviceTensor ``[D]`` or ``[num_heads * D]``
        Each norm spans its length: a head, or all heads. On a GPU it is read before earlier launches on the stream have ended: none of
        them may still write it.
    k_weight : DeviceTensor ``[D]`` or ``[num_kv_heads * D]``
        As ``q_weight``, for k.
    num_heads, num_kv_heads : int
        Query heads, and K/V heads.
    eps : float
        Added to the mean square.
    weight_offset : float
        Added to the weights, in float32.
    v_eps : float, optional
        Added to the mean square of a head of v. By default v is not changed.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    By head as in Qwen3 and Gemma 3, over all heads as in OLMo 2; v as in Gemma 4. Sums are float32, and each value is rounded once.

    Examples
    --------
    One query head and one K/V head, in host memory; v is not changed:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import qk_rms_norm
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> qkv = memory.to_device(np.full((1, 3, 4), 5, np.float16), stream=stream)
    >>> one, two = (memory.to_device(np.full(4, value, np.float16), stream=stream) for value in (1, 2))
    >>> qk_rms_norm(qkv, one, two, num_heads=1, num_kv_heads=1, eps=0, stream=stream)
    >>> qkv.numpy()[0, :, 0].tolist()
    [1.0, 2.0, 5.0]
    """
    _check_element("qkv", qkv, qkv)
    heads = num_heads + num_kv_heads * (1 if v_eps is None else 2)
    if qkv.ndim != _QKV_NDIM or qkv.shape[2] % 2 or not 0 < heads <= qkv.shape[1] or len(qkv) > MAX_ROWS:
        raise ShapeError(f"qkv: expected [up to {MAX_ROWS} rows, {heads} heads or more, an even head_dim], got {qkv!r}.")
    if not is_dense(qkv.shape[1:], qkv.strides[1:]) or (len(qkv) > 1 and qkv.strides[0] < qkv.shape[1] * qkv.shape[2]):
        raise LayoutError(f"qkv: expected rows of dense heads that do not overlap, got {qkv!r}.")
    if qkv.offset % 4 or (len(qkv) > 1 and qkv.strides[0] % 2):
        raise LayoutError(f"qkv: expected rows that begin at multiples of 4 bytes, got {qkv!r}.")
    for name, weight, count in (("q_weight", q_weight, num_heads), ("k_weight", k_weight, num_kv_heads)):
        _check(name, weight, qkv)
        if weight.shape not in ((qkv.shape[2],), (count * qkv.shape[2],)):
            raise ShapeError(f"{name}: expected [{qkv.shape[2]}] for each head or [{count * qkv.shape[2]}] for all, got {weight!r}.")
    qkv.memory.check_stream(stream)
    if qkv.nbytes:
        qk_rms_norm_kernel(qkv, q_weight, k_weight, num_heads, num_kv_heads, eps, weight_offset, v_eps, stream)


def silu_mul(gate_up: DeviceTensor, *, out: DeviceTensor, stream: Any) -> None:
    """Write ``silu(gate) * up`` into ``out``.

    Parameters
    ----------
    gate_up : DeviceTensor ``[rows, 2 * columns]`` float16 or bfloat16
        Columns of gate, then of up; an even number of each.
    out : DeviceTensor ``[rows, columns]``
        Overwritten.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.
    """
    _gated_mul("silu", gate_up, out, stream)


def gelu_tanh_mul(gate_up: DeviceTensor, *, out: DeviceTensor, stream: Any) -> None:
    """Write ``gelu_tanh(gate) * up`` into ``out``: the same as :func:`silu_mul` with another activation.

    Parameters
    ----------
    gate_up, out : DeviceTensor
        As for :func:`silu_mul`.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    ``gelu_pytorch_tanh`` of Hugging Face transformers: Gemma.
    """
    _gated_mul("gelu_tanh", gate_up, out, stream)


def activated_mul(gate: DeviceTensor, factor: DeviceTensor, *, activation: str, out: DeviceTensor, stream: Any) -> None:
    """Write ``activation(gate) * factor`` into ``out``.

    Parameters
    ----------
    gate : DeviceTensor ``[rows, columns]`` float16 or bfloat16
        An even number of columns.
    factor : DeviceTensor ``[rows, columns]``
        Rows may be strided by an even number of elements.
    activation : {"silu", "gelu_tanh"}
        The activation of the gate.
    out : DeviceTensor ``[rows, columns]``
        Overwritten.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ConfigError, ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    The activation is rounded before it is multiplied, as if it were stored, as for the per-layer inputs of Gemma 4.
    """
    one_of("activation", activation, tuple(_SIGMOID_INPUTS))
    _check("gate", gate, gate)
    if gate.ndim != 2 or gate.shape[1] % 2 or len(gate) > MAX_ROWS:
        raise ShapeError(f"gate: expected [up to {MAX_ROWS} rows, an even number of columns], got {gate!r}.")
    _check_shape("out", out, gate, gate.shape)
    _check_element("factor", factor, gate)
    if factor.shape != gate.shape:
        raise ShapeError(f"factor: expected shape {gate.shape}, got {factor!r}.")
    if not is_dense(factor.shape[1:], factor.strides[1:]) or factor.offset % 4 or (len(factor) > 1 and factor.strides[0] % 2):
        raise LayoutError(f"factor: expected dense rows that begin at multiples of 4 bytes, got {factor!r}.")
    out.memory.check_stream(stream)
    if out.nbytes:
        activated_mul_kernel(gate, factor, out, activation, stream)


def _gated_mul(activation: str, gate_up: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    _check("gate_up", gate_up, gate_up)
    _check("out", out, gate_up)
    if gate_up.ndim != 2 or gate_up.shape[1] % 4 or len(gate_up) > MAX_ROWS:
        raise ShapeError(f"gate_up: expected [up to {MAX_ROWS} rows, a multiple of 4 columns], got {gate_up!r}.")
    if out.shape != (len(gate_up), gate_up.shape[1] // 2):
        raise ShapeError(f"out: expected shape {(len(gate_up), gate_up.shape[1] // 2)}, got {out!r}.")
    out.memory.check_stream(stream)
    if out.nbytes:
        gated_mul_kernel(gate_up, out, activation, stream)


def _check(name: str, tensor: DeviceTensor, like: DeviceTensor) -> None:
    _check_element(name, tensor, like)
    if not tensor.is_contiguous or tensor.offset % 4:
        raise LayoutError(f"{name}: expected a dense tensor, got {tensor!r}.")


def _check_shape(name: str, tensor: DeviceTensor, like: DeviceTensor, shape: tuple[int, ...]) -> None:
    _check(name, tensor, like)
    if tensor.shape != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tensor!r}.")


def _check_element(name: str, tensor: DeviceTensor, like: DeviceTensor) -> None:
    check_place(name, tensor, like)
    if tensor.dtype not in ELEMENT_TYPES or tensor.dtype != like.dtype:
        raise DTypeError(f"{name}: expected {' or '.join(ELEMENT_TYPES)}, all of one dtype, got {tensor.dtype}.")


# --- NumPy, for host memory ---


def _add_rms_norm_on_host(
    hidden: DeviceTensor,
    change: DeviceTensor,
    weight: DeviceTensor | None,
    out: DeviceTensor | None,
    eps: float,
    weight_offset: float,
    change_weight: DeviceTensor | None,
    change_factor: float,
    scale: DeviceTensor | None,
    stream: Any,
) -> None:
    total, added = array_of(hidden), array_of(change)
    if change_weight is not None:
        added = _normed(added, change_weight, eps, weight_offset).astype(added.dtype)
    if change_factor != 1:
        added = (added.astype(np.float32) * np.float32(change_factor)).astype(added.dtype)
    total[...] = total.astype(np.float32) + added.astype(np.float32)
    if scale is not None:
        total[...] = total.astype(np.float32) * array_of(scale).astype(np.float32)
    if weight is not None and out is not None:
        array_of(out)[...] = _normed(total, weight, eps, weight_offset)


def _qk_rms_norm_on_host(
    qkv: DeviceTensor,
    q_weight: DeviceTensor,
    k_weight: DeviceTensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    weight_offset: float,
    v_eps: float | None,
    stream: Any,
) -> None:
    heads = array_of(qkv)
    for part, weight in ((heads[:, :num_heads], q_weight), (heads[:, num_heads : num_heads + num_kv_heads], k_weight)):
        units = part.shape[1] * part.shape[2] // len(weight)
        part[...] = _normed(part.reshape(len(part), units, len(weight)), weight, eps, weight_offset).reshape(part.shape)
    if v_eps is not None:
        first = num_heads + num_kv_heads
        v = heads[:, first : first + num_kv_heads]
        v[...] = _over_root_mean_square(v, v_eps)


def _normed(rows: np.ndarray, weight: DeviceTensor, eps: float, weight_offset: float) -> np.ndarray:
    """Return the RMS norm of the last axis, in float32."""
    normed: np.ndarray = _over_root_mean_square(rows, eps) * (np.float32(weight_offset) + array_of(weight).astype(np.float32))
    return normed


def _over_root_mean_square(rows: np.ndarray, eps: float) -> np.ndarray:
    """Return rows over their root mean square, in float32."""
    values = rows.astype(np.float32)
    scaled: np.ndarray = values * (1 / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + np.float32(eps)))
    return scaled


def _gated_mul_on_host(gate_up: DeviceTensor, out: DeviceTensor, activation: str, stream: Any) -> None:
    array_of(out)[...] = gated(activation, array_of(gate_up).astype(np.float32))


def _activated_mul_on_host(gate: DeviceTensor, factor: DeviceTensor, out: DeviceTensor, activation: str, stream: Any) -> None:
    rows = array_of(gate)
    activated = _activated(activation, rows.astype(np.float32)).astype(rows.dtype)
    array_of(out)[...] = activated.astype(np.float32) * array_of(factor).astype(np.float32)


_TANH_FACTOR, _CUBE_FACTOR = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)

#: Inputs of the sigmoid, by activation: each activation is x times a sigmoid.
_SIGMOID_INPUTS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x,
    "gelu_tanh": lambda x: _TANH_FACTOR * (x + _CUBE_FACTOR * x * x * x),
}


def gated(activation: str, gate_up: Array) -> Array:
    """Return ``activation(gate) * up`` of float32 ``[rows, 2 * columns]``."""
    gate, up = np.split(gate_up, 2, axis=1)
    product: Array = _activated(activation, gate) * up
    return product


def _activated(activation: str, gate: Array) -> Array:
    with np.errstate(over="ignore"):  # far below 0, where the quotient becomes 0
        quotient: Array = gate / (1 + np.exp(-_SIGMOID_INPUTS[activation](gate)))
    return quotient


# --- CUDA: launches of plugins/decoder_layer.cu ---


_SOURCE = "decoder_layer"

_WARP, _MAX_THREADS = 32, 1024

#: Warps of a block of ``qk_rms_norm``, each with one norm.
_WARPS = 4

#: Words of 4 bytes that a thread keeps in registers: ``kHeldWords`` of the source.
_HELD_WORDS = 4


def _add_rms_norm_on_device(
    hidden: DeviceTensor,
    change: DeviceTensor,
    weight: DeviceTensor | None,
    out: DeviceTensor | None,
    eps: float,
    weight_offset: float,
    change_weight: DeviceTensor | None,
    change_factor: float,
    scale: DeviceTensor | None,
    stream: Any,
) -> None:
    rows, columns = hidden.shape
    words = columns // 2
    threads = min(_MAX_THREADS, -(-words // (_WARP * _HELD_WORDS)) * _WARP)
    arguments: tuple[Any, ...] = (hidden.ptr, change.ptr, address(weight), address(out), words, float(eps), float(weight_offset))
    is_plain = out is not None and change_weight is None and change_factor == 1 and scale is None
    if not is_plain:
        arguments += (address(change_weight), float(change_factor), address(scale))
    early = starts_early(hidden.memory)
    launch(
        hidden.memory,
        _SOURCE,
        f"add_{'' if is_plain else 'changed_'}rms_norm_{hidden.dtype}",
        (rows, 1, 1),
        arguments,
        stream,
        threads=threads,
        programmatic_dependent_launch=early,
    )


def _qk_rms_norm_on_device(
    qkv: DeviceTensor,
    q_weight: DeviceTensor,
    k_weight: DeviceTensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    weight_offset: float,
    v_eps: float | None,
    stream: Any,
) -> None:
    (rows, _, head_dim), row_words = qkv.shape, qkv.strides[0] // 2
    units = [heads * head_dim // len(weight) for heads, weight in ((num_heads, q_weight), (num_kv_heads, k_weight))]
    units.append(0 if v_eps is None else num_kv_heads)
    words = [len(q_weight) // 2, len(k_weight) // 2, head_dim // 2]
    launch(
        qkv.memory,
        _SOURCE,
        f"qk_rms_norm_{qkv.dtype}",
        (-(-sum(units) // _WARPS), rows, 1),
        (qkv.ptr, q_weight.ptr, k_weight.ptr, row_words, *units, *words, float(eps), float(weight_offset), float(v_eps or 0)),
        stream,
        threads=_WARPS * _WARP,
        programmatic_dependent_launch=starts_early(qkv.memory),
    )


def _gated_mul_on_device(gate_up: DeviceTensor, out: DeviceTensor, activation: str, stream: Any) -> None:
    rows, columns = out.shape
    words = columns // 2
    grid = (-(-words // THREADS_PER_BLOCK), rows, 1)
    early = starts_early(out.memory)
    launch(
        out.memory,
        _SOURCE,
        f"{activation}_mul_{out.dtype}",
        grid,
        (gate_up.ptr, out.ptr, words),
        stream,
        programmatic_dependent_launch=early,
    )


def _activated_mul_on_device(gate: DeviceTensor, factor: DeviceTensor, out: DeviceTensor, activation: str, stream: Any) -> None:
    rows, columns = out.shape
    words = columns // 2
    launch(
        out.memory,
        _SOURCE,
        f"activated_mul_{activation}_{out.dtype}",
        (-(-words // THREADS_PER_BLOCK), rows, 1),
        (gate.ptr, factor.ptr, out.ptr, words, factor.strides[0] // 2),
        stream,
        programmatic_dependent_launch=starts_early(out.memory),
    )


# --- without checks, for engines ---


#: Add rows to the residual stream, scale the sum and norm it.
add_rms_norm_kernel = Kernel(_add_rms_norm_on_host, _add_rms_norm_on_device)

#: Norm q and k in place, each head or all heads of a row together, and the heads of v, without a weight.
qk_rms_norm_kernel = Kernel(_qk_rms_norm_on_host, _qk_rms_norm_on_device)

#: Multiply the activation (``silu``, ``gelu_tanh``) of the first half of each row with its second half.
gated_mul_kernel = Kernel(_gated_mul_on_host, _gated_mul_on_device)

#: Multiply the activation (``silu``, ``gelu_tanh``) of one tensor, rounded, with another one.
activated_mul_kernel = Kernel(_activated_mul_on_host, _activated_mul_on_device)
