"""Recurrent and conv states of slots in host memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan
from trt_kvcache.kernels.host.arrays import Array, array_of, carry_out, moves_of, rows_of
from trt_kvcache.kernels.state_infos import StateInfos
from trt_kvcache.memory.tensor import DeviceTensor


def _rows(states: StateInfos) -> Iterator[Array]:
    return map(rows_of, states.views, states.host)


def _flat_bytes(tensor: DeviceTensor) -> Array:
    return array_of(tensor).reshape(-1).view(np.uint8)


def compact_rows(states: StateInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    moves = list(moves_of(plan))
    for rows in _rows(states):
        carry_out(rows, moves, whole_slots=True)


def zero_rows(states: StateInfos, slot: int, count: int, stream: Any) -> None:
    for rows in _rows(states):
        rows[slot : slot + count] = 0


def copy_rows(destination: StateInfos, source: StateInfos, slot: int, count: int, stream: Any) -> None:
    for into, of in zip(_rows(destination), _rows(source), strict=True):
        into[slot : slot + count] = of[slot : slot + count]


def save_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    for rows, tensor in zip(_rows(states), saved, strict=True):
        _flat_bytes(tensor)[...] = rows[slot]


def instantiate_rows(states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
    for rows, tensor in zip(_rows(states), saved, strict=True):
        rows[slot] = _flat_bytes(tensor)
