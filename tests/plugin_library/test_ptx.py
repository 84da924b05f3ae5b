"""The PTX of the plugin library, compiled by nvJitLink, which has the compiler of the driver, for GPUs that it has no machine code for."""

import pytest

from tests.plugin_library.build import embed_kernels
from trt_kvcache.errors import CudaError
from trt_kvcache.kernels.attention_tiles import DECODE_ROWS
from trt_kvcache.kernels.ptx import compile_ptx, kernel_ptx

#: Architectures that PTX of ``sm_86`` is compiled for.
_NEWER = {
    "attention_decode-float16-64": ("sm_87", "sm_90", "sm_100", "sm_110", "sm_121"),
    "attention_decode-bfloat16-128-float8_e4m3fn": ("sm_120",),
}


def linked(ptx, arch):
    """Return the machine code of PTX for an architecture."""
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
    handle = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx, len(ptx), "kernels")
        nvjitlink.complete(handle)
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        return bytes(code)
    finally:
        nvjitlink.destroy(handle)


@pytest.mark.long
@pytest.mark.parametrize("name", list(_NEWER))
def test_ptx_is_for_newer_gpus(name):
    arch = embed_kernels().PTX_ARCH
    ptx = kernel_ptx(name, arch)
    assert f".target {arch}".encode() in ptx
    names = [f"attention_decode_{rows}" for rows in DECODE_ROWS[:2]]
    assert [one for one in names if f".entry {one}(".encode() not in ptx] == []
    for newer in _NEWER[name]:
        code = linked(ptx, newer)
        assert [one for one in names if one.encode() not in code] == [], newer


def test_ptx_of_warpgroups_is_for_their_gpu_alone():
    """So the script has none of sm_90."""
    source = 'extern "C" __global__ void kernel() { asm volatile("wgmma.fence.sync.aligned;"); }'
    ptx = compile_ptx(source, name="kernel", arch="sm_90a", macros={})
    assert b"kernel" in linked(ptx, "sm_90a")
    with pytest.raises(Exception, match="PTX_COMPILE"):
        linked(ptx, "sm_100")


def test_a_source_that_does_not_compile_is_an_error_of_ours():
    with pytest.raises(CudaError, match=r"^NVRTC: broken for sm_86: NVRTC_ERROR_COMPILATION\. (?s:.*)undeclared_name"):
        compile_ptx("int value = undeclared_name;", name="broken", arch="sm_86", macros={})
