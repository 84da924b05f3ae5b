"""``CudaBuffer``: bytes of a cuda.core resource that are freed when nothing refers to them and the device is done."""

import ctypes
from typing import Any

import numpy as np

from trt_kvcache.memory.cuda_driver import allocation_error, check, cuda_core_error


class CudaBuffer:
    """An owned allocation in GPU or page-locked memory of the current device.

    It goes back when the last reference goes: of an allocation, an array or a DLPack consumer. Streams of any library may
    still work with the bytes then, so this waits for the whole device. (A wait breaks off a capture that is under way on the
    device: let go of memory before or after.)

    ``resource``: cuda.core.MemoryResource.
    ``nbytes``: At least one byte is allocated, so that there always is an address.
    ``place``: Where the bytes are, for messages.
    ``stream``: cuda.core.Stream. The allocation is ordered on it.

    Raises CapacityError: there is no room. CudaError: the driver refused.
    """

    def __init__(self, resource: Any, nbytes: int, *, place: str, stream: Any) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._context = check(driver.cuCtxGetCurrent())
        self._buffer: Any = None
        try:
            self._buffer = resource.allocate(max(nbytes, 1), stream=stream)
        except cuda_core_error() as error:
            raise allocation_error(error, place, nbytes) from None
        #: Address of the first byte.
        self.ptr = int(self._buffer.handle)

    def __del__(self) -> None:
        if self._buffer is None:
            return
        # The thread that let go last may be any, with a context of its own. Errors have nowhere to go: the statuses are not read.
        self._driver.cuCtxPushCurrent(self._context)
        self._driver.cuCtxSynchronize()
        self._buffer.close()
        self._driver.cuCtxSynchronize()  # what a pool has free goes back to the system at a wait
        self._driver.cuCtxPopCurrent()


def bytes_of(buffer: CudaBuffer, nbytes: int) -> np.ndarray[Any, Any]:
    """Return page-locked memory as a uint8 array (nbytes,) that keeps the buffer alive."""
    view = (ctypes.c_uint8 * nbytes).from_address(buffer.ptr)
    view.owner = buffer  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(view)
