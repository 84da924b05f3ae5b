"""The timing cache of a build with full TensorRT, in a file: measurements of kernels, which the next build need not repeat."""

from pathlib import Path
from typing import Any

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache.builder.tensorrt_calls import require
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.trt.log import Messages


def check_timing_cache(path: Path) -> None:
    """Check that a timing cache can be written, before a long build."""
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"timing_cache: expected a file in a folder that exists, got {path}.")


def read_timing_cache(config: Any, path: Path, messages: Messages) -> None:
    """Let a build start from the measurements in a file, which need not exist."""
    data = path.read_bytes() if path.exists() else b""
    warnings = len(messages.warnings)
    cache = require(config.create_timing_cache, messages, f"{path}: the timing cache cannot be read", data)
    if data and len(messages.warnings) > warnings:
        messages.fail(BuildError, f"{path}: expected a timing cache of this TensorRT")  # it would be replaced by an empty one
    if not config.set_timing_cache(cache, False):
        messages.fail(BuildError, f"{path}: the timing cache is of another GPU or release of TensorRT. Give each its own file")


def write_timing_cache(config: Any, path: Path) -> None:
    """Write the measurements that a build has read and made to a file. An existing file is replaced once the new one is complete."""
    cache = config.get_timing_cache()
    if cache is not None:
        with atomic_file(path) as file:
            file.write(memoryview(cache.serialize()))
