"""The verdict of ``trt-kvcache doctor`` on a GPU, its driver and a TensorRT, in the user's cache folder.

It is valid for one release of this package: another one has other kernels and networks.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache._util.user_cache import user_cache_folder
from trt_kvcache._version import __version__
from trt_kvcache.memory.cuda_driver import check, cuda_core_error, driver_release, find_gpu


class DoctorVerdict(NamedTuple):
    """Results of the checks. ``gpu`` and ``driver`` are those of :func:`gpu_and_driver`."""

    gpu: str
    driver: str
    tensorrt: str  # flavour and version, such as "tensorrt_rtx 1.7.1.116"; "" without TensorRT
    passed: bool  # plugin attention: it ran in TensorRT, and nothing failed but TensorRT's own attention, if at all
    checks: dict[str, str]  # "passed", "failed", "not here" by the letter of the check, and by attention variant
    date: str  # ISO 8601, UTC
    package: str = __version__


def gpu_and_driver(device: int = 0) -> tuple[str, str] | None:
    """Return the GPU (name, compute capability, a hash of its UUID) and its driver; None if no GPU is usable."""
    if find_gpu(device) is not None:
        return None
    from cuda.bindings import driver
    from cuda.core import Device

    gpu = Device(device)
    capability = gpu.compute_capability
    cuda = check(driver.cuDriverGetVersion())
    return (
        f"{gpu.name}, compute capability {capability.major}.{capability.minor}{_uuid_hash(gpu)}",
        f"{driver_release() or 'unknown release'}, CUDA {cuda // 1000}.{cuda % 1000 // 10}",
    )


def _uuid_hash(gpu: Any) -> str:
    """Return a hash of the UUID; empty where the driver has none."""
    try:
        uuid = str(gpu.uuid)
    except (RuntimeError, cuda_core_error()):
        return ""
    return f", {hashlib.sha256(uuid.encode()).hexdigest()[:8]}"


def read_verdict(gpu: str, driver: str, tensorrt: str) -> DoctorVerdict | None:
    """Read the verdict of this release of the package; None if there is none, or its file is damaged."""
    try:
        found = DoctorVerdict(**parse_json(_path(gpu, driver, tensorrt).read_bytes()))
    except (OSError, JSONTextError, TypeError):
        return None
    # A verdict decides which kernels run: anything that write_verdict would not write is none.
    whole = isinstance(found.passed, bool) and isinstance(found.checks, dict) and isinstance(found.date, str)
    return found if whole and found[:3] == (gpu, driver, tensorrt) and found.package == __version__ else None


def write_verdict(verdict: DoctorVerdict) -> None:
    """Write a verdict in the place of the earlier one, complete or not at all. Raises OSError."""
    path = _path(verdict.gpu, verdict.driver, verdict.tensorrt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(json.dumps(verdict._asdict(), indent=1).encode())


def _path(gpu: str, driver: str, tensorrt: str) -> Path:
    name = hashlib.sha256("\0".join((gpu, driver, tensorrt, __version__)).encode()).hexdigest()[:32]
    return user_cache_folder() / "doctor" / f"{name}.json"
