"""Environment of a measurement: device, driver, versions, engine, cache."""

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trt_kvcache._util.extras import installed_versions
from trt_kvcache._version import __version__
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import check, driver_release
from trt_kvcache.session.session import InferenceSession

_PACKAGES = ("numpy", "ml_dtypes", "tensorrt", "tensorrt-rtx", "cuda-core", "cuda-bindings", "torch")


def describe_environment(session: InferenceSession) -> dict[str, Any]:
    """Describe the environment of a session.

    Parameters
    ----------
    session : InferenceSession
        An open one.

    Returns
    -------
    dict
        In the types of JSON: ``date``, ``engine``, ``device``, ``device_name``, ``driver`` and ``cuda_driver`` (null on the host),
        ``cache`` (slots, length, dtype, layout of K and V, bytes), ``versions``, ``platform``.
    """
    memory, config = session.cache.memory, session.cache_config
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "engine": type(session.engine).__name__,
        "device": memory.device,
        **(_host() if memory.is_host else _gpu(memory)),
        "cache": {
            "max_batch_size": config.max_batch_size,
            "max_sequence_length": config.max_sequence_length,
            "dtype": config.dtype,
            "scales": None if config.kv is None else config.kv.scales,
            "layout": None if config.kv is None else config.kv.layout.value,
            "nbytes": session.cache.nbytes,
        },
        "versions": {"trt_kvcache": __version__, "python": platform.python_version(), **installed_versions(_PACKAGES)},
        "platform": platform.platform(terse=True),
    }


def _host() -> dict[str, Any]:
    return {"device_name": _processor_name(), "driver": None, "cuda_driver": None}


def _gpu(memory: Memory) -> dict[str, Any]:
    from cuda.bindings import driver
    from cuda.core import Device

    cuda = check(driver.cuDriverGetVersion())
    index = memory.dlpack_device[1]
    return {"device_name": Device(index).name, "driver": driver_release(), "cuda_driver": f"{cuda // 1000}.{cuda % 1000 // 10}"}


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
