"""CUDA sources to machine code: compiled by NVRTC at first use and cached in a folder, or compiled ahead of time.

``python -m trt_kvcache.kernels.compile`` compiles all sources for all architectures (``make plugins``). A device without
NVRTC reads them from the folder in the environment variable ``TRT_KVCACHE_CUBIN_DIR``. None of this needs a GPU.
"""

import argparse
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.in_threads import count_processors
from trt_kvcache._util.user_cache import user_cache_folder
from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.source_variants import variant_macros
from trt_kvcache.kernels.sources import CXX_STANDARD, cubin_name, source_folder, source_names, source_path
from trt_kvcache.memory.cuda_driver import cuda_core_error

#: Architectures of ``make plugins``: Ampere, Ada, Hopper, Blackwell and their embedded versions.
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_110", "sm_120", "sm_121")

#: Environment variable with a folder of cubins that were compiled ahead of time.
CUBIN_DIR_VARIABLE = "TRT_KVCACHE_CUBIN_DIR"

#: Names of architectures with their specific instructions. Machine code runs only on its own architecture anyway.
_OWN_INSTRUCTIONS = {"sm_90": "sm_90a"}


def compile_cubin(name: str, arch: str) -> bytes:
    """Compile one variant of a source with NVRTC."""
    nvrtc_version()
    from cuda.core import Program, ProgramOptions

    source = source_path(name)
    options = ProgramOptions(
        name=source.name,
        arch=_OWN_INSTRUCTIONS.get(arch, arch),
        std=CXX_STANDARD,
        include_path=str(source_folder()),
        define_macro=list(variant_macros(name, arch).items()) or None,
        device_as_default_execution_space=True,  # for lambdas, which NVRTC 13.0 does not compile for the device otherwise
    )
    try:
        return bytes(Program(source.read_text(), "c++", options).compile("cubin").code)
    except cuda_core_error() as error:
        raise CudaError(f"NVRTC: {source.name} for {arch} does not compile: {error}") from None


def cubin(name: str, arch: str) -> bytes:
    """Return the machine code of one variant, from the first of: ``TRT_KVCACHE_CUBIN_DIR``, the user's cache folder, NVRTC.

    Machine code of NVRTC is saved in the cache folder.
    """
    file_name = cubin_name(name, arch)
    ahead_of_time = os.environ.get(CUBIN_DIR_VARIABLE)
    if ahead_of_time and (Path(ahead_of_time) / file_name).is_file():
        return (Path(ahead_of_time) / file_name).read_bytes()
    return cached_code("cubins", file_name, lambda: compile_cubin(name, arch))


#: Variants for which :func:`compile_ahead` was called, and a lock for each file: only one thread compiles it.
_ahead: set[tuple[str, str]] = set()
_locks: dict[str, threading.Lock] = {}


def compile_ahead(names: Iterable[str], arch: str) -> None:
    """Compile those variants that are not in a folder, in threads: a launch that needs one waits for it, and raises its error."""
    new = [name for name in dict.fromkeys(names) if (name, arch) not in _ahead]
    if not new:
        return
    _ahead.update((name, arch) for name in new)
    threads = ThreadPoolExecutor(min(len(new), count_processors()), thread_name_prefix="trt_kvcache NVRTC")
    for name in new:
        threads.submit(cubin, name, arch)
    threads.shutdown(wait=False)


def cached_code(kind: str, file_name: str, compile_code: Callable[[], bytes]) -> bytes:
    """Return code that NVRTC compiles once: later it comes from the user's cache folder."""
    cached = user_cache_folder() / kind / f"nvrtc-{nvrtc_version()}" / file_name
    with _locks.setdefault(file_name, threading.Lock()):
        try:
            return cached.read_bytes()
        except OSError:
            code = compile_code()
        _write(cached, code)
    return code


def nvrtc_version() -> str:
    """Return the version of NVRTC, such as ``"13.0"``."""
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError
    except ImportError as error:
        raise CudaError(f"cuda-python is not installed ({error}). Install trt-kvcache[cuda].") from None
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except DynamicLibNotFoundError:
        raise CudaError(
            f"NVRTC was not found, which compiles the CUDA kernels. Install trt-kvcache[cuda], or set {CUBIN_DIR_VARIABLE} "
            "to a folder made by `make plugins`."
        ) from None
    return f"{major}.{minor}"


def _write(path: Path, content: bytes) -> None:
    """Save ``content``: the file appears complete or not at all. If it cannot be saved, it is compiled again next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all sources ahead of time. See ``--help``."""
    parser = argparse.ArgumentParser(prog="python -m trt_kvcache.kernels.compile", description="Compile the CUDA sources ahead of time.")
    parser.add_argument("--arch", action="append", help=f"such as sm_90; may be repeated; default: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--output", type=Path, default=Path("build/plugins"), help="folder; default: %(default)s")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for outdated in options.output.glob("*.cubin"):
        outdated.unlink()
    for name in source_names():
        for arch in options.arch or ARCHITECTURES:
            code = compile_cubin(name, arch)
            path = options.output / cubin_name(name, arch)
            path.write_bytes(code)
            print(f"{path}  {len(code)} bytes")


if __name__ == "__main__":
    main()
