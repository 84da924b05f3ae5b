"""What compressed-tensors itself packs, and what it makes of it again. Left out where the library is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trt_kvcache.checkpoint.quantized.compressed_tensors import CompressedTensors

# Its import takes ten seconds, so not while tests are collected.
pytestmark = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
torch = pytest.importorskip("torch")

SHAPE = (24, 64)

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", INT4),
    "int4, asymmetric": ("pack-quantized", {**INT4, "symmetric": False}),
    "int4, channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "packed int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8, asymmetric": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8, tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8, block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 16]}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


def shape_of_scales(weights: dict[str, Any]) -> tuple[int, ...]:
    strategy = weights["strategy"]
    if strategy == "tensor":
        return (1,)
    if strategy == "channel":
        return (SHAPE[0], 1)
    if strategy == "block":
        return (SHAPE[0] // 8, SHAPE[1] // 16)
    return (SHAPE[0], SHAPE[1] // weights["group_size"])


def stored_by_the_library(packing: str, weights: dict[str, Any], dtype: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return its compressor, what it stores of a random matrix, and its scheme."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(3)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    shape = shape_of_scales(weights)
    scales = torch.rand(shape, dtype=dtype) * 0.1 + 0.05
    state = {"weight": torch.randn(SHAPE, dtype=dtype), "weight_scale": scales}
    if packing == "nvfp4-pack-quantized":
        state |= {"weight_scale": (scales * 100).to(torch.float8_e4m3fn).to(dtype), "weight_global_scale": torch.tensor([37.5])}
    if packing == "mxfp4-pack-quantized":
        state["weight_scale"] = torch.exp2(torch.randint(-4, 1, shape)).to(dtype)
    if weights.get("symmetric") is False:
        top = 1 << (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-top, top, shape, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(packing)
    return compressor, compressor.compress(state, scheme), scheme


def as_array(tensor: Any) -> Any:
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        bits, dtype = (torch.uint8, ml_dtypes.float8_e4m3fn) if tensor.dtype == torch.float8_e4m3fn else (torch.int16, ml_dtypes.bfloat16)
        return tensor.contiguous().view(bits).numpy().view(dtype)
    return tensor.contiguous().numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_as_the_library_dequantizes(case: str, dtype: str) -> None:
    packing, weights = CASES[case]
    compressor, stored, scheme = stored_by_the_library(packing, weights, getattr(torch, dtype))
    group = {"targets": ["Linear"], "weights": weights}
    read = CompressedTensors({"format": packing, "config_groups": {"group_0": group}})
    arrays = {name: as_array(tensor) for name, tensor in stored.items()}
    names = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "float8_e4m3fn": "F8_E4M3",
        "int8": "I8",
        "uint8": "U8",
        "int32": "I32",
        "int64": "I64",
    }
    parts = read.parts("m", SHAPE)
    for name, rule in parts.items():
        if rule.is_required or name in arrays:
            assert arrays[name].shape in rule.shapes
            assert names[str(arrays[name].dtype)] in rule.dtypes
    assert arrays.keys() <= parts.keys()
    found = read.weight("m", arrays, SHAPE).dequantized(dtype)
    expected = as_array(compressor.decompress(stored, scheme)["weight"].to(getattr(torch, dtype)))
    if packing == "nvfp4-pack-quantized":  # the library divides scales in bfloat16, with whatever dtype: NVIDIA's kernels in float32
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=2**-7)
    else:
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
