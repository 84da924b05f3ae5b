"""CUDA sources to PTX, by NVRTC, which a driver compiles for GPUs that have no cubin. Making it needs no GPU and no driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.compile import cached_code, nvrtc_version
from trt_kvcache.kernels.source_variants import variant_macros
from trt_kvcache.kernels.sources import CXX_STANDARD, cubin_name, source_folder, source_path


def kernel_ptx(name: str, arch: str) -> bytes:
    """Return the PTX of one variant of a source, for GPUs from an architecture on, from the user's cache folder if it is there."""
    source, macros = source_path(name), variant_macros(name, arch)
    file_name = Path(cubin_name(name, arch)).with_suffix(".ptx").name
    return cached_code("ptx", file_name, lambda: compile_ptx(source.read_text(), name=name, arch=arch, macros=macros))


def compile_ptx(source: str, *, name: str, arch: str, macros: Mapping[str, str]) -> bytes:
    """Compile a source to PTX. ``name`` is for messages."""
    nvrtc_version()
    # cuda.core compiles to PTX only where there is a driver, which it asks whether it could load the result.
    from cuda.bindings import nvrtc

    def take(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise CudaError(f"NVRTC: {name} for {arch}: {result[0].name}. {log()}")
        return result[1] if len(result) > 1 else None

    def log() -> str:
        text = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, text)
        return str(text.strip(b"\0 "), "utf-8", "replace")

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        options = [f"--std={CXX_STANDARD}", f"--gpu-architecture={arch.replace('sm_', 'compute_')}", f"--include-path={source_folder()}"]
        options += ["--device-as-default-execution-space", *(f"-D{macro}={value}" for macro, value in macros.items())]
        take(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
        ptx = b" " * take(nvrtc.nvrtcGetPTXSize(program))
        take(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(ptx).rstrip(b"\0")
