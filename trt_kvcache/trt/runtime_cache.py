"""The runtime cache of TensorRT for RTX, in the user's cache folder.

TensorRT for RTX compiles kernels at run time, for the GPU that it finds. Its runtime cache (``IRuntimeCache``) can be serialised, which
makes the next start fast. A file is valid for one plan on one GPU with one driver and one release of TensorRT; all of them are part of
its name.
"""

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.user_cache import user_cache_folder

_DIGEST_NBYTES = hashlib.sha256().digest_size


def gpu_identity(device: str) -> tuple[str, ...]:
    """Return name, UUID and compute capability of a GPU, and the version of its driver."""
    from cuda.bindings import driver
    from cuda.core import Device

    gpu = Device(int(device.partition(":")[2]))
    _, version = driver.cuDriverGetVersion()
    capability = gpu.compute_capability
    return (str(gpu.name), str(gpu.uuid), f"{capability.major}.{capability.minor}", str(version))


class RuntimeCacheFile:
    """A file with a serialised runtime cache, after its SHA-256. ``key`` is everything that the kernels depend on."""

    def __init__(self, key: Sequence[str], *, folder: Path | None = None) -> None:
        name = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self.path = (folder or user_cache_folder()) / f"{name[:32]}.rtxcache"

    def read(self) -> bytes | None:
        """Read the cache; None, with a warning, if it is damaged or cannot be read, and None if there is no file."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"cannot be read ({error})")
            return None
        digest, blob = content[:_DIGEST_NBYTES], content[_DIGEST_NBYTES:]
        if hashlib.sha256(blob).digest() != digest:
            self.warn("is damaged")
            return None
        return blob

    def write(self, blob: bytes) -> None:
        """Write the cache, complete or not at all; a warning says that it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.path) as file:
                file.write(hashlib.sha256(blob).digest() + blob)
        except OSError as error:
            self.warn(f"cannot be written ({error})")

    def warn(self, what: str) -> None:
        """Warn that the file is not used, which costs only time."""
        warnings.warn(
            f"TensorRT-RTX runtime cache {self.path}: it {what}; kernels are compiled again at each start.", RuntimeWarning, stacklevel=3
        )
