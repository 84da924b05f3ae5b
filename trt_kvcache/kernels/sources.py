"""Paths of the CUDA sources of ``plugins/``, and file names of compiled sources."""

import hashlib
from functools import cache
from pathlib import Path

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.source_variants import variant_macros, variant_names

_PACKAGE = Path(__file__).resolve().parents[1]

#: Options that every file is compiled with.
CXX_STANDARD = "c++17"

_SUFFIXES = (".cu", ".cuh", ".h")


@cache
def source_folder() -> Path:
    """Return the folder of the CUDA sources: ``_plugins`` of an installed package, ``plugins`` of a checkout."""
    for folder in (_PACKAGE / "_plugins", _PACKAGE.parent / "plugins"):
        if any(folder.glob("*.cu")):
            return folder
    raise CudaError(f"the CUDA sources of trt_kvcache are missing: expected {_PACKAGE / '_plugins'}. Install the package again.")


def source_files() -> list[Path]:
    """Return all CUDA sources and headers, relative to :func:`source_folder`, in a fixed order."""
    folder = source_folder()
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in _SUFFIXES)


def _sources() -> dict[str, Path]:
    """Return the files that are compiled, by name: ``attention/decode.cu`` is ``"attention_decode"``."""
    return {"_".join(path.with_suffix("").parts): path for path in source_files() if path.suffix == ".cu"}


def source_names() -> list[str]:
    """Return the names of all compiled variants: ``"lengths"``, ``"attention_decode-float16-128"``, ..."""
    return sorted(name for source in _sources() for name in variant_names(source))


def source_path(name: str) -> Path:
    """Return the source file of a name of :func:`source_names`."""
    return source_folder() / _sources()[name.partition("-")[0]]


@cache
def _digest() -> str:
    """Return a digest of all sources and headers: any header may be included in any source."""
    digest = hashlib.sha256(CXX_STANDARD.encode())
    for path in source_files():
        digest.update(path.as_posix().encode() + b"\0" + (source_folder() / path).read_bytes() + b"\0")
    return digest.hexdigest()


def cubin_name(name: str, arch: str) -> str:
    """Return the file name of a compiled source. It changes with the sources, so an outdated file is never used."""
    digest = hashlib.sha256(f"{_digest()}{variant_macros(name, arch)}".encode()).hexdigest()[:16]
    return f"{name}-{digest}.{arch}.cubin"
