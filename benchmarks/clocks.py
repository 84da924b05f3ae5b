"""How long calls take: on the host by its clock, on a device by events on the stream.

A clock has a memory and a stream. ``seconds`` is the median of :data:`RUNS` runs of a call, each after another one which does not
count. ``copy_bytes_per_second`` is the speed of a plain copy of the same memory, bytes read plus written; ``fresh``: into memory
that is allocated for it.
"""

import time
from statistics import median

import numpy as np

from trt_kvcache import CudaMemory, HostMemory

RUNS = 5

_FILLER_NBYTES = 1 << 31

# Captures come and go: see CudaMemory.
_KEPT_NBYTES = 1 << 34


class HostClock:
    """NumPy memory: ``np.copyto`` is the plain copy."""

    least_copied = 1 << 28  # past the caches, which nothing empties here

    def __init__(self):
        self.memory = HostMemory()
        self.stream = self.memory.create_stream()

    def seconds(self, call, before=lambda: None):
        """See above."""
        times = []
        for _ in range(RUNS + 1):  # the first touches pages
            before()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return median(times[1:])

    def copy_bytes_per_second(self, nbytes, *, fresh=False):
        """See above."""
        source, destination = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        return 2 * nbytes / self.seconds(lambda: np.copyto(np.empty_like(source) if fresh else destination, source))


class DeviceClock:
    """GPU memory: ``cuMemcpyDtoDAsync`` is the plain copy."""

    least_copied = 0

    def __init__(self):
        from cuda.bindings import driver

        self._driver = driver
        self.memory = CudaMemory(keep_bytes=_KEPT_NBYTES)
        self.stream = self.memory.create_stream()
        self.memory.make_current()
        self._filler = [self.memory.allocate(_FILLER_NBYTES, stream=self.stream) for _ in range(2)]

    def seconds(self, call, before=lambda: None):
        """See above."""
        marks = []
        for _ in range(RUNS + 1):
            before()
            self._fill_queue()
            start = self._mark()
            result = call()
            marks.append((start, self._mark()))
            del result  # memory that goes is waited for
        self.memory.synchronize(self.stream)
        elapsed = [self._checked(self._driver.cuEventElapsedTime(start, end)) for start, end in marks]
        for start, end in marks:
            self._checked(self._driver.cuEventDestroy(start))
            self._checked(self._driver.cuEventDestroy(end))
        return median(elapsed[1:]) / 1e3

    def copy_bytes_per_second(self, nbytes, *, fresh=False):
        """See above."""
        source, destination = (self.memory.allocate(nbytes, zeroed=True, stream=self.stream) for _ in range(2))
        handle = int(self.stream.handle)
        copy = self._driver.cuMemcpyDtoDAsync
        seconds = self.seconds(lambda: self._checked(copy(destination.ptr, source.ptr, nbytes, handle)))
        source.close()
        destination.close()
        return 2 * nbytes / seconds

    def _fill_queue(self):
        """Keep the device busy while the host enqueues what is measured, and its cache full of something else."""
        destination, source = (filler.ptr for filler in self._filler)
        self._checked(self._driver.cuMemcpyDtoDAsync(destination, source, _FILLER_NBYTES, int(self.stream.handle)))

    def _mark(self):
        event = self._checked(self._driver.cuEventCreate(0))
        self._checked(self._driver.cuEventRecord(event, int(self.stream.handle)))
        return event

    def _checked(self, answer):
        if int(answer[0]):
            raise RuntimeError(f"CUDA driver: {answer[0]}")
        return answer[1] if len(answer) > 1 else None
