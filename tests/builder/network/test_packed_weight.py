"""``PackedWeight``: exactly the values of a quantized weight, from positive scales and signed codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache.builder.network import packed_weight
from trt_kvcache.builder.network.graph import packed_nibbles
from trt_kvcache.builder.network.packed_weight import PackedWeight
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import BuildError

RNG = np.random.default_rng(3)

ROWS, COLUMNS, GROUP = 6, 24, 8


def weight(kind: str, *, zero_points: bool = False, group_index: Any = None, scales: Any = None) -> QuantizedWeight:
    is_unsigned = kind.startswith("uint")
    bits = 4 if kind.endswith("4") or kind == "e2m1" else 8
    stored = RNG.integers(0, 256, (ROWS, COLUMNS * bits // 8)).astype(np.uint8)
    if kind == "e4m3":
        stored[(stored & 0x7F) == 0x7F] = 1  # NaN
    blocks = (ROWS, COLUMNS // GROUP)
    if scales is None:
        scales = RNG.normal(size=blocks).astype(np.float16)
    zeros = RNG.integers(0, 1 << bits, blocks).astype(np.uint8)
    zeros = QuantizedValues(stored=zeros, kind="uint8" if is_unsigned else "int8", shape=blocks) if zero_points else None
    return QuantizedWeight(
        quantized_values=QuantizedValues(stored=stored.view(np.int8) if kind == "int8" else stored, kind=kind, shape=(ROWS, COLUMNS)),
        scales=Scales(stored=scales, block=(1, GROUP)),
        zero_points=zeros,
        group_index=group_index,
    )


def values(packed: PackedWeight) -> Any:
    down, across = packed.block
    spread = np.repeat(np.repeat(packed.scales.astype(np.float32), down, axis=0), across, axis=1) * np.float32(packed.scale_factor)
    offsets = 0 if packed.offsets is None else np.repeat(packed.offsets, across, axis=1)
    found = (packed.values.astype(np.float32) - offsets) * spread
    if packed.input_order is not None:
        found = found[:, np.argsort(packed.input_order)]
    return found


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8", "e2m1", "e4m3"])
def test_values_are_exact_with_scales_of_both_signs(kind: str, zero_points: bool) -> None:
    if zero_points and kind in ("e2m1", "e4m3"):
        pytest.skip("floats have no zero points")
    stored = weight(kind, zero_points=zero_points)
    packed = PackedWeight.of("w", [stored])
    assert (packed.scales > 0).all()
    np.testing.assert_array_equal(values(packed), stored.dequantized())


def test_symmetric_codes_with_positive_scales_need_no_offsets() -> None:
    stored = weight("int4", scales=np.full((ROWS, COLUMNS // GROUP), 0.25, np.float16))
    packed = PackedWeight.of("w", [stored])
    assert packed.is_plain
    assert packed.values.dtype == ml_dtypes.int4


def test_a_scale_of_zero() -> None:
    scales = np.array([[0, 0.5, -1]] * ROWS, np.float16)
    stored = weight("uint4", zero_points=True, scales=scales)
    packed = PackedWeight.of("w", [stored])
    assert (packed.scales > 0).all()
    np.testing.assert_array_equal(values(packed), stored.dequantized())


def test_inputs_in_another_order() -> None:
    index = RNG.permutation(np.arange(COLUMNS) // GROUP).astype(np.int32)
    stored = weight("uint4", zero_points=True, group_index=index)
    np.testing.assert_array_equal(values(PackedWeight.of("w", [stored])), stored.dequantized())


def test_rows_of_several_places() -> None:
    stored = weight("int8")
    packed = PackedWeight.of("w", [stored.rows(slice(1, 3)), stored.rows(slice(4, 6))])
    np.testing.assert_array_equal(values(packed), stored.dequantized()[[1, 2, 4, 5]])


@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "e2m1", "e4m3"])
@pytest.mark.parametrize("has_fp4", [False, True])
def test_rows_in_another_order(kind: str, has_fp4: bool) -> None:
    stored = weight(kind, zero_points=kind.startswith("uint"))
    packed = PackedWeight.of("w", [stored.rows([4, 0, 5, 1])], has_fp4=has_fp4)
    np.testing.assert_array_equal(values(packed), stored.dequantized()[[4, 0, 5, 1]])


@pytest.mark.parametrize(("order", "blocks"), [([2, 0, 1, 5, 3, 4], 2), ([3, 4, 5, 0, 2, 1], 2), ([0, 3, 1, 4, 2, 5], 6)])
def test_blocks_of_several_rows_are_kept_if_the_order_keeps_them(order: list[int], blocks: int) -> None:
    scales = np.array([[0.5, 2, 1], [3, 1, 0.25]], np.float32)
    stored = replace(weight("e4m3"), scales=Scales(stored=scales, block=(3, GROUP)))
    packed = PackedWeight.of("w", [stored.rows(order)])
    assert packed.scales.shape == (blocks, 3)
    np.testing.assert_array_equal(values(packed), stored.dequantized()[order])


@pytest.mark.parametrize("kind", ["int4", "uint4", "e4m3"])
def test_groups_of_several_sizes_are_several_blocks(kind: str) -> None:
    index = RNG.permutation([0] * 10 + [1] * 6 + [2] * 8).astype(np.int32)
    stored = weight(kind, zero_points=kind == "uint4", group_index=index)
    packed = PackedWeight.of("w", [stored])
    assert packed.block == (1, 2)
    np.testing.assert_array_equal(values(packed), stored.dequantized())


@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8", "e2m1", "e4m3"])
def test_a_last_block_that_is_smaller(kind: str) -> None:
    stored = weight(kind, zero_points=kind.startswith("uint"))
    stored = replace(stored, scales=replace(stored.scales, block=(1, 9)))
    packed = PackedWeight.of("w", [stored])
    assert packed.block == (1, 3)
    np.testing.assert_array_equal(values(packed), stored.dequantized())


def test_blocks_of_several_rows_whose_last_is_smaller() -> None:
    stored = replace(weight("e4m3"), scales=Scales(stored=np.array([[0.5, 2], [3, 1]], np.float32), block=(3, 16)))
    packed = PackedWeight.of("w", [stored])
    assert packed.block == (3, 8)
    np.testing.assert_array_equal(values(packed), stored.dequantized())


def test_a_scale_that_is_not_finite() -> None:
    with raises(BuildError, "weight `w`", "finite scales"):
        PackedWeight.of("w", [weight("int4", scales=np.full((ROWS, 3), np.inf, np.float16))])


def test_the_first_of_two_codes_is_in_the_low_bits() -> None:
    """NvInfer.h, ``DataType::kINT4``: two a byte, the element of lower index in the low bits; negative ones in two's complement."""
    codes = np.array([[1, -8, 7], [-1, 0, 3]], ml_dtypes.int4)
    assert packed_nibbles(codes).tolist() == [0x81, 0xF7, 0x30]


def fp4(scales: Any, factor: float = 1.0) -> QuantizedWeight:
    stored = weight("e2m1", scales=scales)
    return replace(stored, scales=replace(stored.scales, factor=factor))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu])
def test_native_fp4_keeps_codes_and_scales(dtype: Any) -> None:
    scales = np.array([[0.5, 2, 1]] * ROWS, dtype)
    stored = fp4(scales, factor=0.013)
    packed = PackedWeight.of("w", [stored], has_fp4=True)
    assert (packed.values.dtype.name, packed.scales.dtype, packed.scale_factor) == ("float4_e2m1fn", scales.dtype, 0.013)
    np.testing.assert_array_equal(values(packed), stored.dequantized())


@pytest.mark.parametrize(("scale", "has_fp4"), [(1, False), (0, True), (-1, True)])
def test_fp4_is_int8_otherwise(scale: float, has_fp4: bool) -> None:
    """TensorRT takes positive scales only."""
    stored = fp4(np.array([[0.5, 2, scale]] * ROWS, ml_dtypes.float8_e4m3fn))
    packed = PackedWeight.of("w", [stored], has_fp4=has_fp4)
    assert packed.values.dtype == np.int8
    np.testing.assert_array_equal(values(packed), stored.dequantized())


def test_blocks_of_several_rows_are_kept() -> None:
    stored = replace(weight("e4m3"), scales=Scales(stored=np.full((2, 3), 0.5, np.float32), block=(3, GROUP)))
    assert PackedWeight.of("w", [stored]).scales.shape == (2, 3)
    rows = PackedWeight.of("w", [stored.rows(slice(1, 5))])  # no whole blocks
    assert rows.scales.shape == (4, 3)
    np.testing.assert_array_equal(values(rows), stored.dequantized()[1:5])


@pytest.mark.parametrize("rows_at_a_time", [1, 4, ROWS])
@pytest.mark.parametrize("zero_points", [False, True])
def test_codes_less_offsets_are_int8(monkeypatch: pytest.MonkeyPatch, zero_points: bool, rows_at_a_time: int) -> None:
    monkeypatch.setattr(packed_weight, "_CHUNK", rows_at_a_time * COLUMNS)
    stored = weight("uint4", zero_points=zero_points)
    whole = PackedWeight.of("w", [stored]).with_integer_values()
    assert whole is not None
    assert whole.is_plain
    assert whole.values.dtype == np.int8
    np.testing.assert_array_equal(values(whole), stored.dequantized())


@pytest.mark.parametrize("rows_at_a_time", [1, ROWS])
def test_codes_less_offsets_that_are_no_int8(monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int) -> None:
    monkeypatch.setattr(packed_weight, "_CHUNK", rows_at_a_time * COLUMNS)
    assert PackedWeight.of("w", [weight("uint8", zero_points=True)]).with_integer_values() is None
