"""NVIDIA's Python bindings of full TensorRT, from the package index, over libraries that are empty.

``tensorrt-cu12-bindings`` is the real pybind11 module, 1 MB, without the libraries that it calls (over 1 GB, and nothing starts without a
GPU). It needs nine C functions of them: ``stub.c`` has these.
"""

import ctypes
import importlib
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FOLDER = ROOT / "build" / "bindings"
PACKAGE = "tensorrt-cu12-bindings"

_STUB = Path(__file__).with_name("stub.c")
#: What the complete package ``tensorrt`` does beside loading the libraries.
_SHIMS = {
    "tensorrt/__init__.py": "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n",
    "tensorrt/plugin/__init__.py": "from tensorrt_bindings.plugin import *\n",
}


class Unavailable(Exception):
    """Bindings cannot be made ready here; the text says what is missing."""


class NoWheel(Unavailable):
    """The package index has no bindings of this release for this Python."""


def prepare(version: str) -> Path:
    """Return the folder with the bindings of a release and with its empty libraries, after making it if it is not there yet.

    Raises
    ------
    NoWheel
        The package index has no bindings of this release for this Python.
    Unavailable
        This is not Linux on x86-64, or there is no gcc or no package index.
    """
    folder = FOLDER / f"{version}-cp{sys.version_info.major}{sys.version_info.minor}"
    if (folder / "complete").exists() and (folder / "complete").read_bytes() == _STUB.read_bytes():
        return folder
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unavailable("expected Linux on x86-64, whose calling convention is the only one that tests/bindings/cpp.py knows.")
    if shutil.which("gcc") is None:
        raise Unavailable("gcc was not found. Install it (apt-get install gcc).")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(_download(version, folder)) as wheel:
        wheel.extractall(folder)
    for name, text in _SHIMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in _libraries(version):  # found by their SONAME, so no search path is needed
        source = str(_STUB) if name.startswith("libnvinfer.") else "/dev/null"
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", source, "-o", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(_STUB, folder / "complete")
    return folder


def load(version: str) -> tuple[Any, ctypes.CDLL]:
    """Import the bindings of a release as ``tensorrt``; once in a process. Returns the module and the stub, whose objects can be set."""
    folder = prepare(version)
    *_, stub = [ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in _libraries(version)]
    sys.path.insert(0, str(folder))
    module = importlib.import_module("tensorrt")
    assert module.__version__ == version
    return module, stub


def _libraries(version: str) -> list[str]:
    """Return the names of the libraries that the bindings load, that with the functions last."""
    return [f"lib{name}.so.{version.split('.')[0]}" for name in ("nvinfer_plugin", "nvonnxparser", "nvinfer")]


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False)
    wheels = [*folder.glob("*.whl")]
    if wheels:
        return wheels[0]
    if "No matching distribution" in done.stderr and "(from versions: none)" not in done.stderr:  # the index answers, with other releases
        raise NoWheel(f"there is no {PACKAGE} {version} for Python {sys.version_info.major}.{sys.version_info.minor}.")
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"pip returned {done.returncode}"]
    raise Unavailable(f"{PACKAGE} {version} could not be downloaded from the package index. {said[0]}")
