"""Folder for cached files of this package: kernels that NVRTC compiled, and the runtime caches of TensorRT for RTX."""

import os
import sys
from pathlib import Path


def user_cache_folder() -> Path:
    """Return the folder of this package in the user's cache folder. It may not exist yet."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "trt_kvcache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "trt_kvcache"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "trt_kvcache"
    return Path.home() / ".cache" / "trt_kvcache"
