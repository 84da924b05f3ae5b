"""The CUDA driver through cuda-python: a check that it is usable, and its errors as exceptions of this package.

Nothing of cuda-python is imported before a function is called.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import CapacityError, CudaError

#: The first release of the NVIDIA driver for each CUDA, as far as TensorRT for RTX has a wheel for it.
FIRST_DRIVER = {12: 570, 13: 580}


def find_gpu(device: int = 0) -> str | None:
    """Return None if a GPU is usable, else the reason in one line. ``CUDA_VISIBLE_DEVICES`` applies to the number."""
    device = int_in_range("device", device, 0)
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import driver
        from cuda.pathfinder import DynamicLibNotFoundError
    except ImportError as error:
        return f"cuda-python is not installed ({error}). Install trt-kvcache[cuda]."
    try:
        (status,) = driver.cuInit(0)
    except DynamicLibNotFoundError:
        return "there is no NVIDIA driver on this machine (libcuda was not found)."
    if status:
        return f"the CUDA driver does not start: {status.name}."
    needed, has = driver.CUDA_VERSION // 1000, check(driver.cuDriverGetVersion()) // 1000
    if has < needed:
        return f"the NVIDIA driver supports CUDA {has}, the package cuda-bindings is for CUDA {needed}. {advice_for_driver(needed, has)}"
    count = check(driver.cuDeviceGetCount())
    if device >= count:
        return f"there is no GPU {device}: the driver counts {count}, from 0."
    return None


def advice_for_driver(needed: int, has: int) -> str:
    """Return what to do with a driver of CUDA ``has`` and packages for CUDA ``needed``."""
    release = f"to {FIRST_DRIVER[needed]} or newer" if needed in FIRST_DRIVER else f"to one for CUDA {needed}"
    extras = f"trt-kvcache[rtx-cu{has}] (TensorRT for RTX), [tensorrt-cu{has}] or [cuda{has}]"
    return f"Update the driver {release}, or install {extras} in a new environment."


def driver_version() -> tuple[int, int] | None:
    """Return major and minor number of the newest CUDA that the driver supports; None without a driver. Needs no cuda-python."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL(_driver_library()).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else (version.value // 1000, version.value % 1000 // 10)


def driver_failure() -> str | None:
    """Return None if the CUDA driver starts in this process, else the reason, without a full stop. Needs no cuda-python.

    In the child of a fork of a process that used CUDA it does not start. The second call of a process takes less than a microsecond.
    """
    name = _driver_library()
    try:
        driver = ctypes.CDLL(name)
        status = int(driver.cuInit(0))
    except (OSError, AttributeError):
        return f"there is no NVIDIA driver on this machine ({name} was not found)"
    if not status:
        return None
    text = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(text))
    return f"the CUDA driver does not start: {text.value.decode() if text.value else f'error {status}'}"


def compute_capability(device: int) -> str:
    """Return the compute capability of a usable GPU, such as ``"8.9"``."""
    from cuda.core import Device

    capability = Device(device).compute_capability
    return f"{capability.major}.{capability.minor}"


def make_current(device: int) -> None:
    """Make a usable GPU current in this thread: libraries that take no device then use it."""
    from cuda.core import Device

    Device(device).set_current()


def _driver_library() -> str:
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def driver_release() -> str | None:
    """Return the release of the NVIDIA driver, such as 580.65; None if the kernel module does not report it (Jetson, Windows)."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return None


def check(result: tuple[Any, ...]) -> Any:
    """Raise the error of a result ``(status, value)`` of ``cuda.bindings.driver``, or return its value; None if it has none."""
    if result[0]:
        raise CudaError(f"the CUDA driver refused a call: {_describe(result[0])}.")
    return result[1] if len(result) > 1 else None


def _describe(status: Any) -> str:
    from cuda.bindings import driver

    error, text = driver.cuGetErrorString(status)
    return status.name if error else f"{status.name} ({text.decode()})"


def cuda_core_error() -> type[Exception]:
    """Return the exception of cuda.core for errors of the driver and NVRTC. It has no public name there."""
    from cuda.core._utils.cuda_utils import CUDAError

    return CUDAError  # type: ignore[no-any-return]


def allocation_error(error: Exception, device: str, nbytes: int) -> CudaError | CapacityError:
    """Return the exception for a failed allocation of cuda.core: CapacityError if the memory had no room."""
    if str(error).startswith("CUDA_ERROR_OUT_OF_MEMORY"):
        return CapacityError(f"{device}: {nbytes} bytes could not be allocated. Nothing was changed.")
    return CudaError(f"{device}: allocating {nbytes} bytes failed: {error}")
