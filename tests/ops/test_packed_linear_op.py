"""``PackedLinearOp``: a product with a packed matrix, on the host, the emulated device and a GPU."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.kernels.packed_arrays import FLOAT8, pack_rows, pack_values
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.kernels.nvfp4_scales import kernel_factors_of, nvfp4_scales
from trt_kvcache.kernels.packed_layout import NVFP4_GROUPS, count_groups, count_tiles
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.ops.packed_format import PackedFormat
from trt_kvcache.ops.packed_linear_op import PackedLinearOp
from trt_kvcache.ops.registry import create_operation

#: int4 with zero points, in groups of 32 inputs; outputs of no whole tile.
PACKED = PackedFormat(kind=1, group_shift=0, scales=0, zero_points=1)
OUTPUTS, INPUTS = 41, 136

NVFP4 = PackedFormat(kind=3, group_shift=NVFP4_GROUPS, scales=4)


def make_op() -> PackedLinearOp:
    return PackedLinearOp(outputs=OUTPUTS, **PACKED.attributes("weight"))


@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (3, 11), (0, 4)])
def test_the_result_is_the_product_with_the_dequantized_matrix(memory: Any, stream: Any, batch: int, tokens: int) -> None:
    """Of one launch, and of several with a rest."""
    random, groups = np.random.default_rng(tokens), count_groups(INPUTS, 0)
    values, zeros = (random.integers(0, 16, (OUTPUTS, width)).astype(np.uint8) for width in (INPUTS, groups))
    scales = random.uniform(0.01, 0.03, (OUTPUTS, groups)).astype(np.float16)
    rows = random.standard_normal((batch, tokens, INPUTS)).astype(np.float16)
    group = np.arange(INPUTS) // 32
    weight = ((values - zeros[:, group].astype(np.float32)) * scales[:, group]).astype(np.float16).astype(np.float32)
    packed = pack_values(values, "int4"), pack_rows(scales, groups), pack_rows(zeros, groups)
    arrays = [rows, *(one.reshape(-1).view(np.int32) for one in packed)]
    op, types = make_op(), [TensorType(one.shape, one.dtype.name) for one in arrays]
    (output,) = op.outputs(types)
    assert (output, op.workspace_nbytes(types)) == (TensorType((batch, tokens, OUTPUTS), "float16"), 0)
    tensors = [memory.to_device(one, stream=stream) for one in arrays]
    out = memory.to_device(np.full(output.shape, np.nan, np.float16), stream=stream)
    op.enqueue(tensors, [out], memory.to_device(np.zeros(0, np.uint8), stream=stream), stream)
    assert_close(out.numpy().astype(np.float32), rows.astype(np.float32) @ weight.T, 2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 11])
def test_a_matrix_in_nvfp4(memory: Any, stream: Any, tokens: int, dtype: str) -> None:
    """Few rows take the factor as attributes, many as an input."""
    random, groups, factor = np.random.default_rng(tokens), count_groups(INPUTS, NVFP4_GROUPS), (float(np.float32(0.0021)), 1e-11)
    factor = factor[0], float(np.float32(factor[1]))
    values = random.integers(0, 16, (OUTPUTS, INPUTS)).astype(np.uint8)
    scales = random.choice(FLOAT8[np.abs(FLOAT8.astype(np.float32)) < 30], (OUTPUTS, groups))
    rows = random.standard_normal((3, tokens, INPUTS)).astype(numpy_dtype(dtype))
    exact = nvfp4_scales(scales, factor)[:, np.arange(INPUTS) // 16]
    weight = (values.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * exact).astype(rows.dtype).astype(np.float32)
    both = [factor], kernel_factors_of([factor], dtype)
    factors = np.concatenate([np.repeat(np.array(one, np.float32), count_tiles(OUTPUTS), axis=0) for one in both])
    arrays = [rows, *(one.reshape(-1).view(np.int32) for one in (pack_values(values, "e2m1"), pack_rows(scales, groups), factors))]
    made = PackedLinearOp(outputs=OUTPUTS, factor_high=factor[0], factor_low=factor[1], **NVFP4.attributes("weight"))
    op = create_operation("packed_linear", json.loads(json.dumps(made.attributes)))
    [output] = op.outputs([TensorType(one.shape, one.dtype.name) for one in arrays])
    tensors = [memory.to_device(one, stream=stream) for one in arrays]
    out = memory.to_device(np.full(output.shape, np.nan, rows.dtype), stream=stream)
    op.enqueue(tensors, [out], memory.to_device(np.zeros(0, np.uint8), stream=stream), stream)
    assert_close(out.numpy().astype(np.float32), rows.astype(np.float32) @ weight.T, 2e-3 if dtype == "float16" else 2e-2)


def test_an_operation_is_created_again_from_its_attributes() -> None:
    made = create_operation("packed_linear", json.loads(json.dumps(make_op().attributes)))
    assert made.attributes == make_op().attributes


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": TensorType((-1, -1, 200), "float16")},
        {"values": TensorType((3,), "int32")},
        {"scales": TensorType((3 * 6 * 8,), "float16")},
    ],
    ids=str,
)
def test_inputs_that_do_not_fit_are_refused(wrong: dict[str, TensorType]) -> None:
    inputs = make_op().input_types(INPUTS, "float16") | wrong
    with raises(ShapeError, "packed_linear", "(rows, values, scales, zero_points)"):
        make_op().outputs([*inputs.values()])
    with pytest.raises(ShapeError, match=r"^packed_linear: expected rows \[B, s, in\] first"):
        make_op().outputs([TensorType((4, INPUTS), "float16")])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"outputs": 0, **PACKED.attributes("weight")}, "packed_linear, outputs"),
        ({"outputs": 8}, "no format"),
        ({"outputs": 8, **PACKED.attributes("weight"), "more": 1}, "more"),
        ({"outputs": 8, **PACKED.attributes("weight"), "weight_kind": 9}, "packed weights, kind"),
        ({"outputs": 8, **NVFP4.attributes("weight")}, "packed_linear, factor_high: expected a factor above 0 of scales in NVFP4, got 0."),
        (
            {"outputs": 8, **PACKED.attributes("weight"), "factor_high": 0.5},
            "factor_high: expected no factor of other scales",
        ),
    ],
    ids=str,
)
def test_wrong_attributes_are_refused(attributes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedLinearOp(**attributes)
