"""Check A: GPU, driver, CUDA libraries and TensorRT of this machine, and whether they fit each other."""

from __future__ import annotations

import importlib.util
import platform
import sys
from typing import Any

from trt_kvcache._util.extras import installed_versions
from trt_kvcache.benchmarking.memory_use import free_and_total
from trt_kvcache.doctor.cases import MACHINE_CASE, CaseLog, CheckFailure, NotHere
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.engine.doctor_verdict import gpu_and_driver
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import CudaError, EngineError
from trt_kvcache.kernels.compile import ARCHITECTURES, nvrtc_version
from trt_kvcache.memory.cuda_driver import check as checked, cuda_core_error, find_gpu
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.trt.module import load
from trt_kvcache.trt.wheels import wheels_failure, wheels_of_cuda

#: Distributions whose versions are listed, if they are installed.
DISTRIBUTIONS = (
    *("numpy", "ml_dtypes", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime"),
    *("tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13", "torch", "transformers"),
    *("onnx", "polygraphy", "safetensors", "tokenizers"),
)

#: The first compute capability with the kernels of this package.
FIRST_CAPABILITY = (8, 0)


def check(settings: Settings, log: CaseLog) -> None:
    """Describe the machine, and check what fits."""
    log.run("versions", versions)
    tensorrt = log.run("TensorRT", lambda: _tensorrt(settings.flavour))
    name = None if tensorrt is None else tensorrt["tensorrt"]
    log.run(MACHINE_CASE, lambda: _machine(settings, name))
    if not settings.dry_run and find_gpu(settings.device) is None:
        log.run("wheels for the driver", lambda: wheels_fit(_driver_cuda()))
        log.run("NVRTC", lambda: _nvrtc(settings.device))
        log.run("GPU for the kernels", lambda: _kernels_fit(settings.device))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that take part."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    return found | installed_versions(DISTRIBUTIONS)


def _tensorrt(flavour: str) -> dict[str, Any]:
    """Return which TensorRT is used, and from where it was imported."""
    try:
        tensorrt = load(flavour)
    except EngineError as error:
        raise NotHere(str(error)) from None
    found = {name: importlib.util.find_spec(name) for name in FLAVOURS[1:]}
    origins = {name: str(spec.origin) for name, spec in found.items() if spec is not None}
    places = {name: "a wheel" if "site-packages" in origin else "the system" for name, origin in origins.items()}
    return {"tensorrt": str(tensorrt), "found": places}


def wheels_fit(driver_cuda: str) -> dict[str, Any]:
    """Check that no library was made for a CUDA that is newer than the driver's."""
    wheels = wheels_of_cuda()
    failure = wheels_failure(wheels, int(driver_cuda.partition(".")[0]))
    if failure is not None:
        raise CheckFailure(failure)
    return {"driver_cuda": driver_cuda, "wheels": len(wheels)}


def _machine(settings: Settings, tensorrt: str | None) -> dict[str, Any]:
    """Describe GPU, driver and memory."""
    shared = {"tensorrt": tensorrt, "python": platform.python_version(), "platform": platform.platform(terse=True)}
    if settings.dry_run:
        return shared
    reason = find_gpu(settings.device)
    if reason is not None:
        raise NotHere(reason)
    from cuda.core import Device

    found = gpu_and_driver(settings.device)
    assert found is not None
    device = Device(settings.device)
    device.set_current()
    properties, capability = device.properties, device.compute_capability
    free, total = free_and_total(CudaMemory(settings.device))
    return {
        "gpu": found[0],
        "driver": found[1],
        "compute_capability": f"{capability.major}.{capability.minor}",
        "multiprocessors": _property(properties, "multiprocessor_count"),
        "memory_mib": total >> 20,
        "free_mib": free >> 20,
        "memory_pools": _property(properties, "memory_pools_supported"),
        "driver_model": _driver_model(properties),
        **shared,
    }


def _property(properties: Any, name: str) -> Any:
    """Return a property of a device; None where the driver does not know it."""
    try:
        return getattr(properties, name)
    except (RuntimeError, AttributeError, cuda_core_error()):
        return None


def _driver_model(properties: Any) -> str:
    """Return the kind of driver: WDDM delays launches in Windows, and an integrated GPU shares its memory with the host."""
    if _property(properties, "integrated"):
        return "integrated GPU"
    return ("TCC" if _property(properties, "tcc_driver") else "WDDM") if sys.platform == "win32" else "Linux"


def _driver_cuda() -> str:
    """Return the newest CUDA that the driver supports, such as ``"13.0"``."""
    from cuda.bindings import driver

    cuda = checked(driver.cuDriverGetVersion())
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _nvrtc(device: int) -> dict[str, Any]:
    """Check that NVRTC can compile for this GPU, and that the driver can load its results."""
    from cuda.bindings import nvrtc
    from cuda.core import Device

    try:
        version = nvrtc_version()
    except CudaError as error:
        raise CheckFailure(str(error)) from None
    arch = int(str(Device(device).arch))
    _, known = nvrtc.nvrtcGetSupportedArchs()
    newest = _driver_cuda()
    if arch not in known:
        raise CheckFailure(f"NVRTC {version}: expected one that compiles for sm_{arch}, got one for {', '.join(map(str, known))}.")
    if int(version.partition(".")[0]) > int(newest.partition(".")[0]):
        raise CheckFailure(f"NVRTC {version}: expected one of CUDA {newest} or older, which the driver supports.")
    return {
        "nvrtc": version,
        "driver_cuda": newest,
        "arch": f"sm_{arch}",
        "compiled_ahead_of_time_by_make_plugins": f"sm_{arch}" in ARCHITECTURES,
    }


def _kernels_fit(device: int) -> dict[str, Any]:
    from cuda.core import Device

    capability = Device(device).compute_capability
    if tuple(capability) < FIRST_CAPABILITY:
        raise NotHere(f"compute capability {capability.major}.{capability.minor}: the kernels of this package need 8.0 or newer")
    return {"compute_capability": f"{capability.major}.{capability.minor}"}
