"""What a result was measured on: device, driver, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "ml_dtypes", "tensorrt-rtx", "tensorrt", "cuda-core", "cuda-bindings", "polygraphy", "safetensors", "torch")


def describe_environment(*, gpu: bool = False) -> dict[str, Any]:
    """Return what stands at the head of every file in ``benchmarks/results``."""
    described: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "versions": _versions(),
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
    }
    return {**described, **_gpu()} if gpu else described


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit that is measured; ``TRT_KVCACHE_COMMIT`` names it where the files were copied without their history."""
    given = os.environ.get("TRT_KVCACHE_COMMIT")
    if given:
        return given
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}{' with changes' if changed else ''}"


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return {"device": f"unknown ({error})"}
    name, capability, driver, memory = (part.strip() for part in line.split(","))
    return {"device": name, "compute_capability": capability, "driver": driver, "device_memory": memory}
