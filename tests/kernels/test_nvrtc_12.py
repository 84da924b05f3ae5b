"""The kernels compile with NVRTC 12.6 too, the version of JetPack 6.1 and 6.2, for its GPU."""

import ctypes
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from trt_kvcache.kernels.source_variants import variant_macros
from trt_kvcache.kernels.sources import CXX_STANDARD, source_folder, source_names, source_path

ARCH = "sm_87"
ENDS = ("-float16-128", "-bfloat16-256", "-float16-128-float8_e4m3fn", "-bfloat16-256-int8", "-float16-float32", "float32-float32")
ENDS = (*ENDS, "-float16-8", "-bfloat16-16", "-float16-8-int4-float16", "-bfloat16-16-int4-float16", "-bfloat16-8-int8-float32")
NAMES = [name for name in source_names() if "-" not in name or name.endswith(ENDS)]
# The largest kernel of each room; together they include nearly all headers. The others compile in `make test-all`.
FIRST = ("attention_prefill-float16-128", "recurrent_causal_conv1d-float16-float32", "sampling_choose", "states")


def marks(name):
    return [pytest.mark.long if name in FIRST else pytest.mark.slow]


@pytest.fixture(scope="module")
def compiler():
    """A process of its own: where this version is loaded, other tests would compile with it too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_compiles(compiler, name):
    assert compiler.submit(errors_of, name).result() == ""


def errors_of(name):
    """Compile a source with NVRTC 12.6, and return what it says if that fails."""
    nvrtc = loaded_nvrtc()
    path, program, size = source_path(name), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None) == 0
    options = [
        f"--gpu-architecture={ARCH}",
        f"--std={CXX_STANDARD}",
        f"--include-path={source_folder()}",
        "--device-as-default-execution-space",
    ]
    options += [f"-D{macro}={value}" for macro, value in variant_macros(name, ARCH).items()]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() or "failed" if failed else ""


@cache
def loaded_nvrtc():
    [folder] = find_spec("nvidia.cuda_nvrtc").submodule_search_locations
    ctypes.CDLL(str(Path(folder) / "lib" / "libnvrtc-builtins.so.12.6"))
    library = ctypes.CDLL(str(Path(folder) / "lib" / "libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    assert (major.value, minor.value) == (12, 6)
    return library
