"""Run pytest on the emulated device: ``python tests/simt/run.py -m device``. Arguments go to pytest.

Builds the stand-in driver and the kernels of plugins/ with g++ into build/simt, and starts pytest with ``libcuda.so.1``
taken from there. Where there is no g++ (or no Linux, or no cuda-python) nothing is run, which is said; with
``TRT_KVCACHE_REQUIRE_EMULATOR=1`` that is a failure.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

#: The architecture that the stand-in driver reports: see driver/device.cpp.
ARCH = "sm_990"

COMPILER = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-shared", "-fPIC"]

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


def build() -> Path:
    """Return the folder with ``driver/libcuda.so.1`` and ``cubins/``; it is built anew when a source has changed."""
    from trt_kvcache.kernels.sources import cubin_name, source_folder, source_names

    sources = [*HERE.glob("*.h"), *HERE.glob("*.cpp"), *HERE.glob("driver/*"), *source_folder().glob("*")]
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    folder = REPOSITORY / "build" / "simt" / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    unfinished = folder.with_suffix(f".{os.getpid()}")
    (unfinished / "driver").mkdir(parents=True)
    (unfinished / "cubins").mkdir()
    build_driver(unfinished / "driver" / "libcuda.so.1")
    for name in source_names():
        build_kernels(source_folder() / f"{name}.cu", unfinished / "cubins" / cubin_name(name, ARCH))
    try:
        os.replace(unfinished, folder)
    except OSError:  # someone else built the same meanwhile
        shutil.rmtree(unfinished)
    return folder


def build_driver(target: Path) -> None:
    """Compile the stand-in driver, against the headers of the CUDA runtime's wheel."""
    from cuda.pathfinder import find_nvidia_header_directory

    headers = find_nvidia_header_directory("cudart")
    exports = f"-Wl,--version-script={HERE / 'driver' / 'exports.map'}"
    subprocess.run([*COMPILER, f"-I{headers}", exports, *map(str, sorted(HERE.glob("driver/*.cpp"))), "-o", str(target)], check=True)


def build_kernels(source: Path, target: Path) -> None:
    """Compile one CUDA source for the emulator, into a file that takes the place of a cubin."""
    names = KERNEL.findall(source.read_text())
    unit = target.with_suffix(".cpp")
    unit.write_text(f'#include "{source}"\n' + "".join(f"SIMT_KERNEL({name})\n" for name in names))
    command = [*COMPILER, "-include", str(HERE / "simt.h"), f"-I{source.parent}", str(unit), str(HERE / "simt.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)


def main() -> None:
    """Build what is needed and become pytest."""
    missing = what_is_missing()
    if missing is not None:
        print(f"tests/simt/run.py: left out the tests on the emulated device: {missing}.")
        sys.exit(1 if os.environ.get("TRT_KVCACHE_REQUIRE_EMULATOR") == "1" else 0)
    folder = build()
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder / "driver"), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")])),
        "TRT_KVCACHE_CUBIN_DIR": str(folder / "cubins"),
        "TRT_KVCACHE_TEST_DEVICE": "emulated",
    }
    os.chdir(REPOSITORY)
    os.execve(sys.executable, [sys.executable, "-m", "pytest", "-p", "simt.no_tensorrt", *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
