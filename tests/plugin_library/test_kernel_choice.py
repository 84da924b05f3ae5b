"""The kernels that the plugin library takes on a GPU: machine code of its architecture, of one that it is compatible with, or PTX."""

import ctypes

import pytest

from tests.plugin_library.build import SOURCES, build_shared, embed_kernels, need_cmake
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, STORED_TYPES, shared_limit
from trt_kvcache.kernels.compile import ARCHITECTURES

need_cmake()

#: Architectures of a library: machine code of some, and PTX of others; by the variant that stands for the library.
_LIBRARIES = {
    "float16-64": (["sm_80", "sm_86", "sm_100", "sm_120"], ["sm_86"]),
    "float16-128": (["sm_80"], []),
    "float16-256": (["sm_80", "sm_86", "sm_89"], ["sm_80", "sm_89", "sm_120"]),
    "bfloat16-64": (["sm_87", "sm_90"], ["sm_120"]),
}


@pytest.fixture(scope="module")
def probe():
    embed = embed_kernels()
    kernels = []
    for variant, (archs, ptx) in _LIBRARIES.items():
        kernels += embed.kernels_of(ptx, [variant], [None], is_ptx=True) + embed.kernels_of(archs, [variant], [None])
    # For each variant PTX as the script has it by default, for GPUs of the future.
    kernels += embed.kernels_of(
        [embed.PTX_ARCH], [f"bfloat16-{head_dim}" for head_dim in HEAD_DIMS[1:]], [None, *STORED_TYPES], is_ptx=True
    )

    def write(folder):
        embed.write(kernels, [b""] * sum(len(one.sources) for one in kernels), folder)
        return [folder / "kernels.cpp", folder / "kernels.S"]

    return ctypes.CDLL(str(build_shared("choice_probe", [SOURCES / "attention_kernels.cpp"], write)))


def choice(probe, variant, arch, kv_dtype=None, shared_nbytes=None):
    """Return the chosen architecture, negative for PTX; or the error."""
    dtype, head_dim = variant.split("-")
    error = ctypes.create_string_buffer(4096)
    nbytes = shared_limit(f"sm_{arch}") if shared_nbytes is None else shared_nbytes
    found = probe.choice_of(arch, nbytes, dtype.encode(), int(head_dim), kv_dtype and kv_dtype.encode(), error, ctypes.c_size_t(4096))
    return found or error.value.decode()


@pytest.mark.parametrize(
    ("variant", "arch", "expected"),
    [
        ("float16-64", 80, 80),  # its own machine code
        ("float16-64", 86, 86),
        ("float16-64", 120, 120),
        ("float16-64", 89, 86),  # that of an older GPU of its major version, the newest that fits
        ("float16-64", 103, 100),
        ("float16-64", 121, 120),
        ("float16-64", 87, -86),  # a Jetson runs no machine code of other GPUs
        ("bfloat16-64", 89, "bfloat16-64 for sm_87"),  # and they none of a Jetson
        ("float16-64", 90, -86),  # PTX of an older GPU
        ("float16-64", 110, -86),
        ("float16-64", 130, -86),
        ("float16-256", 120, -120),  # PTX, the newest that it can run
        ("float16-256", 103, -89),
        ("float16-256", 86, 86),
        ("float16-128", 80, 80),
        ("bfloat16-64", 121, -120),
    ],
)
def test_the_best_kernels_for_a_gpu(probe, variant, arch, expected):
    found = choice(probe, variant, arch)
    assert found == expected if isinstance(expected, int) else expected in found


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        ("float16-128", 86),  # machine code of 8.0, whose blocks need more shared memory than 8.6 has
        ("float16-128", 90),  # another major version
        ("bfloat16-64", 100),  # PTX of a newer GPU
        ("bfloat16-64", 80),
        ("float16-64", 75),
    ],
)
def test_a_gpu_without_kernels_is_an_error_with_those_that_are_there(probe, variant, arch):
    said = choice(probe, variant, arch)
    assert said.startswith(
        f"kernels: expected {variant} for sm_{arch} in this library, got float16-64 for sm_86 (PTX), float16-64 for sm_80"
    )
    assert "make plugin-library ARCHS=" in said


def test_kernels_of_another_dtype_of_k_and_v_are_not_taken(probe):
    assert choice(probe, "float16-64", 86, "int8").startswith(
        "kernels: expected float16-64-int8 for sm_86 in this library, got float16-64 "
    )


def test_kernels_need_the_shared_memory_of_their_architecture(probe):
    """Blocks of 8.0 have up to 163 KiB, in machine code and in PTX."""
    for arch, expected in ((83, 80), (87, -80)):
        assert choice(probe, "float16-256", arch, shared_nbytes=shared_limit("sm_80")) == expected
        assert choice(probe, "float16-256", arch, shared_nbytes=shared_limit("sm_86")).startswith("kernels: expected float16-256")


@pytest.mark.parametrize("arch", [*(int(arch[3:]) for arch in ARCHITECTURES if arch != "sm_80"), 130, 999])
def test_the_ptx_of_the_script_is_for_every_gpu_from_it_on(probe, arch):
    for head_dim in HEAD_DIMS[1:]:
        for kv_dtype in (None, *STORED_TYPES):
            assert choice(probe, f"{[*ELEMENT_TYPES][1]}-{head_dim}", arch, kv_dtype) == -86
