"""Run pytest on the emulated device: ``python tests/simt/run.py -m device``. Arguments go to pytest.

Builds the stand-in driver and the kernels of plugins/ with g++ into build/simt, and starts pytest with ``libcuda.so.1``
taken from there. With ``--sanitizer=address`` (that and undefined behaviour) or ``--sanitizer=thread`` in front, the kernels
are built with it, and the first thing that it finds ends the run. Where there is no g++ (or no Linux, or no cuda-python)
nothing is run, which is said; with ``TRT_KVCACHE_REQUIRE_EMULATOR=1`` that is a failure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

#: The architecture that the stand-in driver reports: see driver/device.cpp.
ARCH = "sm_990"

#: Each library has its own of what is one per program: kernels of one name may take different arguments.
COMPILER = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-dangling-reference", "-fno-gnu-unique", "-fPIC"]

#: What kernels can be built with: options of g++, libraries that the process must load first, and its environment.
SANITIZERS: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "none": ([], [], {}),
    "address": (
        ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        ["libasan.so", "libstdc++.so"],
        # A fiber that ended would keep its fake stack: from GCC 13 on they are used by default.
        {
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    ),
    "thread": (["-g1", "-fsanitize=thread"], ["libtsan.so"], {"TSAN_OPTIONS": "halt_on_error=1", "OPENBLAS_NUM_THREADS": "1"}),
}

#: Elements and head dims that attention is built for, over every K/V dtype, unless others are asked for: those that fast tests have.
VARIANTS = ("float16-64", "bfloat16-80", "float16-128", "float16-256", "float16-512")

#: Pytest, without TensorRT; and so that what a sanitizer says before it ends the process is not lost.
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    *(word for name in ("no_tensorrt", "tiles", "on_demand") for word in ("-p", f"tests.simt.{name}")),
]
UNBUFFERED = ["-p", "no:faulthandler", "--capture=sys"]

#: Patterns of names of sources with so many variants that each is built when a test first launches it.
ON_DEMAND = re.compile("linear_packed|linear_super_block|.*-(tree|shared)$")

KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


def what_is_missing() -> str | None:
    """Say why the emulated device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return "the stand-in driver is made for Linux"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-python is not installed (trt-kvcache[cuda])"
    return None


def once(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Return a folder under build/simt that ``make`` filled: once, whoever asks. It is made anew when a source has changed."""
    import fcntl  # on Linux, where alone this is called

    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    folder = REPOSITORY / "build" / "simt" / f"{name}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever else needs it waits, in this process or in another one
        if not folder.is_dir():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def own_sources() -> list[Path]:
    """Return all that is compiled from this folder, and this file."""
    return sorted(path for pattern in ("*.h", "*.cpp", "driver/*", "run.py") for path in HERE.glob(pattern))


def build_device() -> Path:
    """Return the folder with ``libcuda.so.1``, and the objects of the emulator: those have no sanitizer in them."""

    def make(folder: Path) -> None:
        from cuda.pathfinder import find_nvidia_header_directory

        exports = f"-Wl,--version-script={HERE / 'driver' / 'exports.map'}"
        options = ["-shared", f"-I{find_nvidia_header_directory('cudart')}", exports, *map(str, sorted(HERE.glob("driver/*.cpp")))]
        _compile([*options, "-o", str(folder / "libcuda.so.1")])
        for source in HERE.glob("*.cpp"):
            _compile(["-c", str(source), "-o", str(folder / f"{source.stem}.o")])

    return once("device", own_sources(), make)


def precompiled_header(sanitizer: str) -> Path:
    """Return ``simt.h`` as g++ reads it fastest: what a CUDA source is compiled with costs more than most of the sources."""

    def make(folder: Path) -> None:
        header = folder / "precompiled.h"
        header.write_text(f'#include "{HERE / "simt.h"}"\n')
        options = [*SANITIZERS[sanitizer][0], "-x", "c++-header", str(header), "-o", str(header.with_suffix(".h.gch"))]
        _compile(options)

    return once(f"header-{sanitizer}", own_sources(), make) / "precompiled.h"


def use_tiles() -> str:
    """Give the device the tiles of the GPU that the variable SIMT_TILES names, if there is one, and return the architecture.

    Lengths of a few tiles are uneven there, as long ones are elsewhere.
    """
    from trt_kvcache.kernels import attention_tiles

    arch = os.environ.get("SIMT_TILES", ARCH)
    attention_tiles._SHARED_NBYTES[ARCH] = attention_tiles.shared_limit(arch)
    attention_tiles._STREAMK_COST_TILES[ARCH] = 0
    if arch not in attention_tiles._WARPGROUP_ARCHS:
        attention_tiles._WARPGROUP_ARCHS -= {ARCH}
    attention_tiles.decode_tiles.cache_clear()
    attention_tiles.few_tiles.cache_clear()
    return arch


def is_chosen(name: str, variants: Sequence[str] = VARIANTS) -> bool:
    """Whether a name of ``source_names`` is built before the tests: of attention in these variants, and all others but those on demand."""
    element_and_head_dim = "-".join(name.split("-")[1:3])
    if ON_DEMAND.match(name):
        return False
    return element_and_head_dim in variants if name.startswith("attention") else True


def build_cubins(sanitizer: str = "none", variants: Sequence[str] = VARIANTS, only: Sequence[str] = ()) -> Path:
    """Return the folder with the kernels of plugins/, compiled for the emulator: those of attention in these variants, or only some."""
    from trt_kvcache.kernels import attention_tiles
    from trt_kvcache.kernels.source_variants import variant_macros
    from trt_kvcache.kernels.sources import cubin_name, source_files, source_folder, source_names, source_path

    tiles, sizes = use_tiles(), Path(attention_tiles.__file__)

    def make(folder: Path) -> None:
        def build(name: str) -> None:
            build_kernels(source_path(name), folder / cubin_name(name, ARCH), sanitizer, macros=variant_macros(name, ARCH))

        build_device()
        precompiled_header(sanitizer)
        with ThreadPoolExecutor() as pool:
            list(pool.map(build, only or [name for name in source_names() if is_chosen(name, variants)]))

    sources = [*own_sources(), sizes, *(source_folder() / path for path in source_files())]
    return once("-".join(["cubins", sanitizer, *variants, *only, tiles]), sources, make)


def build_kernels(
    source: Path,
    target: Path,
    sanitizer: str,
    *,
    main: Path | None = None,
    macros: Mapping[str, str] = MappingProxyType({}),
    include: Path = REPOSITORY / "plugins",
) -> None:
    """Compile one CUDA source for the emulator, to take the place of a cubin; or to a program, with a source that has a main function.

    ``include`` is the folder that the headers of plugins/ are taken from.
    """
    emulator = sorted(build_device().glob("*.o"))
    unit = target.with_name(f"{target.name}.unit.cpp")
    kernels = "".join(f"SIMT_KERNEL({name})\n" for name in KERNEL.findall(source.read_text()))
    unit.write_text(f'#include "{source}"\n{kernels}' + (f'#include "{main}"\n' if main else ""))
    options = [
        "-include",
        str(precompiled_header(sanitizer)),
        f"-I{include}",
        "-rdynamic" if main else "-shared",
        *SANITIZERS[sanitizer][0],
    ]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    _compile([*options, str(unit), *map(str, emulator), "-o", str(target)])
    unit.unlink()


def _compile(options: Sequence[str]) -> None:
    subprocess.run([*COMPILER, *options], check=True, env={**os.environ, "LD_PRELOAD": ""})  # no sanitizer in the compiler itself


def environment(cubins: Path, sanitizer: str) -> dict[str, str]:
    """Return the environment in which a process finds the emulated device, and these kernels built with this sanitizer."""
    _, libraries, variables = SANITIZERS[sanitizer]
    preloaded = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip() for name in libraries]
    return {
        **os.environ,
        **variables,
        "LD_PRELOAD": " ".join(preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(build_device()), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "TRT_KVCACHE_CUBIN_DIR": str(cubins),
        "TRT_KVCACHE_TEST_DEVICE": "emulated",
        "SIMT_SANITIZER": sanitizer,
    }


def pytest_command(sanitizer: str) -> list[str]:
    """Return the words that start pytest; its arguments follow."""
    return [*PYTEST, *(UNBUFFERED if sanitizer != "none" else [])]


def main() -> None:
    """Build what is needed and become pytest."""
    missing = what_is_missing()
    if missing is not None:
        print(f"tests/simt/run.py: left out the tests on the emulated device: {missing}.")
        sys.exit(1 if os.environ.get("TRT_KVCACHE_REQUIRE_EMULATOR") == "1" else 0)
    arguments = sys.argv[1:]
    sanitizer = arguments.pop(0).partition("=")[2] if arguments and arguments[0].startswith("--sanitizer=") else "none"
    cubins = build_cubins(sanitizer)
    os.chdir(REPOSITORY)
    os.execve(sys.executable, [*pytest_command(sanitizer), *arguments], environment(cubins, sanitizer))


if __name__ == "__main__":
    main()
