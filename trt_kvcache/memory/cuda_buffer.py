"""``CudaBuffer``: bytes of a cuda.core resource, freed after the last reference is gone and the device is done."""

import ctypes
from typing import Any

import numpy as np

from trt_kvcache.memory.cuda_driver import allocation_error, check, cuda_core_error


class CudaBuffer:
    """An allocation in GPU or pinned memory of the current device, freed with its last reference: allocation, array or DLPack consumer."""

    # Streams of any library may still use the bytes then, so freeing waits for the whole device. The wait breaks off a CUDA graph capture
    # that is under way: release memory before or after one.

    def __init__(self, resource: Any, nbytes: int, *, place: str, stream: Any) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._context = check(driver.cuCtxGetCurrent())
        self._buffer: Any = None
        try:
            self._buffer = resource.allocate(max(nbytes, 1), stream=stream)  # at least one byte, so that there is an address
        except cuda_core_error() as error:
            raise allocation_error(error, place, nbytes) from None
        #: Address of the first byte.
        self.ptr = int(self._buffer.handle)

    def __del__(self) -> None:
        if self._buffer is None:
            return
        # Any thread may drop the last reference, and it may have another context. Nobody could handle an error: statuses are ignored.
        self._driver.cuCtxPushCurrent(self._context)
        self._driver.cuCtxSynchronize()
        self._buffer.close()
        self._driver.cuCtxSynchronize()  # a pool returns its free memory to the system at a wait
        self._driver.cuCtxPopCurrent()


def bytes_of(buffer: CudaBuffer, nbytes: int) -> np.ndarray[Any, Any]:
    """Return pinned memory as a uint8 array that keeps the buffer alive."""
    view = (ctypes.c_uint8 * nbytes).from_address(buffer.ptr)
    view.owner = buffer  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(view)
