"""Speed of a plain copy: on the host by NumPy on all processors, on a GPU from device memory to device memory."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache._util.in_threads import count_processors
from trt_kvcache.benchmarking.memory_use import free_and_total
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import check

_RUNS = 5
_MIB = 1 << 20
_HOST_NBYTES = 256 * _MIB
_OVER_LAST_LEVEL = 4
_DEVICE_NBYTES = 1024 * _MIB
_DEVICE_SHARE_OF_FREE = 4
_DEVICE_COPIES = 8
_DEVICE_SECONDS = 0.5


def copy_bytes_per_second(memory: Memory) -> float:
    """Measure a plain copy, bytes read plus bytes written.

    Parameters
    ----------
    memory : Memory
        Host memory: NumPy copies at least 256 MiB and four times the last-level cache, one thread for each processor that this process
        may use. GPU memory: ``cuMemcpyDtoDAsync`` of 1 GiB, or of a quarter of the free memory.

    Returns
    -------
    float
        Bytes per second of the fastest of at least five runs; on a GPU, of all runs in half a second, as its clocks rise under load.
        The call waits for the device.

    Raises
    ------
    CudaError, CapacityError
        The GPU has no room, or fails.
    """
    return _on_host() if memory.is_host else _on_device(memory)


def _on_host() -> float:
    nbytes = max(_HOST_NBYTES, _OVER_LAST_LEVEL * _last_level_cache())
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    threads = count_processors()
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        return 2 * nbytes / _fastest(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))


def _on_device(memory: Any) -> float:
    from cuda.bindings import driver

    free, _ = free_and_total(memory)
    nbytes = max(_MIB, min(_DEVICE_NBYTES, free // _DEVICE_SHARE_OF_FREE))
    stream = memory.create_stream()
    source = memory.allocate(nbytes, zeroed=True, stream=stream)
    target = memory.allocate(nbytes, zeroed=True, stream=stream)

    def copies() -> None:
        for _ in range(_DEVICE_COPIES):
            check(driver.cuMemcpyDtoDAsync(target.ptr, source.ptr, nbytes, int(stream.handle)))
        memory.synchronize(stream)

    try:
        return 2 * nbytes * _DEVICE_COPIES / _fastest(copies, at_least_seconds=_DEVICE_SECONDS)
    finally:
        source.close()
        target.close()


def _fastest(call: Callable[[], object], at_least_seconds: float = 0.0) -> float:
    """Return the seconds of the fastest run, after a warm-up."""
    times: list[float] = []
    while len(times) <= _RUNS or sum(times) < at_least_seconds:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _last_level_cache() -> int:
    """Return the bytes of the largest processor cache that Linux reports; 0 if unknown."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdecimal():
            sizes.append(int(number) << {"K": 10, "M": 20, "G": 30}.get(unit, 0))
    return max(sizes)
