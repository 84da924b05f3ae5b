"""The lengths of slots: increment them, store or add values of the host, compact them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_int
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, RangeError, ShapeError
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, DeviceCompactionPlan, check_plan
from trt_kvcache.kernels.host_arrays import array_of, carry_out, moves_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, launch
from trt_kvcache.kernels.layer_views import check_memory
from trt_kvcache.memory.tensor import DeviceTensor

#: Host values in the arguments of one launch of ``store_values``. The source has the same number.
MAX_STORED_VALUES = 16


_INT32_MAX = 2**31 - 1


def increment_length_tensor(length_tensor: DeviceTensor, increment: int | DeviceTensor, *, stream: Any) -> None:
    """Add to lengths in place: one number to all, or a tensor element by element.

    Parameters
    ----------
    length_tensor : DeviceTensor (n,) int32
        Changed in place.
    increment : int, or DeviceTensor (n,) int32
        One number for all, or one per length, in the same memory.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it; the call neither waits nor allocates, and can be captured in a CUDA graph.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, RangeError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    ``incrementLengthTensor`` of TensorRT Edge-LLM. Sums are not checked against a capacity here.
    """
    _check_lengths(length_tensor)
    length_tensor.memory.check_stream(stream)
    if isinstance(increment, DeviceTensor):
        check_memory("increment", increment, length_tensor.memory)
        if increment.dtype != "int32":
            raise DTypeError(f"increment: expected int32, got {increment.dtype}.")
        if increment.shape != length_tensor.shape or not increment.is_contiguous:
            raise ShapeError(f"increment: expected a dense tensor of shape {length_tensor.shape}, got {increment!r}.")
        increment_tensor_kernel(length_tensor, increment, stream)
        return
    number = as_int("increment", increment)
    if abs(number) > _INT32_MAX:
        raise RangeError(f"increment: expected an int32, got {number}.")
    increment_scalar_kernel(length_tensor, number, stream)


def store_length_values(length_tensor: DeviceTensor, values: Sequence[int], *, accumulate: bool, stream: Any) -> None:
    """Store host values into lengths, or add them.

    The values are arguments of the launch, 16 in each, so there is no staging buffer that a later call could overwrite before it
    was read.

    Parameters
    ----------
    length_tensor : DeviceTensor (n,) int32
        Changed in place.
    values : sequence of int
        One int32 for each length.
    accumulate : bool
        True to add the values instead of storing them.
    stream : cuda.core.Stream
        The launch is ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, RangeError
        An argument does not fit. Nothing was changed.
    """
    _check_lengths(length_tensor)
    length_tensor.memory.check_stream(stream)
    if len(values) != len(length_tensor):
        raise ShapeError(f"values: expected {len(length_tensor)} of them, got {len(values)}.")
    if values and max(map(abs, values)) > _INT32_MAX:
        raise RangeError(f"values: expected int32 values, got {list(values)}.")
    store_values_kernel(length_tensor, values, accumulate, stream)


def compact_length_tensor(lengths: DeviceTensor, moves: AnyCompactionPlan, *, stream: Any) -> None:
    """Move the lengths of the kept slots to their new slots, in place.

    Parameters
    ----------
    lengths : DeviceTensor (n,) int32
        ``n >= old_batch``. Entries from ``new_batch`` on keep what they hold.
    moves : CompactionPlan, or DeviceCompactionPlan
        With a device mapping compact the lengths last: the other compactions read the old ones.
    stream : cuda.core.Stream, or with a device mapping GraphBuilder
        The launches, one for every 96 moves, are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    MappingError, ShapeError, DTypeError, PlaceError, ClosedError
        The plan does not fit the lengths. Nothing was changed.
    """
    _check_lengths(lengths)
    check_plan(moves, len(lengths), lengths.memory, stream)
    if moves.old_batch and not moves.is_identity:
        compact_lengths_kernel(lengths, moves, stream)


def _check_lengths(lengths: DeviceTensor) -> None:
    """Check that this is a dense int32 tensor (n,)."""
    if lengths.dtype != "int32":
        raise DTypeError(f"length_tensor: expected int32, got {lengths.dtype}.")
    if lengths.ndim != 1 or not lengths.is_contiguous:
        raise ShapeError(f"length_tensor: expected a dense tensor of shape (n,), got {lengths!r}.")


# --- NumPy, for host memory ---


def _increment_scalar_on_host(lengths: DeviceTensor, increment: int, stream: Any) -> None:
    array = array_of(lengths)
    array += np.int32(increment)


def _increment_tensor_on_host(lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
    array = array_of(lengths)
    array += array_of(increments)


def _store_values_on_host(lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
    array = array_of(lengths)
    if accumulate:
        array += np.asarray(values, np.int32)
    else:
        array[:] = values


def _compact_lengths_on_host(lengths: DeviceTensor, plan: AnyCompactionPlan, stream: Any) -> None:
    carry_out(array_of(lengths)[:, None], moves_of(plan), whole_slots=True)


# --- CUDA: launches of plugins/lengths.cu ---


def _launch(name: str, lengths: DeviceTensor, stream: Any, threads: int, *arguments: int) -> None:
    if threads:
        launch(lengths.memory, "lengths", name, (-(-threads // THREADS_PER_BLOCK), 1, 1), arguments, stream)


def _increment_scalar_on_device(lengths: DeviceTensor, increment: int, stream: Any) -> None:
    count = len(lengths)
    _launch("increment_scalar", lengths, stream, count, lengths.ptr, increment, count)


def _increment_tensor_on_device(lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
    count = len(lengths)
    _launch("increment_tensor", lengths, stream, count, lengths.ptr, increments.ptr, count)


def _store_values_on_device(lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
    place = lengths.ptr
    for start in range(0, len(values), MAX_STORED_VALUES):
        chunk = values[start : start + MAX_STORED_VALUES]
        count = len(chunk)
        padding = (0,) * (MAX_STORED_VALUES - count)
        _launch("store_values", lengths, stream, count, place, int(accumulate), count, *map(int, chunk), *padding)
        place += count * itemsize("int32")


def _compact_lengths_on_device(lengths: DeviceTensor, plan: AnyCompactionPlan, stream: Any) -> None:
    if isinstance(plan, DeviceCompactionPlan):
        _launch("compact_lengths_mapped", lengths, stream, 1, lengths.ptr, plan.mapping.ptr, plan.old_batch)
        return
    for moves in plan.simultaneous_launches:
        _launch(f"compact_lengths_{moves.capacity}", lengths, stream, 1, lengths.ptr, moves.count, *moves.packed)


# --- without checks, for engines ---


#: Add one number to all lengths.
increment_scalar_kernel = Kernel(_increment_scalar_on_host, _increment_scalar_on_device)

#: Add to each length a number of a tensor.
increment_tensor_kernel = Kernel(_increment_tensor_on_host, _increment_tensor_on_device)

#: Store values of the host, or with ``accumulate`` add them.
store_values_kernel = Kernel(_store_values_on_host, _store_values_on_device)

#: Move the lengths of the slots.
compact_lengths_kernel = Kernel(_compact_lengths_on_host, _compact_lengths_on_device)
