"""``PackedWeight``: exactly the values of a quantized weight, from positive scales and signed codes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trt_kvcache.builder.network.graph import packed_nibbles
from trt_kvcache.builder.network.packed_weight import PackedWeight
from trt_kvcache.checkpoint.quantized.codes import Codes
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
    zeros = Codes(stored=zeros, kind="uint8" if is_unsigned else "int8", shape=blocks) if zero_points else None
    return QuantizedWeight(
        codes=Codes(stored=stored.view(np.int8) if kind == "int8" else stored, kind=kind, shape=(ROWS, COLUMNS)),
        scales=Scales(stored=scales, block=(1, GROUP)),
        zero_points=zeros,
        group_index=group_index,
    )


def values(packed: PackedWeight) -> Any:
    spread = np.repeat(packed.scales, packed.block, axis=1)
    offsets = 0 if packed.offsets is None else np.repeat(packed.offsets, packed.block, axis=1)
    found = (packed.codes.astype(np.float32) - offsets) * spread
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
    assert packed.codes.dtype == ml_dtypes.int4


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


def test_groups_of_an_order_must_be_of_one_size() -> None:
    index = np.array([0] * 9 + [1] * 7 + [2] * 8, np.int32)
    with pytest.raises(BuildError, match=r"weight `w`: expected 24 inputs in groups of 8, got groups of several sizes"):
        PackedWeight.of("w", [weight("int4", group_index=index)])


def test_a_scale_that_is_not_finite() -> None:
    with pytest.raises(BuildError, match="weight `w`: expected finite scales"):
        PackedWeight.of("w", [weight("int4", scales=np.full((ROWS, 3), np.inf, np.float16))])


def test_the_first_of_two_codes_is_in_the_low_bits() -> None:
    """NvInfer.h, ``DataType::kINT4``: two a byte, the element of lower index in the low bits; negative ones in two's complement."""
    codes = np.array([[1, -8, 7], [-1, 0, 3]], ml_dtypes.int4)
    assert packed_nibbles(codes).tolist() == [0x81, 0xF7, 0x30]
