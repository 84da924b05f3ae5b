"""The plugin library compiled with CMake against the declarations of this folder, once for each set of kernels."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT
from tests.simt.run import ARCH, once
from trt_kvcache.kernels import attention_tiles, source_variants
from trt_kvcache.kernels.sources import cubin_name

SOURCES = ROOT / "plugins/tensorrt"
DECLARATIONS = Path(__file__).parent / "declarations"

#: The CMake folder of all libraries: only the table of kernels differs, and the rest is compiled once.
_CMAKE = ROOT / "build/plugin_library_of_tests"


#: What the table of kernels is written from.
_TILES = [Path(attention_tiles.__file__), Path(source_variants.__file__)]


def need_cmake() -> None:
    """Leave out a whole test file where CMake or g++ are missing; with ``TRT_KVCACHE_REQUIRE_EMULATOR=1`` that fails."""
    missing = [tool for tool in ("cmake", "make", "g++") if shutil.which(tool) is None]
    if missing and os.environ.get("TRT_KVCACHE_REQUIRE_EMULATOR") == "1":
        pytest.fail(f"the plugin library cannot be built: {missing[0]} is not installed")
    if missing:
        pytest.skip(f"{missing[0]} is not installed", allow_module_level=True)


def embed_kernels() -> ModuleType:
    """Return the module that writes the table of kernels: a script, which is in no package."""
    spec = importlib.util.spec_from_file_location("embed_kernels", SOURCES / "embed_kernels.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_include() -> Path:
    from cuda.pathfinder import find_nvidia_header_directory

    return Path(find_nvidia_header_directory("cudart"))


def rtx_library() -> Path | None:
    """Return the library of TensorRT for RTX, which that of the plugins is linked with if it registers itself."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("libtensorrt_rtx.so.1")


def build_library(
    name: str = "empty",
    archs: Sequence[str] = (),
    variants: Sequence[str] = (),
    kv_dtypes: Sequence[str | None] = (),
    *,
    is_ptx: bool = False,
) -> Path:
    """Return the path of a library with these kernels; without any, it can do all that a build of an engine needs.

    With ``is_ptx`` they are PTX; the emulated device takes its machine code for that.
    """
    embed = embed_kernels()
    kernels = embed.kernels_of(archs, variants, kv_dtypes, is_ptx=is_ptx)
    compiled = [one._replace(is_ptx=is_ptx and one.arch != ARCH) for one in kernels]

    def make(folder: Path) -> None:
        embed.write(kernels, embed.compile_all(compiled), folder / "kernels")
        _CMAKE.mkdir(parents=True, exist_ok=True)
        with (_CMAKE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            paths = {"TENSORRT_INCLUDE": DECLARATIONS, "TENSORRT_LIBRARY": rtx_library() or "", "CUDA_INCLUDE": cuda_include()}
            settings = paths | {"KERNELS": folder / "kernels", "CMAKE_CXX_FLAGS": "-O1 -Werror"}
            run("cmake", "-S", SOURCES, "-B", _CMAKE, *(f"-D{name}={value}" for name, value in settings.items()))
            run("cmake", "--build", _CMAKE, "--parallel", 2)
            for library in _CMAKE.glob("*.so"):
                shutil.copy(library, folder)

    inputs = [path for folder in (SOURCES, DECLARATIONS) for path in sorted(folder.iterdir()) if path.is_file()]
    # The name of a cubin has a digest of the CUDA sources and of the tile sizes.
    cubins = "".join(cubin_name(source, one.arch) for one in kernels for source in one.sources)
    digest = hashlib.sha256(cubins.encode()).hexdigest()[:8]
    return once(f"plugin-library-{name}-{digest}", [*inputs, *_TILES], make) / "libtrt_kvcache_plugins.so"


def build_shared(name: str, sources: Sequence[Path], write: Callable[[Path], list[Path]]) -> Path:
    """Return a library of a test: ``NAME.cpp`` of this folder, some sources of the plugin library, and files that ``write`` writes."""
    source = Path(__file__).parent / f"{name}.cpp"

    def make(folder: Path) -> None:
        run("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{SOURCES}", source, *sources, *write(folder),
            "-o", folder / f"{name}.so")  # fmt: skip

    inputs = [source, *sorted(SOURCES.glob("*.?pp")), SOURCES / "embed_kernels.py", *_TILES]
    return once(f"plugin-library-{name}", inputs, make) / f"{name}.so"


def build_program(name: str, *sources: Path) -> Path:
    """Return a program that is compiled against the declarations, from files of this repository."""

    def make(folder: Path) -> None:
        run("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", DECLARATIONS, *sources, "-o", folder / name)

    inputs = [*sources, *sorted((ROOT / "examples/cpp").glob("*.hpp")), *sorted(DECLARATIONS.iterdir())]
    return once(f"plugin-library-{name}", inputs, make) / name


def run(*command: object) -> None:
    """Run a program, and show what it prints only if it fails."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
