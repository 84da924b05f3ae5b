"""NumPy arrays over tensors of host memory, and the walk that all compactions share."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, CompactionPlan
from trt_kvcache.kernels.state_infos import StateInfo
from trt_kvcache.kernels.steps import REGISTER, Step
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor

Array = np.ndarray[Any, Any]


def array_of(tensor: DeviceTensor) -> Array:
    """Return the tensor as a writable array over the same bytes."""
    memory = tensor.memory
    assert isinstance(memory, HostMemory)
    return memory.array(tensor)


def bytes_of(tensor: DeviceTensor) -> Array:
    """Return K/V rows as bytes: the last dimension counts them. Copies then never look at an element."""
    return array_of(tensor).view(np.uint8)


def rows_of(view: DeviceTensor, info: StateInfo) -> Array:
    """Return states ``[B, ...]`` as an array (B, row bytes) over the same bytes."""
    shape, strides = (len(view), info.row_nbytes), (info.slot_stride, 1)
    return array_of(DeviceTensor(view.allocation, shape=shape, dtype="uint8", strides=strides, offset=view.offset))


def steps_of(plan: AnyCompactionPlan) -> Iterator[Step]:
    """Yield the steps of a plan, in order. A mapping in a tensor is read now, and what does not keep the order is passed over."""
    if isinstance(plan, CompactionPlan):
        for steps in plan.step_lists:
            yield from steps
        return
    mapping, lengths = array_of(plan.mapping).tolist(), array_of(plan.lengths).tolist()
    for old, new in enumerate(mapping):
        if 0 <= new < old:
            yield Step(old, new, max(lengths[old], 0))


def move(slots: Array, steps: list[Step], *, whole: bool) -> None:
    """Run steps over an array whose first dimension is the slot.

    ``slots``: array (B, H, S, row bytes), or with ``whole`` (B, ...).
    ``whole``: Move whole slots instead of their first tokens.
    """
    held = slots[0]
    for step in steps:
        part = (...,) if whole else (slice(None), slice(0, step.tokens))
        source = held if step.source == REGISTER else slots[step.source]
        if step.destination == REGISTER:
            held = np.empty_like(source[part])  # as large as what is live: a whole slot would touch far more memory
        destination = held if step.destination == REGISTER else slots[step.destination]
        destination[part] = source[part]
