"""Memory in use: the peak of the process, or the current use of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trt_kvcache._util.peak_memory import peak_memory_nbytes
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import check


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use.

    Parameters
    ----------
    nbytes : int
        The bytes.
    of : {"process", "device"}
        ``"process"``: the peak of resident memory of this process. ``"device"``: memory in use on the GPU, by all processes.
    """

    nbytes: int
    of: Literal["process", "device"]


def memory_use(memory: Memory) -> MemoryUse | None:
    """Return the memory in use; None if the system does not report it."""
    if not memory.is_host:
        free, total = free_and_total(memory)
        return MemoryUse(total - free, "device")
    peak = peak_memory_nbytes()
    return None if peak is None else MemoryUse(peak, "process")


def free_and_total(memory: Any) -> tuple[int, int]:
    """Return free and total bytes of the GPU of a :class:`~trt_kvcache.memory.cuda_memory.CudaMemory`."""
    from cuda.bindings import driver

    memory.make_current()
    status, free, total = driver.cuMemGetInfo()
    check((status,))
    return free, total
