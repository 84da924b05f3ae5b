"""The decode step ahead of time: with a stand-in for ``tensorrt.plugin``, NVRTC, and the kernel on the emulated device."""

import inspect
import re
import sys
import typing
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.assertions import raises
from tests.trt.plugin.stand_in import DataType, tensorrt
from trt_kvcache.errors import ConfigError, CudaError, KVCacheError
from trt_kvcache.kernels.attention_tiles import DECODE_HEAD_DIMS
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.trt.plugin import AttentionAttributes, aot, register_decode

FIELDS = AttentionAttributes(num_heads=22, num_kv_heads=2, head_dim=80, softcap=30.5, window=7, rotary_dim=20)
SHAPES = {"q": (3, 1, 22, 80), "k": (3, 1, 2, 80), "v": (3, 1, 2, 80), "cache": (3, 2, 2, 9, 80), "lengths": (3,), "cos_sin": (9, 2, 10)}


@pytest.mark.parametrize("head_dim", DECODE_HEAD_DIMS)
def test_tiles_fit_into_the_default_shared_memory(head_dim):
    warps, stages, nbytes = aot.tiles(head_dim)
    assert warps in (1, 2, 4)
    assert stages >= 2
    assert nbytes <= 48 * 1024


def test_heads_that_no_decode_kernel_has():
    with raises(ConfigError, "head_dim", expected="64, 80, 96, 128, 256", got=512):
        aot.tiles(512)


def test_blocks_cover_the_query_heads_of_each_kv_head():
    assert aot.blocks(FIELDS) == 4  # 8 and 3 of 11 query heads, of each K/V head


def test_attributes_are_compiled_in_as_macros():
    macros = aot.macros(FIELDS, "bfloat16")
    fixed = {"ELEMENT": "BFloat16", "HEAD_DIM": "80", "GROUP_SIZE": "11", "NUM_KV_HEADS": "2", "ROTARY_DIM": "20", "WINDOW": "7"}
    assert macros == macros | fixed


def test_factors_of_the_scores_with_a_softcap():
    macros = aot.macros(FIELDS, "bfloat16")
    assert [float(macros[name]) for name in ("FACTOR", "INVERSE_SOFTCAP")] == pytest.approx([30.5 / np.log(2), 80**-0.5 / 30.5])


def test_ptx_has_one_entry_with_the_arguments_of_the_launch():
    ptx = aot.decode_ptx(FIELDS, "float16", "sm_86")
    entry = ptx[ptx.index(".entry attention_decode_aot(") :].partition(")")[0]
    parameters = [line.split()[1] for line in entry.splitlines()[1:] if line.strip()]
    assert ".target sm_86" in ptx
    assert ptx.count(".entry") == 1
    assert [kind.split(".")[1][1:] for kind in parameters] == ["64"] * 6 + ["32"] + ["64"] * 2


def test_ptx_that_the_driver_would_refuse_is_not_made(monkeypatch):
    monkeypatch.setattr(aot, "driver_version", lambda: (12, 8))
    with pytest.raises(CudaError, match=r"^NVRTC: expected CUDA 12\.8 or older for PTX, .*, got \d+\.\d+\. .*nvidia-cuda-nvrtc 12\.8"):
        aot.decode_ptx(FIELDS, "float16", "sm_86")
    monkeypatch.setattr(aot, "driver_version", lambda: (99, 0))
    assert ".target sm_86" in aot.decode_ptx(FIELDS, "float16", "sm_86")


def test_an_architecture_that_nvrtc_does_not_know_is_refused():
    with pytest.raises(CudaError, match=r"^NVRTC: attention_decode_aot for sm_1: NVRTC_ERROR_\w+\. .*gpu-architecture"):
        aot.decode_ptx(FIELDS, "float16", "sm_1")


class Described:
    """A ``TensorDesc``."""

    def __init__(self, shape, dtype):
        self.shape_expr = [SimpleNamespace(is_constant=size is not None, constant_value=size) for size in shape]
        self.dtype = dtype
        self.like, self.aliased = lambda: ("like", self), lambda: ("aliased", self)


@pytest.fixture
def registered(monkeypatch):
    """What is registered with a stand-in for ``tensorrt.plugin``: how it is described, and the kernel."""
    made = {}
    module = SimpleNamespace(TensorDesc=Described, KernelLaunchParams=SimpleNamespace, SymIntExprs=lambda count: [None] * count)
    module.SymInt32 = lambda size: ("SymInt32", size)
    for name in ("register", "aot_impl"):
        setattr(module, name, lambda plugin, name=name: lambda function: made.setdefault(name, (plugin, function))[1])
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", module)
    monkeypatch.setattr(aot, "decode_ptx", lambda *what: what)
    implement = register_decode(tensorrt(), arch="sm_87")
    assert made["aot_impl"] == ("trt_kvcache::KVCacheAttentionDecode", implement)
    assert made["register"][0] == "trt_kvcache::KVCacheAttentionDecode"
    return made["register"][1], implement


@pytest.fixture
def tensors():
    dtypes = {"lengths": DataType.INT32, "cos_sin": DataType.FLOAT}
    return {name: Described(shape, dtypes.get(name, DataType.HALF)) for name, shape in SHAPES.items()}


def test_signatures_are_annotated_as_tensorrt_requires(registered):
    describe, implement = map(inspect.signature, registered)
    kinds = {name: NDArray[np.int32 if kind == "INT32" else np.float64] for name, kind in ATTRIBUTE_TYPES.items()}
    assert {name: one.annotation for name, one in describe.parameters.items()} == dict.fromkeys(SHAPES, Described) | kinds
    assert list(implement.parameters) == [*describe.parameters, "outputs", "tactic"]
    assert typing.get_args(describe.return_annotation) == (Described, Described)
    assert typing.get_origin(implement.return_annotation) is tuple
    assert typing.get_args(typing.get_args(implement.return_annotation)[1]) == (str, bytes)


def test_outputs_are_described(registered, tensors):
    describe, _ = registered
    assert describe(*tensors.values(), **FIELDS.plugin_field_arrays()) == (("like", tensors["q"]), ("aliased", tensors["cache"]))


@pytest.fixture
def implemented(registered, tensors):
    """What the implementation returns: name, PTX, launch and extra arguments."""
    _, implement = registered
    return implement(*tensors.values(), *FIELDS.plugin_field_arrays().values(), [], 0)


def test_the_kernel_is_compiled_for_the_dtype_and_the_architecture(implemented):
    name, ptx, _, _ = implemented
    assert (name, ptx) == ("attention_decode_aot", (FIELDS, "float16", "sm_87"))


def test_the_launch_has_a_block_row_per_slot(implemented, tensors):
    _, _, launch, _ = implemented
    warps, _, shared = aot.tiles(80)
    sizes = {"grid_x": 1, "grid_y": 4, "grid_z": tensors["q"].shape_expr[0], "block_x": 32 * warps, "block_y": 1, "block_z": 1}
    assert vars(launch) == sizes | {"shared_mem": shared}


def test_the_tokens_of_a_slot_are_an_argument(implemented, tensors):
    *_, integers = implemented
    assert integers == [("SymInt32", tensors["cache"].shape_expr[3])]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({name: ((3, None, *SHAPES[name][2:]), DataType.HALF) for name in "qkv"}, f"{aot.PLUGIN_ID}: expected q of shape [B, 1, "),
        ({"k": ((3, 1, 4, 80), DataType.HALF)}, "k: expected [3, 1, 2, 80], got [3, 1, 4, 80]."),
        ({"lengths": ((3,), DataType.FLOAT)}, "lengths: expected int32, got float32."),
    ],
)
def test_tensors_that_do_not_fit_are_refused(registered, tensors, changed, said):
    tensors |= {name: Described(*what) for name, what in changed.items()}
    with pytest.raises(KVCacheError, match=f"^{re.escape(said)}"):
        registered[1](*tensors.values(), *FIELDS.plugin_field_arrays().values(), [], 0)
