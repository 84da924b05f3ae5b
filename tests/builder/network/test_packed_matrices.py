"""Quantized weights of experts as bytes of an operation: exactly the dequantized values, for each format that the kernels know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trt_kvcache import HostMemory
from trt_kvcache.builder.network.packed_matrices import PackedMatrices
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.super_blocks import SUPER_BLOCK_NBYTES, SuperBlocks, factors_of
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.packed_layout import ONE_GROUP

#: Outputs of a matrix and inputs, of which the last ones fill no fragment.
ROWS, COLUMNS = 32, 136


def weight(
    kind: str,
    *,
    width: int = 32,
    height: int = 1,
    zero_points: bool = False,
    scales_dtype: str = "float16",
    factor: Sequence[str] = (),
    seed: int = 0,
) -> QuantizedWeight:
    """``factor``: the factor of scales that is not 1, of NVFP4."""
    random, bits = np.random.default_rng(seed), 4 if kind.endswith("4") or kind == "e2m1" else 8
    stored = random.integers(0, 256, (ROWS, COLUMNS * bits // 8)).astype(np.uint8)
    if kind == "e4m3":
        stored[(stored & 0x7F) == 0x7F] = 1  # NaN
    blocks = (ROWS // height, -(-COLUMNS // width))
    if scales_dtype == "float8_e8m0fnu":
        scales: Any = random.integers(118, 130, blocks).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    else:
        scales = (random.uniform(0.5, 1, blocks) * random.choice([-1, 1], blocks)).astype(numpy_dtype(scales_dtype))
    factors = {one: float(np.float32(random.uniform(0.001, 0.01) if one == "factor" else random.uniform(200, 2000))) for one in factor}
    zeros = random.integers(0, 1 << bits, blocks).astype(np.uint8)
    return QuantizedWeight(
        quantized_values=QuantizedValues(stored=stored.view(np.int8) if kind == "int8" else stored, kind=kind, shape=(ROWS, COLUMNS)),
        scales=Scales(stored=scales, block=(height, width), **factors),
        zero_points=QuantizedValues(stored=zeros, kind="uint8", shape=blocks) if zero_points else None,
    )


def made(*parts: QuantizedWeight | SuperBlocks, dtype: str = "bfloat16") -> PackedMatrices:
    packed = PackedMatrices.of(parts, dtype)
    assert packed is not None
    return packed


def values(packed: PackedMatrices, count: int, dtype: str = "bfloat16", *, rows: int = ROWS, columns: int = COLUMNS) -> list[Any]:
    """Return the matrices that the kernels read, from inputs as the format describes them, at an offset in their memory."""
    memory = HostMemory()
    stream = memory.create_stream()
    types = packed.format.input_types(count, rows, columns)
    assert [(name, one.shape) for name, one in packed.arrays.items()] == [(name, one.shape) for name, one in types.items()]
    before = np.full(64, -1, np.int32)
    tensors = [memory.to_device(np.concatenate([before, packed.arrays[name]]), stream=stream)[len(before) :] for name in types]
    stack = packed.format.tensors(tensors, count, rows, columns)
    return [stack.on_host(numpy_dtype(dtype), matrix) for matrix in range(count)]


CASES: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4"},
    "AWQ": {"kind": "uint4", "width": 128, "zero_points": True},
    "int8": {"kind": "int8", "width": COLUMNS, "scales_dtype": "float32"},
    "uint8": {"kind": "uint8", "width": 64, "zero_points": True},
    "MXFP4": {"kind": "e2m1", "scales_dtype": "float8_e8m0fnu"},
    "NVFP4, ModelOpt": {"kind": "e2m1", "width": 16, "scales_dtype": "float8_e4m3fn", "factor": ["factor"]},
    "NVFP4, compressed-tensors": {"kind": "e2m1", "width": 16, "scales_dtype": "float8_e4m3fn", "factor": ["divisor"]},
    "FP8": {"kind": "e4m3", "width": COLUMNS},
    "FP8, blocks": {"kind": "e4m3", "width": 128, "height": 16, "scales_dtype": "float32"},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_they_are_the_dequantized_weights(case: dict[str, Any], dtype: str) -> None:
    parts = [weight(**case, seed=seed) for seed in range(3)]
    for found, part in zip(values(made(*parts, dtype=dtype), 3, dtype), parts, strict=True):
        assert found.tobytes() == part.dequantized(dtype).tobytes()


def test_outputs_of_a_tile_share_the_scales_of_blocks() -> None:
    assert made(weight(**CASES["FP8, blocks"])).format.shared_scales
    assert not made(weight("e4m3", width=128)).format.shared_scales


def test_a_part_without_zero_points_gets_those_in_the_middle() -> None:
    parts = [weight("uint4", zero_points=True), replace(weight("int4"), zero_points=None)]
    for found, part in zip(values(made(*parts), 2), parts, strict=True):
        assert found.tobytes() == part.dequantized("bfloat16").tobytes()


def test_scales_of_several_dtypes_become_float32() -> None:
    parts = [weight("int8", width=COLUMNS), weight("int8", width=COLUMNS, scales_dtype="float32")]
    packed = made(*parts)
    assert (packed.format.scales_dtype, packed.format.group_shift) == ("float32", ONE_GROUP)
    assert values(packed, 2)[0].tobytes() == parts[0].dequantized("bfloat16").tobytes()


def nan_values() -> QuantizedValues:
    return QuantizedValues(stored=np.full((ROWS, COLUMNS), 0x7F, np.uint8), kind="e4m3", shape=(ROWS, COLUMNS))


def with_scales(scale: float, factor: float, divisor: float = 1.0) -> QuantizedWeight:
    """A matrix in NVFP4 with equal scales."""
    part = weight(**CASES["NVFP4, ModelOpt"])
    stored = np.full_like(part.scales.stored, scale)
    return replace(part, scales=replace(part.scales, stored=stored, factor=float(np.float32(factor)), divisor=divisor))


def super_blocks(kind: str, *, rows: int = ROWS, factor: float = 1.0) -> SuperBlocks:
    stored = np.zeros((rows, SUPER_BLOCK_NBYTES[kind]), np.uint8)
    factors_of(stored[:, None], kind)[..., :2] = np.array([factor], np.float16).view(np.uint8)
    return SuperBlocks(kind=kind, stored=stored)


#: Formats that the kernels of experts do not know, or that do not fit together.
REFUSED: dict[str, Any] = {
    "groups of 48": lambda: [weight("int4", width=48)],
    "NVFP4 in groups of 32": lambda: [weight("e2m1", scales_dtype="float8_e4m3fn", factor=["factor"])],
    "NVFP4 with a large scale": lambda: [weight(**CASES["NVFP4, ModelOpt"]), with_scales(448.0, 0.01)],
    "NVFP4 with a factor and a divisor": lambda: [with_scales(1.0, 0.3, 7.0)],
    "act-order": lambda: [replace(weight("int4"), group_index=np.arange(COLUMNS, dtype=np.int32)[::-1] // 32)],
    "factors": lambda: [replace(weight("int4"), input_factor=np.ones(COLUMNS, np.float32))],
    "kinds": lambda: [weight("int4"), weight("int8")],
    "super-blocks beside others": lambda: [super_blocks("Q4_K"), weight("int4")],
    "kinds of super-blocks": lambda: [super_blocks("Q4_K"), super_blocks("Q6_K")],
    "super-blocks of no whole tiles": lambda: [super_blocks("Q4_K", rows=24), super_blocks("Q4_K")],
    "super-blocks that float16 cannot hold": lambda: [super_blocks("Q6_K", factor=16.0)],
    "super-blocks without a number": lambda: [super_blocks("Q4_K", factor=np.nan)],
    "groups": lambda: [weight("int4"), weight("int4", width=64)],
    "no whole tiles": lambda: [weight("int4").rows(slice(0, 24)), weight("int4")],
    "NaN": lambda: [replace(weight("e4m3"), quantized_values=nan_values())],
    "overflow": lambda: [replace(weight("int8"), scales=Scales(stored=np.full((ROWS, 1), 600.0, np.float32), block=(1, COLUMNS)))],
}


@pytest.mark.parametrize("parts", REFUSED.values(), ids=REFUSED)
def test_other_formats_are_left_to_16_bits(parts: Any) -> None:
    assert PackedMatrices.of(parts(), "float16") is None


def test_float32_stays_dense() -> None:
    assert PackedMatrices.of([weight("int4")], "float32") is None
