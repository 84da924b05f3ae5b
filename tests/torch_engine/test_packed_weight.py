"""Quantized weights of checkpoints as packed matrices: the same values, bit by bit, in as little memory."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tests.helpers import quantized_models as made
from tests.kernels.packed_arrays import FLOAT8
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import HostMemory  # noqa: E402
from trt_kvcache.checkpoint.quantized.awq import AWQ  # noqa: E402
from trt_kvcache.checkpoint.quantized.compressed_tensors import CompressedTensors  # noqa: E402
from trt_kvcache.checkpoint.quantized.fp8_blocks import FP8Blocks  # noqa: E402
from trt_kvcache.checkpoint.quantized.gguf import GGUF  # noqa: E402
from trt_kvcache.checkpoint.quantized.gptq import GPTQ  # noqa: E402
from trt_kvcache.checkpoint.quantized.modelopt import ModelOpt  # noqa: E402
from trt_kvcache.checkpoint.quantized.mxfp4 import MXFP4  # noqa: E402
from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest  # noqa: E402
from trt_kvcache.checkpoint.quantized.weight import Scales  # noqa: E402
from trt_kvcache.dtypes import numpy_dtype  # noqa: E402
from trt_kvcache.kernels.nvfp4_scales import nvfp4_factor, nvfp4_scales  # noqa: E402
from trt_kvcache.torch_engine import packed_weight as packed_weight_module, packing  # noqa: E402
from trt_kvcache.torch_engine.packed_stack import stack_of  # noqa: E402
from trt_kvcache.torch_engine.packed_weight import joined  # noqa: E402
from trt_kvcache.torch_engine.upload import Upload  # noqa: E402

SHAPE = (48, 256)
CPU = torch.device("cpu")


def matrix(shape=SHAPE):
    return (np.random.default_rng(3).standard_normal(shape) * 0.05).astype(np.float32)


def of(quantize, format_, shape=SHAPE):
    stored, _ = quantize(matrix(shape), np.random.default_rng(4))
    return format_.weight("m", stored, shape)


def gguf(bits):
    """Q8_0 or Q4_0: a float16 scale and 32 values after it, for each block."""
    random, blocks = np.random.default_rng(5), SHAPE[1] // 32
    scales = (random.standard_normal((SHAPE[0], blocks, 1)) * 0.01).astype(np.float16).view(np.uint8)
    values = random.integers(0, 256, (SHAPE[0], blocks, 4 * bits)).astype(np.uint8)
    stored = np.concatenate([scales, values], axis=2).reshape(SHAPE[0], -1)
    return GGUF([{4: "Q4_0", 8: "Q8_0"}[bits]]).weight("m", {"weight": stored}, SHAPE)


def gptq(**options):
    bits, group = options.get("bits", 4), options.get("group_size", 32)
    config = {**made.GPTQ_CONFIG, "bits": bits, "group_size": group, "desc_act": options.get("order", False)}
    return of(made.gptq(**{"group_size": group, **options}), GPTQ({**config, "checkpoint_format": "gptq"}))


def compressed_mxfp4():
    return of(made.mxfp4(("weight_packed", "weight_scale"), blocks=False), CompressedTensors(made.CT_MXFP4))


def nvfp4(shape=SHAPE):
    names = ("weight", "weight_scale", "weight_scale_2")
    return of(made.nvfp4(names, inverse=False), ModelOpt(made.modelopt("NVFP4")), shape)


def compressed_nvfp4(shape=SHAPE):
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    return of(made.nvfp4(names, inverse=True), CompressedTensors(made.CT_NVFP4), shape)


def with_scales(weight, **changes):
    return replace(weight, scales=replace(weight.scales, **changes))


def compressed(bits, group_size, config, **options):
    config = config if group_size is None else made.in_groups_of(group_size, config)
    return of(made.integers(bits, group_size, **options), CompressedTensors(config))


def modelopt(*, factors):
    format_ = ModelOpt(made.modelopt("W4A16_AWQ", group_size=128))
    stored, _ = made.modelopt_int4(128, factors=factors)(matrix(), np.random.default_rng(4))
    if not factors:
        del stored["pre_quant_scale"]
    return format_.weight("m", stored, SHAPE)


def fp8(block, shape=SHAPE):
    return of(made.fp8_blocks(block=block), FP8Blocks({**made.FP8_CONFIG, "weight_block_size": list(block)}), shape)


def fp8_channels():
    return of(made.floats(1, None), CompressedTensors(made.CT_FP8))


def fp8_matrix():
    return of(made.floats(None, None, scalar=True), ModelOpt(made.modelopt("FP8")))


#: A weight, its packed kind, and True if zero points are stored.
PACKED = {
    "gptq": (lambda: gptq(), "int4", True),
    "gptq in groups of 128": (lambda: gptq(group_size=128), "int4", True),
    "gptq, symmetric": (lambda: gptq(symmetric=True), "int4", False),
    "gptq, 8 bits": (lambda: gptq(bits=8, group_size=64), "int8", True),
    "gptq, 8 bits, symmetric": (lambda: gptq(bits=8, symmetric=True), "int8", False),
    "awq": (lambda: of(made.awq(group_size=128), AWQ({**made.AWQ_CONFIG, "group_size": 128})), "int4", True),
    "awq, one group": (lambda: of(made.awq(group_size=256), AWQ({**made.AWQ_CONFIG, "group_size": -1})), "int4", True),
    "compressed int4": (lambda: compressed(4, 32, made.CT_INT4, packed=True, symmetric=True), "int4", False),
    "compressed int4, zero points": (lambda: compressed(4, 128, made.CT_ASYMMETRIC, packed=True, symmetric=False), "int4", True),
    "compressed int8": (lambda: compressed(8, None, made.CT_INT8, packed=False, symmetric=True), "int8", False),
    "compressed int8, zero points": (lambda: compressed(8, None, made.CT_INT8_ASYMMETRIC, packed=False, symmetric=False), "int8", True),
    "compressed packed int8": (lambda: compressed(8, None, made.CT_PACKED_INT8, packed=True, symmetric=True), "int8", False),
    "modelopt": (lambda: modelopt(factors=False), "int4", False),
    "Q4_0": (lambda: gguf(4), "int4", False),
    "Q8_0": (lambda: gguf(8), "int8", False),
    "mxfp4": (lambda: of(made.mxfp4(("weight_blocks", "weight_scales"), blocks=True), MXFP4({})), "e2m1", False),
    "compressed mxfp4": (compressed_mxfp4, "e2m1", False),
    "nvfp4": (lambda: nvfp4(), "e2m1", False),
    "compressed nvfp4": (lambda: compressed_nvfp4(), "e2m1", False),
    "FP8, blocks": (lambda: fp8((16, 64)), "e4m3", False),
    "FP8, blocks of 128": (lambda: fp8((128, 128)), "e4m3", False),
    "FP8, one scale an output": (fp8_channels, "e4m3", False),
    "FP8, one scale a matrix": (fp8_matrix, "e4m3", False),
    "rounded int8": (lambda: rounded_to_nearest(matrix(), "int8", "bfloat16"), "int8", False),
    "rounded int4": (lambda: rounded_to_nearest(matrix(), "int4", "bfloat16"), "int4", False),
    "rounded int4:128": (lambda: rounded_to_nearest(matrix(), "int4:128", "float16"), "int4", False),
    "gptq, act-order": (lambda: gptq(order=True), "int4", True),
    "gptq in groups of 64, act-order": (lambda: gptq(group_size=64, order=True), "int4", True),
    "gptq, 8 bits, act-order": (lambda: gptq(bits=8, group_size=64, order=True), "int8", True),
    "compressed int4, act-order": (lambda: compressed(4, 64, made.CT_ORDER, packed=True, symmetric=True, order=True), "int4", False),
    "act-order whose last group ends early": (
        lambda: of(
            made.gptq(group_size=128, order=True), GPTQ({**made.GPTQ_CONFIG, "group_size": 128, "checkpoint_format": "gptq"}), (48, 200)
        ),
        "int4",
        True,
    ),
    "groups that end early": (lambda: rounded_to_nearest(matrix((40, 200)), "int4:128", "float32"), "int4", False),
}


def packed_parts(parts, dtype):
    return packing.packed_weight(parts, dtype, Upload(CPU), HostMemory())


def packed_weight(weight, dtype):
    packed = packed_parts([weight], dtype)
    assert packed is not None
    return packed


def bits_of(array):
    """Bits of 16-bit values. Zeros of both signs are one."""
    return np.where(array == 0, np.uint16(0), array.view(np.uint16))


def check_values(packed, expected):
    found = packed.dequantized()
    assert found.dtype == packed.dtype
    np.testing.assert_array_equal(bits_of(found.view(torch.int16).numpy().view(expected.dtype)), bits_of(expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", PACKED)
def test_values_are_those_of_the_checkpoint(case, dtype):
    make, kind, has_zero_points = PACKED[case]
    weight = make()
    packed = packed_weight(weight, dtype)
    assert (packed.kind, packed.zero_points is not None) == (kind, has_zero_points)
    check_values(packed, weight.dequantized(dtype))


@pytest.mark.parametrize("case", [case for case in PACKED if "early" not in case])
def test_size_is_within_three_percent_of_the_stored_size(case):
    make, kind, has_zero_points = PACKED[case]
    weight = make()
    packed = packed_weight(weight, "float16" if weight.scales.stored.dtype == np.float16 else "bfloat16")
    size = {"int4": 0.5, "int8": 1, "e2m1": 0.5, "e4m3": 1}[kind]
    scales = weight.scales.stored
    stored = weight.shape[0] * weight.shape[1] * size + scales.nbytes + (scales.size * size if has_zero_points else 0)
    order = 0 if weight.group_index is None else weight.group_index.nbytes  # 0.2 % of a matrix of 4096 outputs
    assert packed.nbytes <= 1.03 * stored + order


NOT_PACKED = {
    "groups of several sizes": lambda: replace(gptq(), group_index=np.arange(SHAPE[1], dtype=np.int32) // 32 // 2),
    "groups of 8": lambda: gptq(group_size=8),
    "groups of 96": lambda: of(made.gptq(group_size=96), GPTQ({**made.GPTQ_CONFIG, "group_size": 96, "checkpoint_format": "gptq"})),
    "factors of inputs": lambda: modelopt(factors=True),
    "NVFP4 with factors of inputs": lambda: replace(nvfp4(), input_factor=np.full(SHAPE[1], 1.5, np.float32)),
    "NVFP4 in groups of 32": lambda: with_scales(nvfp4(), block=(1, 32), stored=nvfp4().scales.stored[:, ::2]),
    "NVFP4 with a scale near the limit": lambda: with_scales(nvfp4(), factor=float(np.float32(3.95 / 448))),
    "NVFP4 with a factor near the smallest float32": lambda: with_scales(nvfp4(), factor=1e-38),
    "NVFP4 with a factor and a divisor": lambda: with_scales(nvfp4(), factor=0.3, divisor=7.0),
    "FP8, blocks of 12 inputs": lambda: of(made.fp8_blocks(), FP8Blocks(made.FP8_CONFIG)),
    "FP8, blocks of 96 inputs": lambda: fp8((128, 96)),
    "inputs that 8 does not divide": lambda: rounded_to_nearest(matrix((16, 36)), "int8", "float16"),
}


#: Weights that no dtype can hold, or of which some are not numbers.
NOT_FINITE = {
    "NVFP4 with a scale that is NaN": lambda: with_scales(nvfp4(), stored=np.full((48, 16), np.nan, ml_dtypes.float8_e4m3fn)),
    "NVFP4 with a factor near the largest float32": lambda: with_scales(nvfp4(), factor=3e38),
}


@pytest.mark.parametrize("case", NOT_PACKED | NOT_FINITE)
def test_other_formats_are_not_packed(case):
    assert packed_parts([(NOT_PACKED | NOT_FINITE)[case]()], "float16") is None


def test_scales_of_fp4_that_are_no_powers_of_two_are_not_packed():
    weight = PACKED["mxfp4"][0]()
    scales = replace(weight.scales, stored=weight.scales.stored.astype(np.float32) * 1.5)
    assert packed_parts([replace(weight, scales=scales)], "bfloat16") is None


def test_scales_of_fp4_that_the_dtype_cannot_hold_are_not_packed():
    weight = PACKED["mxfp4"][0]()
    largest = replace(weight, scales=replace(weight.scales, stored=np.full((48, 8), 254, np.uint8).view(ml_dtypes.float8_e8m0fnu)))
    assert packed_parts([largest], "bfloat16") is None
    many = replace(weight, scales=replace(weight.scales, stored=np.full((48, 8), 127 + 14, np.uint8).view(ml_dtypes.float8_e8m0fnu)))
    assert packed_parts([many], "float16") is None
    check_values(packed_weight(many, "bfloat16"), many.dequantized("bfloat16"))


def test_values_that_the_dtype_cannot_hold_are_not_packed():
    weight = rounded_to_nearest(matrix() * 2e6, "int8", "float32")
    assert packed_parts([weight], "float16") is None
    check_values(packed_weight(weight, "bfloat16"), weight.dequantized("bfloat16"))


def test_values_that_the_dtype_cannot_hold_because_of_a_zero_point_are_not_packed():
    """Values of 8 bits reach 128 from a zero point in the middle, and 255 from one at an end."""
    weight = gptq(bits=8, group_size=64)
    large = replace(weight, scales=replace(weight.scales, stored=np.full(weight.scales.stored.shape, 300, np.float16)))
    zeros = replace(weight.zero_points, added=0, stored=np.zeros_like(weight.zero_points.stored))
    assert packed_parts([replace(large, zero_points=zeros)], "float16") is None
    middle = replace(zeros, stored=np.full_like(zeros.stored, 0x80808080 - (1 << 32)))
    assert packed_weight(replace(large, zero_points=middle), "float16").zero_points is None
    check_values(packed_weight(replace(large, zero_points=zeros), "bfloat16"), replace(large, zero_points=zeros).dequantized("bfloat16"))


@pytest.mark.parametrize("bits", [4, 8])
def test_unsigned_values_without_zero_points(bits):
    weight = replace(gptq(bits=bits, group_size=64), zero_points=None)
    packed = packed_weight(weight, "bfloat16")
    assert packed.zero_points is not None
    check_values(packed, weight.dequantized("bfloat16"))


def test_a_scale_that_is_not_finite_is_not_packed():
    weight = rounded_to_nearest(matrix(), "int8", "float16")
    weight.scales.stored[3, 0] = np.nan
    assert packed_parts([weight], "float16") is None


@pytest.mark.parametrize(
    ("scales", "dtype", "stored"),
    [
        ("bfloat16", "bfloat16", torch.bfloat16),
        ("float16", "float16", torch.float16),
        ("float16", "bfloat16", torch.float16),
        ("bfloat16", "float16", torch.float16),  # none of these is too small
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_scales_are_stored_exactly(scales, dtype, stored):
    weight = rounded_to_nearest(matrix(), "int4", scales)
    packed = packed_weight(weight, dtype)
    assert packed.scales.dtype == stored
    check_values(packed, weight.dequantized(dtype))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_scales_of_fp8_keep_their_dtype(stored):
    """Also such as a narrower dtype holds by chance: weights of the same input are then joined."""
    weight = fp8((128, 128))
    exact = replace(weight.scales, stored=np.full(weight.scales.stored.shape, 0.25, numpy_dtype(stored)))
    assert packed_weight(replace(weight, scales=exact), "bfloat16").scales.dtype == getattr(torch, stored)
    assert packed_weight(replace(weight, scales=replace(exact, factor=2.0)), "bfloat16").scales.dtype == torch.float32


def test_scales_too_small_for_float16_stay_in_float32():
    weight = rounded_to_nearest(matrix() * 1e-5, "int8", "bfloat16")
    packed = packed_weight(weight, "float16")
    assert packed.scales.dtype == torch.float32
    check_values(packed, weight.dequantized("float16"))


@pytest.mark.parametrize("shape", [(128, 128), (200, 328), (8, 72), (40, 1000)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp8_blocks_of_128_that_end_early(shape, dtype):
    weight = fp8((128, 128), shape)
    packed = packed_weight(weight, dtype)
    assert packed.scales.shape == (-(-shape[0] // 16), -(-shape[1] // 128), 1, 2), "the outputs of a tile share them"
    check_values(packed, weight.dequantized(dtype))
    check_values(packed_weight(weight.rows(slice(8, None)), dtype) if shape[0] > 8 else packed, weight.dequantized(dtype)[8 % shape[0] :])


def test_fp8_blocks_that_begin_within_a_tile_have_scales_of_rows():
    weight = fp8((24, 64))
    packed = packed_weight(weight, "bfloat16")
    assert packed.scales.shape == (3, 4, 8, 2)
    check_values(packed, weight.dequantized("bfloat16"))


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (47, 255), (20, 100)])
def test_fp8_with_nan_is_not_packed(monkeypatch, bits, place):
    monkeypatch.setattr(packing, "ON_DEVICE", 16 * SHAPE[1])
    weight = fp8((128, 128))
    weight.quantized_values.stored.view(np.uint8)[place] = bits
    assert packed_parts([weight], "bfloat16") is None


def test_every_number_of_fp8_is_packed():
    weight = fp8((128, 128))
    numbers = [bits for bits in range(256) if bits & 0x7F != 0x7F]
    weight.quantized_values.stored.view(np.uint8)[...] = np.resize(numbers, SHAPE)
    for dtype in ("float16", "bfloat16"):
        check_values(packed_weight(weight, dtype), weight.dequantized(dtype))


def test_fp8_that_the_dtype_cannot_hold_is_not_packed():
    weight = fp8((128, 128))
    large = replace(weight, scales=replace(weight.scales, factor=2e6))
    assert packed_parts([large], "float16") is None
    check_values(packed_weight(large, "bfloat16"), large.dequantized("bfloat16"))


@pytest.mark.parametrize("case", ["gptq", "Q8_0", "rounded int4", "awq", "FP8, blocks"])
def test_rows_of_a_fused_tensor(case):
    weight = PACKED[case][0]()
    parts = [slice(8, 24), slice(32, 48)]
    expected = np.concatenate([weight.dequantized("float16")[some] for some in parts])
    check_values(packed_parts([weight.rows(some) for some in parts], "float16"), expected)


@pytest.mark.parametrize("case", ["gptq", "Q8_0", "rounded int4", "awq", "FP8, blocks"])
def test_rows_in_another_order(case):
    weight, order = PACKED[case][0](), [17, 3, 40, 41, 2, 0, 39, 18, 1]
    check_values(packed_weight(weight.rows(order), "float16"), weight.dequantized("float16")[order])


class TestJoined:
    def weights(self, *rounded):
        return [packed_weight(one, "bfloat16") for one in rounded]

    def test_outputs_follow_each_other(self):
        whole = rounded_to_nearest(matrix(), "int4", "bfloat16")
        parts = self.weights(whole.rows(slice(0, 16)), whole.rows(slice(16, 48)))
        check_values(joined(parts), whole.dequantized("bfloat16"))

    def test_some_have_zero_points(self):
        both = [gptq(), gptq(symmetric=True)]
        check_values(joined(self.weights(*both)), np.concatenate([one.dequantized("bfloat16") for one in both]))
        both = [gptq(bits=8), gptq(bits=8, symmetric=True)]
        check_values(joined(self.weights(*both)), np.concatenate([one.dequantized("bfloat16") for one in both]))

    def test_some_have_scales_of_rows(self):
        whole = fp8((24, 64))
        parts = self.weights(whole.rows(slice(0, 16)), whole.rows(slice(16, 48)))
        assert [part.scales.shape[2] for part in parts] == [1, 8]
        check_values(joined(parts), whole.dequantized("bfloat16"))

    @pytest.mark.parametrize(
        "other",
        [
            lambda: rounded_to_nearest(matrix(), "int8", "bfloat16"),
            lambda: rounded_to_nearest(matrix(), "int4:128", "bfloat16"),
            lambda: rounded_to_nearest(matrix(), "int4", "float32"),
            lambda: rounded_to_nearest(matrix((24, 256)), "int4", "bfloat16"),
        ],
        ids=["bits", "groups", "scales", "outputs of no whole tile"],
    )
    def test_others_are_not_joined(self, other):
        assert joined(self.weights(rounded_to_nearest(matrix(), "int4", "bfloat16"), other())) is None


class TestNvfp4:
    @pytest.mark.parametrize("make", [nvfp4, compressed_nvfp4])
    @pytest.mark.parametrize("shape", [(16, 64), (40, 1072), (3, 16)], ids=str)
    def test_values_of_shapes_that_end_early(self, make, shape):
        weight = make(shape)
        check_values(packed_weight(weight, "bfloat16"), weight.dequantized("bfloat16"))
        check_values(packed_weight(weight, "float16"), weight.dequantized("float16"))

    def test_every_scale_with_divisors(self):
        """The sum of two floats multiplies scales as a division divides them."""
        random, refused = np.random.default_rng(0), 0
        every = FLOAT8[: len(FLOAT8) // 2]
        for divisor in random.uniform(2, 4000, 500).astype(np.float32).tolist():
            scales = Scales(stored=every[None], block=(1, 16), divisor=divisor)
            factor = nvfp4_factor(scales.factor, scales.divisor, "bfloat16")
            refused += factor is None
            if factor is not None:
                np.testing.assert_array_equal(nvfp4_scales(every, factor), scales.values()[0])
        assert refused == 0

    def test_weights_of_one_factor_are_joined(self):
        whole = compressed_nvfp4()
        parts = [packed_weight(whole.rows(slice(*rows)), "bfloat16") for rows in ((0, 16), (16, 48))]
        check_values(joined(parts), whole.dequantized("bfloat16"))
        other = with_scales(nvfp4(), factor=nvfp4().scales.factor * 1.5)
        assert joined([packed_weight(nvfp4(), "bfloat16"), packed_weight(other, "bfloat16")]) is None

    def test_a_scale_is_as_large_as_the_dtype_allows(self):
        """Values outside the range of float16 are dequantized."""
        large = with_scales(nvfp4(), factor=float(np.float32(3.85 / 448)))
        check_values(packed_weight(large, "float16"), large.dequantized("float16"))


class TestActOrder:
    def test_groups_are_contiguous_in_the_order_of_the_kernels(self):
        weight = gptq(order=True)
        packed = packed_weight(weight, "float16")
        order = packed.order.numpy()
        assert order.dtype == np.int32
        np.testing.assert_array_equal(weight.group_index[order], np.arange(SHAPE[1]) // 32)
        assert all(np.diff(order[first : first + 32]).min() > 0 for first in range(0, SHAPE[1], 32)), "stable"
        columns = replace(packed, order=None).dequantized()
        np.testing.assert_array_equal(columns.numpy(), weight.dequantized("float16")[:, order])

    def test_weights_of_one_order_are_joined(self):
        whole = gptq(order=True)
        parts = [packed_weight(whole.rows(slice(*rows)), "bfloat16") for rows in ((0, 16), (16, 48))]
        found = joined(parts)
        assert torch.equal(found.order, parts[0].order)
        check_values(found, whole.dequantized("bfloat16"))

    def test_weights_of_several_orders_are_not_joined(self):
        one = packed_weight(gptq(order=True), "bfloat16")
        assert joined([one, packed_weight(gptq(), "bfloat16")]) is None
        assert joined([packed_weight(gptq(), "bfloat16"), one]) is None
        assert joined([one, replace(one, order=one.order.flip(0))]) is None

    @pytest.mark.parametrize("case", PACKED)
    def test_outputs_in_another_order(self, monkeypatch, case):
        monkeypatch.setattr(packed_weight_module, "ON_DEVICE", 48 * 64)
        weight = PACKED[case][0]()
        packed, order = packed_weight(weight, "bfloat16"), np.random.default_rng(0).permutation(weight.shape[0])
        check_values(packed.with_outputs(torch.from_numpy(order)), weight.dequantized("bfloat16")[order])


class TestStack:
    def check(self, matrices, found):
        assert len(found) == len(matrices)
        assert found.shape == (len(matrices), *matrices[0].shape)
        assert found.whole.nbytes == sum(one.nbytes for one in found)
        for one, expected in zip(found, matrices, strict=True):
            check_values(one, expected)

    @pytest.mark.parametrize("case", ["mxfp4", "gptq", "rounded int8", "Q4_0", "FP8, blocks"])
    def test_matrices_follow_each_other(self, case):
        weight = PACKED[case][0]()
        rows = [weight.rows(slice(first, first + 16)) for first in (0, 16, 32)]
        self.check([one.dequantized("bfloat16") for one in rows], stack_of([packed_weight(one, "bfloat16") for one in rows], 3))

    def test_a_matrix_has_several_parts(self):
        weight = PACKED["mxfp4"][0]()
        order = [slice(32, 48), slice(0, 16), slice(16, 32), slice(32, 48)]
        values = [weight.rows(rows).dequantized("float16") for rows in order]
        stack = stack_of([packed_weight(weight.rows(rows), "float16") for rows in order], 2)
        self.check([np.concatenate(values[:2]), np.concatenate(values[2:])], stack)

    @pytest.mark.parametrize(("make", "name"), [(nvfp4, "factor"), (compressed_nvfp4, "divisor")])
    def test_each_matrix_in_nvfp4_has_its_factor(self, make, name):
        weight = make()
        number = getattr(weight.scales, name)
        changed = [with_scales(weight, **{name: float(np.float32(number * by))}) for by in (1, 0.75, 1.3, 0.55)]
        parts = [one.rows(slice(first, first + 16)) for one, first in zip(changed, (0, 16, 32, 0), strict=True)]
        values, packed = [one.dequantized("bfloat16") for one in parts], [packed_weight(one, "bfloat16") for one in parts]
        self.check(values, stack_of(packed, 4))
        self.check([np.concatenate(values[:2]), np.concatenate(values[2:])], stack_of(packed, 2))

    def test_scales_of_one_matrix_need_float32(self):
        both = [rounded_to_nearest(matrix() * factor, "int8", "bfloat16") for factor in (1, 1e-5)]
        parts = [packed_weight(one, "float16") for one in both]
        assert parts[0].scales.dtype != parts[1].scales.dtype
        self.check([one.dequantized("float16") for one in both], stack_of(parts, 2))

    def test_one_matrix_has_zero_points(self):
        both = [gptq(), gptq(symmetric=True)]
        self.check([one.dequantized("bfloat16") for one in both], stack_of([packed_weight(one, "bfloat16") for one in both], 2))

    def test_outputs_of_no_whole_tile(self):
        weight = PACKED["mxfp4"][0]()
        assert stack_of([packed_weight(weight.rows(slice(first, first + 8)), "bfloat16") for first in (0, 8)], 2) is None


def test_many_rows_are_packed_in_parts(monkeypatch):
    weight = rounded_to_nearest(matrix((88, 256)), "int4", "float16")
    expected = packed_weight(weight, "float16").values
    monkeypatch.setattr(packing, "ON_DEVICE", 40 * 256)
    assert torch.equal(packed_weight(weight, "float16").values, expected)


class TestRoundedOnTheDevice:
    def check(self, values, scheme, dtype, scales, device=CPU):
        """The weight is that of ``rounded_to_nearest``, bit by bit."""
        found = packing.rounded_weight(values, scheme, scales, dtype, Upload(device), HostMemory())
        expected = packed_weight(rounded_to_nearest(values, scheme, scales), dtype)
        assert (found.kind, found.group_shift, found.outputs, found.inputs) == (
            *(expected.kind, expected.group_shift, expected.outputs, expected.inputs),
        )
        assert torch.equal(found.values.cpu(), expected.values)
        assert found.scales.dtype == expected.scales.dtype
        assert torch.equal(found.scales.cpu(), expected.scales)
        assert found.zero_points is None
        assert expected.zero_points is None

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("scheme", ["int8", "int4", "int4:128"])
    @pytest.mark.parametrize("shape", [(48, 256), (40, 200), (3, 8)])
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
    def test_weights_are_those_of_the_host(self, monkeypatch, device, scheme, shape, dtype):
        monkeypatch.setattr(packing, "ON_DEVICE", 17 * shape[1])
        for seed in range(5):
            values = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
            values[0] = 0
            self.check(values.astype(numpy_dtype(dtype)), scheme, dtype, dtype, torch.device(device))
            self.check(values, scheme, dtype, "float32", torch.device(device))

    def test_ties(self):
        """Groups for which several divisors have the same error, and values halfway between two integers."""
        values = np.random.default_rng(0).integers(-16, 17, (64, 256)).astype(np.float32) / 2
        for scheme in ("int8", "int4"):
            self.check(values.astype(np.float16), scheme, "float16", "float16")

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
    def test_errors_that_differ_in_their_last_bits(self, device):
        """The order of the sums decides between two divisors of this group."""
        bits = "35a4412440a4cb0e1fa8d5223622d2a09d24741e4528fc9b081c6624c81e832a" + (
            "8ba594a7aca19e21a125b026c6211ca12f212f269717901872a12b1f13a2f6a5"
        )
        group = np.frombuffer(bytes.fromhex(bits), np.float16)
        self.check(np.tile(group, (16, 2)), "int4", "float16", "float16", torch.device(device))

    @pytest.mark.parametrize("extreme", [6e-8, 6e4, np.inf, np.nan])
    def test_a_group_near_an_end_of_the_dtype_is_left_to_the_host(self, extreme):
        values = np.random.default_rng(0).normal(size=(48, 256)).astype(np.float16)
        values[17, 32:64] = 0
        values[17, 40] = extreme
        assert packing.rounded_weight(values, "int4", "float16", "float16", Upload(CPU), HostMemory()) is None

    def test_what_the_kernels_do_not_know_is_left_to_the_host(self):
        values = np.random.default_rng(0).normal(size=(16, 36)).astype(np.float16)
        assert packing.rounded_weight(values, "int8", "float16", "float16", Upload(CPU), HostMemory()) is None
        large = np.full((16, 64), 1e5, np.float32)
        assert packing.rounded_weight(large, "int8", "float32", "float16", Upload(CPU), HostMemory()) is None
