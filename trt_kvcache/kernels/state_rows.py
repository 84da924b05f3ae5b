"""Rows of recurrent and conv states: zero, copy, save and instantiate the state of a slot. A row may have any size."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError, SlotError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.layer_views import check_memory, check_open
from trt_kvcache.kernels.state_infos import StateInfos, check_states
from trt_kvcache.memory.tensor import DeviceTensor


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
    if number:
        backend_of(states.memory).zero_rows(states, first, number, stream)


def copy_rows(dst: StateInfos, src: StateInfos, slot: int, *, count: int = 1, stream: Any) -> None:
    """Copy the states of ``count`` slots from ``slot`` on, to the same slots of other states, in one launch.

    Parameters
    ----------
    dst, src : StateInfos
        As many layers with equal row bytes and slots, in one memory. They must not overlap.
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
        raise PlaceError(f"src: expected states of {dst.memory.device}, got those of {src.memory.device}.")
    if [info.row_nbytes for info in src.host] != [info.row_nbytes for info in dst.host] or src.max_batch_size != dst.max_batch_size:
        raise ShapeError(
            f"src: expected {dst.max_batch_size} slots of {dst.num_layers} layers with equal state bytes, "
            f"got {src.max_batch_size} of {src.num_layers}."
        )
    first, number = _check_slots(slot, count, dst.max_batch_size)
    dst.check_open()
    src.check_open()
    dst.memory.check_stream(stream)
    if number:
        backend_of(dst.memory).copy_rows(dst, src, first, number, stream)


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
        Of tensors ``[B, ...]``.
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
    backend_of(states.memory).save_rows(states, saved, number, stream)


def instantiate_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
    """Instantiate the states of one slot from saved tensors, in one launch for every 64 layers.

    Parameters
    ----------
    states : StateInfos
        Of tensors ``[B, ...]``; the slot is overwritten.
    saved : sequence of DeviceTensor ``[...]``
        Contiguous, one per layer: what :func:`save_rows` wrote.
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
    backend_of(states.memory).instantiate_rows(states, saved, number, stream)
