"""What a test can ask the stand-in driver: the calls that were made, the bytes that are allocated, and to fail an allocation."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest

from tests.simt.run import what_is_missing

_DEVICE = os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host")


def need_cuda_memory() -> None:
    """Leave out a whole test file where the run is for host memory. The emulated device and a GPU run it."""
    if _DEVICE == "host":
        pytest.skip("for CUDA memory: runs on the emulated device (tests/simt/run.py) and on a GPU", allow_module_level=True)


def need_compiler() -> None:
    """Leave out a whole test file where the emulator cannot be built; with ``TRT_KVCACHE_REQUIRE_EMULATOR=1`` that fails."""
    missing = what_is_missing()
    if missing is not None:
        if os.environ.get("TRT_KVCACHE_REQUIRE_EMULATOR") == "1":
            pytest.fail(f"the emulator cannot be built: {missing}")
        pytest.skip(f"the emulator cannot be built: {missing}", allow_module_level=True)


#: For tests that look into the driver.
needs_standin = pytest.mark.skipif(
    _DEVICE != "emulated", reason="looks into the stand-in driver: runs on the emulated device (tests/simt/run.py)"
)

#: Calls that make the host wait for the device.
WAITS = {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemFree_v2", "cuMemFreeHost"}

#: Calls that allocate.
ALLOCATIONS = {"cuMemAlloc_v2", "cuMemAllocFromPoolAsync", "cuMemAllocHost_v2"}


class StandIn:
    """The stand-in driver that this process runs on."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.standin_log.restype = ctypes.c_char_p
        self._library.standin_live_device_nbytes.restype = ctypes.c_size_t
        self._library.standin_live_host_nbytes.restype = ctypes.c_size_t
        gc.collect()
        self._device_nbytes = self._library.standin_live_device_nbytes()
        self._page_locked_nbytes = self._library.standin_live_host_nbytes()
        self.take_calls()

    def take_calls(self) -> list[str]:
        """Return the names of the calls since the last time, in order."""
        names = self._library.standin_log().decode().split()
        self._library.standin_clear_log()
        return names

    def fail_allocation(self, n: int) -> None:
        """Let the n-th allocation from now fail (1: the next one)."""
        self._library.standin_fail_allocation(n)

    @property
    def device_nbytes(self) -> int:
        """Bytes allocated on the device since this object was made."""
        return self._library.standin_live_device_nbytes() - self._device_nbytes

    @property
    def page_locked_nbytes(self) -> int:
        """Bytes of page-locked memory allocated since this object was made."""
        return self._library.standin_live_host_nbytes() - self._page_locked_nbytes
