"""Recurrent and conv states of slots: zero, copy, save, restore and compact them. The state of a slot is a row of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError, SlotError
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, DeviceCompactionPlan, check_plan
from trt_kvcache.kernels.host_arrays import Array, array_of, carry_out, moves_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import MAX_SAVED_TENSORS, blocks_for, launch
from trt_kvcache.kernels.layer_views import check_memory, check_open
from trt_kvcache.kernels.state_infos import StateInfo, StateInfos, check_states
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor

_INFO_NBYTES = len(StateInfo._fields) * itemsize("int64")


def _check_slots(slot: int, count: int, slots: int) -> tuple[int, int]:
    number = int_in_range("count", count, 0, slots)
    first = slot_index(slot, slots)
    if first + number > slots:
        raise SlotError(f"slots {first} to {first + number - 1}: expected slots below {slots}. Slots never wrap.")
    return first, number


def zero_rows(states: StateInfos, slot: int, *, count: int = 1, stream: Any) -> None:
    """Zero the states of ``count`` slots from ``slot`` on, of all layers of one kind, in one launch.

    Parameters
    ----------
    states : StateInfos
        The states of all layers of one kind.
    slot, count : int
        The slots ``slot`` to ``slot + count - 1``.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError
        ``states`` is not a StateInfos.
    SlotError, RangeError
        Slots are out of range. Nothing was changed.
    PlaceError, ClosedError
        The stream does not fit the memory, or the memory is closed. Nothing was changed.
    """
    check_states("states", states)
    first, number = _check_slots(slot, count, states.max_batch_size)
    states.check_open()
    states.memory.check_stream(stream)
    zero_rows_kernel(states, first, number, stream)


def copy_rows(dst: StateInfos, src: StateInfos, slot: int, *, count: int = 1, stream: Any) -> None:
    """Copy the states of ``count`` slots from ``slot`` on, to the same slots of other states, in one launch.

    Parameters
    ----------
    dst, src : StateInfos
        The same number of layers, with equal row bytes and slots, in one memory. They must not overlap.
    slot, count : int
        The slots ``slot`` to ``slot + count - 1``.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, PlaceError, SlotError, RangeError, ClosedError
        Nothing was changed.
    """
    check_states("dst", dst)
    check_states("src", src)
    if src.memory is not dst.memory:
        raise PlaceError(f"src: expected states of {dst.memory.device}, got states of {src.memory.device}.")
    if [info.row_nbytes for info in src.host] != [info.row_nbytes for info in dst.host] or src.max_batch_size != dst.max_batch_size:
        raise ShapeError(
            f"src: expected {dst.max_batch_size} slots of {dst.num_layers} layers with equal state bytes, "
            f"got {src.max_batch_size} of {src.num_layers}."
        )
    first, number = _check_slots(slot, count, dst.max_batch_size)
    dst.check_open()
    src.check_open()
    dst.memory.check_stream(stream)
    copy_rows_kernel(dst, src, first, number, stream)


def _check_saved(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> int:
    check_states("states", states)
    if len(saved) != states.num_layers:
        raise ShapeError(f"saved: expected one tensor for each of {states.num_layers} layers, got {len(saved)}.")
    for index, (tensor, view) in enumerate(zip(saved, states.views, strict=True)):
        name = f"saved[{index}]"
        if not isinstance(tensor, DeviceTensor):
            raise PlaceError(f"{name}: expected a DeviceTensor, got {type(tensor).__name__}.")
        check_memory(name, tensor, states.memory)
        if tensor.dtype != view.dtype:
            raise DTypeError(f"{name}: expected {view.dtype}, got {tensor.dtype}.")
        if tensor.shape != view.shape[1:]:
            raise ShapeError(f"{name}: expected shape {view.shape[1:]}, got {tensor.shape}.")
        if not tensor.is_contiguous:
            raise LayoutError(f"{name}: expected a dense tensor, got {tensor!r}.")
        check_open(name, tensor)
    number = slot_index(slot, states.max_batch_size)
    states.check_open()
    states.memory.check_stream(stream)
    return number


def save_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
    """Save the states of one slot of all layers of one kind, in one launch for every 64 layers.

    Parameters
    ----------
    states : StateInfos
        States ``[B, ...]``.
    saved : sequence of DeviceTensor ``[...]``
        Contiguous, one per layer; overwritten.
    slot : int
        The slot.
    stream : cuda.core.Stream or GraphBuilder
        The copies are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, LayoutError, SlotError, ClosedError
        Nothing was changed.
    """
    number = _check_saved(states, saved, slot, stream)
    save_rows_kernel(states, saved, number, stream)


def instantiate_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
    """Restore the states of one slot from saved tensors, in one launch for every 64 layers.

    Parameters
    ----------
    states : StateInfos
        States ``[B, ...]``; the slot is overwritten.
    saved : sequence of DeviceTensor ``[...]``
        Contiguous, one per layer, from :func:`save_rows`.
    slot : int
        The slot.
    stream : cuda.core.Stream or GraphBuilder
        The copies are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, LayoutError, SlotError, ClosedError
        Nothing was changed.
    """
    number = _check_saved(states, saved, slot, stream)
    instantiate_rows_kernel(states, saved, number, stream)


def compact_rows(states: StateInfos, moves: AnyCompactionPlan, *, stream: Any) -> None:
    """Move the states of the kept slots of all layers of one kind to their new slots, in place.

    Parameters
    ----------
    states : StateInfos
        The states of all layers of one kind.
    moves : CompactionPlan, or DeviceCompactionPlan
        As for :func:`compact_kv_cache_batched`. Whole rows move, whatever the lengths.
    stream : cuda.core.Stream, or with a device mapping GraphBuilder
        The launches, one for every 96 moves, are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    MappingError, ShapeError, PlaceError, ClosedError
        The plan does not fit the states. Nothing was changed.
    """
    check_states("states", states)
    check_plan(moves, states.max_batch_size, states.memory, stream)
    states.check_open()
    if moves.old_batch and not moves.is_identity:
        compact_rows_kernel(states, moves, stream)


# --- NumPy, for host memory ---


def _rows(states: StateInfos) -> Iterator[Array]:
    return map(_rows_of, states.views, states.host)


def _flat_bytes(tensor: DeviceTensor) -> Array:
    return array_of(tensor).reshape(-1).view(np.uint8)


def _compact_rows_on_host(states: StateInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    moves = moves_of(plan)
    for rows in _rows(states):
        carry_out(rows, moves, whole_slots=True)


def _zero_rows_on_host(states: StateInfos, slot: int, count: int, stream: Any) -> None:
    for rows in _rows(states):
        rows[slot : slot + count] = 0


def _copy_rows_on_host(destination: StateInfos, source: StateInfos, slot: int, count: int, stream: Any) -> None:
    for new, old in zip(_rows(destination), _rows(source), strict=True):
        new[slot : slot + count] = old[slot : slot + count]


def _save_rows_on_host(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    for rows, tensor in zip(_rows(states), saved, strict=True):
        _flat_bytes(tensor)[...] = rows[slot]


def _instantiate_rows_on_host(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    for rows, tensor in zip(_rows(states), saved, strict=True):
        rows[slot] = _flat_bytes(tensor)


def _rows_of(view: DeviceTensor, info: StateInfo) -> Array:
    """Return states ``[B, ...]`` as a uint8 array (B, row bytes) over the same bytes."""
    shape, strides = (len(view), info.row_nbytes), (info.slot_stride, 1)
    return array_of(DeviceTensor(view.allocation, shape=shape, dtype="uint8", strides=strides, offset=view.offset))


# --- CUDA: launches of plugins/states.cu ---


def _launch(name: str, states: StateInfos, slots: int, layers: int, arguments: tuple[int, ...], stream: Any) -> None:
    if not slots:
        return
    # Rows that are no multiple of 16 bytes are copied in smaller vectors, and a thread copies more of them.
    blocks = blocks_for(-(-states.max_row_nbytes // ROW_GRANULE), slots * layers)
    launch(states.memory, "states", name, (blocks, slots, layers), arguments, stream)


def _zero_rows_on_device(states: StateInfos, slot: int, count: int, stream: Any) -> None:
    _launch("zero_rows", states, count, states.num_layers, (states.device_state_infos.ptr, slot), stream)


def _copy_rows_on_device(destination: StateInfos, source: StateInfos, slot: int, count: int, stream: Any) -> None:
    arguments = (destination.device_state_infos.ptr, source.device_state_infos.ptr, slot)
    _launch("copy_rows", destination, count, destination.num_layers, arguments, stream)


def _copy_saved(kernel: str, states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    infos = states.device_state_infos.ptr
    for first in range(0, states.num_layers, MAX_SAVED_TENSORS):
        addresses = [tensor.ptr for tensor in saved[first : first + MAX_SAVED_TENSORS]]
        padding = (0,) * (MAX_SAVED_TENSORS - len(addresses))
        _launch(kernel, states, 1, len(addresses), (infos + first * _INFO_NBYTES, slot, *addresses, *padding), stream)


def _save_rows_on_device(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    _copy_saved("save_rows", states, saved, slot, stream)


def _instantiate_rows_on_device(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    _copy_saved("instantiate_rows", states, saved, slot, stream)


def _compact_rows_on_device(states: StateInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    infos = states.device_state_infos.ptr
    if isinstance(plan, DeviceCompactionPlan):
        _launch("compact_rows_mapped", states, 1, states.num_layers, (infos, plan.mapping.ptr, plan.old_batch), stream)
        return
    for moves in plan.launches:
        arguments = (infos, moves.count, *moves.packed)
        _launch(f"compact_rows_{moves.capacity}", states, 1, states.num_layers, arguments, stream)


# --- without checks, for engines ---


#: Zero the states of ``count`` slots from ``slot`` on.
zero_rows_kernel = Kernel(_zero_rows_on_host, _zero_rows_on_device)

#: Copy the states of ``count`` slots from ``slot`` on, to the same slots of other states.
copy_rows_kernel = Kernel(_copy_rows_on_host, _copy_rows_on_device)

#: Copy the states of a slot into saved tensors.
save_rows_kernel = Kernel(_save_rows_on_host, _save_rows_on_device)

#: Copy saved tensors into the states of a slot.
instantiate_rows_kernel = Kernel(_instantiate_rows_on_host, _instantiate_rows_on_device)

#: Move the states of the slots of all layers.
compact_rows_kernel = Kernel(_compact_rows_on_host, _compact_rows_on_device)
