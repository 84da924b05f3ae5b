"""Recurrent and conv states of slots on the device: ``plugins/states.cu``."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.cuda.launch import blocks_for, launch
from trt_kvcache.kernels.launch_limits import MAX_SAVED_TENSORS
from trt_kvcache.kernels.state_infos import StateInfo, StateInfos
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor

_INFO_NBYTES = len(StateInfo._fields) * itemsize("int64")


def _launch(name: str, states: StateInfos, slots: int, layers: int, arguments: tuple[int, ...], stream: Any) -> None:
    # Rows that are no multiple of 16 bytes are copied in smaller vectors, of which a thread then takes more.
    blocks = blocks_for(-(-states.max_row_nbytes // ROW_GRANULE), slots * layers)
    launch(states.memory, "states", name, (blocks, slots, layers), arguments, stream)


def zero_rows(states: StateInfos, slot: int, count: int, stream: Any) -> None:
    _launch("zero_rows", states, count, states.num_layers, (states.device_state_infos.ptr, slot), stream)


def copy_rows(destination: StateInfos, source: StateInfos, slot: int, count: int, stream: Any) -> None:
    arguments = (destination.device_state_infos.ptr, source.device_state_infos.ptr, slot)
    _launch("copy_rows", destination, count, destination.num_layers, arguments, stream)


def _copy_saved(kernel: str, states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    infos = states.device_state_infos.ptr
    for first in range(0, states.num_layers, MAX_SAVED_TENSORS):
        addresses = [tensor.ptr for tensor in saved[first : first + MAX_SAVED_TENSORS]]
        padding = (0,) * (MAX_SAVED_TENSORS - len(addresses))
        _launch(kernel, states, 1, len(addresses), (infos + first * _INFO_NBYTES, slot, *addresses, *padding), stream)


def save_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    _copy_saved("save_rows", states, saved, slot, stream)


def instantiate_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    _copy_saved("instantiate_rows", states, saved, slot, stream)


def compact_rows(states: StateInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    infos = states.device_state_infos.ptr
    if isinstance(plan, DeviceCompactionPlan):
        _launch("compact_rows_mapped", states, 1, states.num_layers, (infos, plan.mapping.ptr, plan.old_batch), stream)
        return
    for moves in plan.launches:
        arguments = (infos, moves.count, *moves.packed)
        _launch(f"compact_rows_{moves.capacity}", states, 1, states.num_layers, arguments, stream)
