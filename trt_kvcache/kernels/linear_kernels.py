"""Projections of a decode step: products of a few rows with a weight matrix, at the speed of reading the weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.errors import DTypeError, LayoutError, ShapeError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.decoder_layer_kernels import gated
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.kernels.layer_views import check_place
from trt_kvcache.kernels.linear_tiles import ROW_COUNTS, linear_plan
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.tensor import DeviceTensor

#: Rows of x at most.
MAX_LINEAR_ROWS = ROW_COUNTS[-1]

#: The inputs of a row, at multiples of 16 bytes.
INPUT_GRANULE = 8

#: Columns and rows of a weight matrix, at most: their byte counts fit into 32 bits.
_MAX_INPUTS, _MAX_OUTPUTS = 1 << 24, 1 << 30

#: Alignment of x and weights.
GRANULE_NBYTES = 16


def linear(
    x: DeviceTensor,
    weight: DeviceTensor,
    *,
    bias: DeviceTensor | None = None,
    out: DeviceTensor,
    stream: Any,
) -> None:
    """Write ``x @ weight.T + bias`` into ``out``.

    Parameters
    ----------
    x : DeviceTensor ``[rows, inputs]`` float16 or bfloat16
        1 to 16 rows; a multiple of 8 inputs.
    weight : DeviceTensor ``[outputs, inputs]``
        Of the dtype of ``x``. On a GPU it is read before earlier launches on the stream have ended: none of them may still write it.
    bias : DeviceTensor ``[outputs]``, optional
        Of the dtype of ``x``.
    out : DeviceTensor ``[rows, outputs]``
        Of the dtype of ``x`` or float32. Overwritten; it must not overlap the others.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    Sums are float32, in an order that depends on shapes and the GPU alone, and are rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import linear
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> x = memory.to_device(np.ones((1, 8), np.float16), stream=stream)
    >>> weight = memory.to_device(np.arange(24, dtype=np.float16).reshape(3, 8), stream=stream)
    >>> out = memory.to_device(np.zeros((1, 3), np.float16), stream=stream)
    >>> linear(x, weight, out=out, stream=stream)
    >>> out.numpy().tolist()
    [[28.0, 92.0, 156.0]]
    """
    _check(x, weight, bias, out, outputs_per_column=1, out_dtypes=(x.dtype, "float32") if isinstance(x, DeviceTensor) else ())
    out.memory.check_stream(stream)
    if out.nbytes:
        linear_kernel(x, weight, bias, out, stream)


def linear_silu_mul(x: DeviceTensor, weight: DeviceTensor, *, bias: DeviceTensor | None = None, out: DeviceTensor, stream: Any) -> None:
    """Write ``silu(gate) * up`` into ``out``, where ``x @ weight.T + bias`` has the columns of gate, then of up.

    Parameters
    ----------
    x : DeviceTensor ``[rows, inputs]`` float16 or bfloat16
        As for :func:`linear`.
    weight : DeviceTensor ``[2 * columns, inputs]``
        Of the dtype of ``x``: the rows of gate, then of up. Read early, as in :func:`linear`.
    bias : DeviceTensor ``[2 * columns]``, optional
        Of the dtype of ``x``.
    out : DeviceTensor ``[rows, columns]``
        Of the dtype of ``x``. Overwritten; it must not overlap the others.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    Gate and up are not rounded before they are multiplied.
    """
    _linear_gated_mul("silu", x, weight, bias, out, stream)


def linear_gelu_tanh_mul(
    x: DeviceTensor, weight: DeviceTensor, *, bias: DeviceTensor | None = None, out: DeviceTensor, stream: Any
) -> None:
    """Write ``gelu_tanh(gate) * up`` into ``out``: the same as :func:`linear_silu_mul` with another activation.

    Parameters
    ----------
    x, weight, bias, out : DeviceTensor
        As for :func:`linear_silu_mul`.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    ``gelu_pytorch_tanh`` of Hugging Face transformers: Gemma. Gate and up are not rounded before they are multiplied.
    """
    _linear_gated_mul("gelu_tanh", x, weight, bias, out, stream)


def _linear_gated_mul(
    activation: str, x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any
) -> None:
    _check(x, weight, bias, out, outputs_per_column=2, out_dtypes=(x.dtype,) if isinstance(x, DeviceTensor) else ())
    out.memory.check_stream(stream)
    if out.nbytes:
        linear_gated_mul_kernel(x, weight, bias, out, activation, stream)


def _check(
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor | None,
    out: DeviceTensor,
    *,
    outputs_per_column: int,
    out_dtypes: tuple[str, ...],
) -> None:
    _check_tensor("x", x, x, ELEMENT_TYPES)
    _check_tensor("weight", weight, x, (x.dtype,))
    _check_tensor("out", out, x, out_dtypes)
    if x.ndim != 2 or not 0 < len(x) <= MAX_LINEAR_ROWS or x.shape[1] % INPUT_GRANULE or not 0 < x.shape[1] <= _MAX_INPUTS:
        inputs = f"a multiple of {INPUT_GRANULE} inputs, at most {_MAX_INPUTS}"
        raise ShapeError(f"x: expected [1 to {MAX_LINEAR_ROWS} rows, {inputs}], got {x!r}.")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or len(weight) % outputs_per_column or len(weight) > _MAX_OUTPUTS:
        outputs = "outputs" if outputs_per_column == 1 else "outputs of gate, then of up"
        raise ShapeError(f"weight: expected [{outputs}, {x.shape[1]} inputs], got {weight!r}.")
    if out.shape != (len(x), len(weight) // outputs_per_column):
        raise ShapeError(f"out: expected shape {(len(x), len(weight) // outputs_per_column)}, got {out!r}.")
    if bias is not None:
        _check_tensor("bias", bias, x, (x.dtype,))
        if bias.shape != weight.shape[:1]:
            raise ShapeError(f"bias: expected shape {weight.shape[:1]}, got {bias!r}.")
    inputs_of = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in {**inputs_of, "out": out}.items():
        granule = GRANULE_NBYTES if name in ("x", "weight") else tensor.numpy_dtype.itemsize
        if tensor.ptr % granule:
            raise LayoutError(f"{name}: expected an address at a multiple of {granule} bytes, got {tensor!r} at byte {tensor.offset}.")
    for name, tensor in inputs_of.items():
        if tensor.ptr < out.ptr + out.nbytes and out.ptr < tensor.ptr + tensor.nbytes:
            raise LayoutError(
                f"out: expected memory of its own, got {out!r}, which {name} overlaps. Blocks read inputs while others write."
            )


def _check_tensor(name: str, tensor: DeviceTensor, like: DeviceTensor, dtypes: tuple[str, ...] | dict[str, str]) -> None:
    check_place(name, tensor, like)
    if tensor.dtype not in dtypes:
        raise DTypeError(f"{name}: expected {' or '.join(dtypes)}, got {tensor.dtype}.")
    if not tensor.is_contiguous:
        raise LayoutError(f"{name}: expected a dense tensor, got {tensor!r}.")


# --- NumPy, for host memory ---


#: Rows of weights that are converted to float32 at once.
_OUTPUTS_AT_ONCE = 4096


def _linear_on_host(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    array_of(out)[...] = _product(x, weight, bias)


def _linear_gated_mul_on_host(
    x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, activation: str, stream: Any
) -> None:
    array_of(out)[...] = gated(activation, _product(x, weight, bias))


def _product(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None) -> Array:
    """Return the product in float32."""
    rows, weights = array_of(x).astype(np.float32), array_of(weight)
    out = np.empty((len(rows), len(weights)), np.float32)
    for first in range(0, len(weights), _OUTPUTS_AT_ONCE):
        some = slice(first, first + _OUTPUTS_AT_ONCE)
        np.matmul(rows, weights[some].astype(np.float32).T, out=out[:, some])
    return out if bias is None else out + array_of(bias).astype(np.float32)


# --- CUDA: launches of plugins/linear.cu ---


_SOURCE, _WARP = "linear", 32


def _linear_on_device(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    _launch("linear" if out.dtype == x.dtype else f"linear_{out.dtype}", x, weight, bias, out, stream)


def _linear_gated_mul_on_device(
    x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, activation: str, stream: Any
) -> None:
    _launch(f"linear_{activation}_mul", x, weight, bias, out, stream)


def _launch(
    name: str,
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor | None,
    out: DeviceTensor,
    stream: Any,
) -> None:
    memory: Any = out.memory
    (rows, inputs), outputs, gated = x.shape, out.shape[1], len(weight) > out.shape[1]
    plan = linear_plan(rows, outputs, gated, memory.arch, memory.multiprocessor_count)
    arguments = (x.ptr, weight.ptr, address(bias), out.ptr, rows, outputs, inputs, plan.tiles, plan.tile_outputs, plan.prefetched_steps)
    launch(
        memory,
        variant_name(_SOURCE, x.dtype, plan.rows),
        name if gated else f"{name}_{plan.tile}",
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )


# --- without checks, for engines ---


#: Multiply a few rows with a matrix of weights.
linear_kernel = Kernel(_linear_on_host, _linear_on_device)

#: The same product, then the activation (``silu``, ``gelu_tanh``) of its first half of columns times its second half.
linear_gated_mul_kernel = Kernel(_linear_gated_mul_on_host, _linear_gated_mul_on_device)
