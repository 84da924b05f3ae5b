"""Lengths of slots on the device: ``plugins/lengths.cu``."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch
from trt_kvcache.kernels.launch_limits import MAX_STORED_VALUES
from trt_kvcache.memory.tensor import DeviceTensor


def _launch(name: str, lengths: DeviceTensor, stream: Any, threads: int, *arguments: int) -> None:
    launch(lengths.memory, "lengths", name, (-(-threads // THREADS_PER_BLOCK), 1, 1), arguments, stream)


def increment_scalar(lengths: DeviceTensor, increment: int, stream: Any) -> None:
    count = len(lengths)
    _launch("increment_scalar", lengths, stream, count, lengths.ptr, increment, count)


def increment_tensor(lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
    count = len(lengths)
    _launch("increment_tensor", lengths, stream, count, lengths.ptr, increments.ptr, count)


def store_values(lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
    place = lengths.ptr
    for start in range(0, len(values), MAX_STORED_VALUES):
        chunk = values[start : start + MAX_STORED_VALUES]
        count = len(chunk)
        padding = (0,) * (MAX_STORED_VALUES - count)
        _launch("store_values", lengths, stream, count, place, int(accumulate), count, *map(int, chunk), *padding)
        place += count * itemsize("int32")


def compact_lengths(lengths: DeviceTensor, plan: AnyCompactionPlan, stream: Any) -> None:
    if isinstance(plan, DeviceCompactionPlan):
        _launch("compact_lengths_mapped", lengths, stream, 1, lengths.ptr, plan.mapping.ptr, plan.old_batch)
        return
    for moves in plan.simultaneous_launches:
        _launch(f"compact_lengths_{moves.capacity}", lengths, stream, 1, lengths.ptr, moves.count, *moves.packed)
