"""Installed wheels whose names end with a CUDA version, compared with the CUDA version that the NVIDIA driver supports."""

import re
from collections.abc import Mapping
from importlib import metadata

from trt_kvcache.memory.cuda_driver import FIRST_DRIVER, advice_for_driver

#: Wheels that this package uses.
_CUDA_OF_WHEEL = re.compile(r"(?:tensorrt(?:-rtx)?|nvidia-cuda-(?:nvrtc|runtime))-cu(\d+)(?:-[a-z]+)?")


def wheels_of_cuda() -> dict[str, int]:
    """Return the CUDA of each wheel that is installed."""
    names = {(one.metadata["Name"] or "").lower().replace("_", "-") for one in metadata.distributions()}
    found = {name: _CUDA_OF_WHEEL.fullmatch(name) for name in sorted(names)}
    return {name: int(made_for[1]) for name, made_for in found.items() if made_for is not None}


def rtx_wheels() -> dict[str, int]:
    """Return the CUDA of the wheels of TensorRT for RTX that are installed: a few look-ups by name, which take no time."""
    return {f"tensorrt-rtx-cu{cuda}": cuda for cuda in FIRST_DRIVER if _is_installed(f"tensorrt-rtx-cu{cuda}")}


def wheels_failure(wheels: Mapping[str, int], driver_cuda: int) -> str | None:
    """Return the reason that wheels cannot run with a driver, in one line that names the wheel to install; None if all can."""
    newer = {name: cuda for name, cuda in wheels.items() if cuda > driver_cuda}
    if not newer:
        return None
    needed = max(newer.values())
    named = f"the wheel {next(iter(newer))} is" if len(newer) == 1 else f"the wheels {', '.join(newer)} are"
    return f"the NVIDIA driver supports CUDA {driver_cuda}, {named} for CUDA {needed}. {advice_for_driver(needed, driver_cuda)}"


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
