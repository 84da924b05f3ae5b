"""Lengths of slots in host memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan
from trt_kvcache.kernels.host.arrays import array_of, carry_out, moves_of
from trt_kvcache.memory.tensor import DeviceTensor


def increment_scalar(lengths: DeviceTensor, increment: int, stream: Any) -> None:
    array = array_of(lengths)
    array += np.int32(increment)


def increment_tensor(lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
    array = array_of(lengths)
    array += array_of(increments)


def store_values(lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
    array = array_of(lengths)
    if accumulate:
        array += np.asarray(values, np.int32)
    else:
        array[:] = values


def compact_lengths(lengths: DeviceTensor, plan: AnyCompactionPlan, stream: Any) -> None:
    carry_out(array_of(lengths)[:, None], list(moves_of(plan)), whole_slots=True)
