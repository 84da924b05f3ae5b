"""The values of quantized weights, bit by bit, for every case of packing that is written down in the helpers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.checkpoint.quantized.conftest import Folder
from tests.helpers.quantized_models import ALL_CASES
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors, layer_weights
from trt_kvcache.dtypes import numpy_dtype

Made = Callable[..., Folder]

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("case", ALL_CASES)
def test_values_are_those_of_the_packing_rules(made: Made, case: str) -> None:
    folder = made(case)
    with folder.open() as checkpoint:
        for name in checkpoint.tensor_names:
            found = checkpoint.tensor(name)
            assert found.dtype == (folder.values[name].dtype if checkpoint.quantized_weight(name) is None else np.float32)
            assert not found.flags.writeable
            np.testing.assert_array_equal(found, folder.values[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ALL_CASES)
def test_values_are_rounded_once(made: Made, case: str, dtype: str) -> None:
    folder = made(case)
    with folder.open() as checkpoint:
        weight = checkpoint.quantized_weight(Q_PROJ)
        assert weight is not None
        expected = folder.values[Q_PROJ].astype(numpy_dtype(dtype))
        np.testing.assert_array_equal(weight.dequantized(dtype).view(np.uint16), expected.view(np.uint16))
        np.testing.assert_array_equal(RoundedTensors(checkpoint, dtype)(Q_PROJ).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("rows", [slice(None), slice(0, 8), slice(3, 21), slice(31, 32), slice(16, 32), slice(5, 5)])
@pytest.mark.parametrize("case", ALL_CASES)
def test_rows_are_those_of_the_whole(made: Made, case: str, rows: slice) -> None:
    folder = made(case)
    with folder.open() as checkpoint:
        weight = checkpoint.quantized_weight(Q_PROJ)
        assert weight is not None
        part = weight.rows(rows)
        assert part.shape == folder.values[Q_PROJ][rows].shape
        np.testing.assert_array_equal(part.dequantized(), folder.values[Q_PROJ][rows])
        inner = part.rows(slice(1, 4))  # of those rows, not of the whole
        np.testing.assert_array_equal(inner.dequantized(), folder.values[Q_PROJ][rows][1:4])


@pytest.mark.parametrize("case", ALL_CASES)
def test_rows_in_any_order(made: Made, case: str) -> None:
    folder, order = made(case), [5, 0, 31, 6, 7, 2]
    with folder.open() as checkpoint:
        weight = checkpoint.quantized_weight(Q_PROJ)
        assert weight is not None
        part = weight.rows(order)
        assert part.shape == folder.values[Q_PROJ][order].shape
        np.testing.assert_array_equal(part.dequantized(), folder.values[Q_PROJ][order])
        np.testing.assert_array_equal(part.rows(slice(1, 4)).dequantized(), folder.values[Q_PROJ][order[1:4]])
        np.testing.assert_array_equal(weight.rows(slice(3, 9)).rows([4, 0]).dequantized(), folder.values[Q_PROJ][[7, 3]])


@pytest.mark.parametrize("case", ["gptq-8-bits", "fp8-blocks"])
def test_fused_tensors_are_cut_into_their_weights(made: Made, case: str) -> None:
    folder = made(case, "phi3-long")
    with folder.open() as checkpoint:
        layer = layer_weights(checkpoint.config, 1, checkpoint.tensor)
    fused = folder.values["model.layers.1.self_attn.qkv_proj.weight"]
    assert layer.k.weight.shape[0] == 32
    np.testing.assert_array_equal(layer.k.weight, fused[96:128])


def test_packed_tensors_stay_views_of_the_files(made: Made) -> None:
    with made("gptq").open() as checkpoint:
        weight = checkpoint.quantized_weight(Q_PROJ)
        assert weight is not None
        for array in (weight.quantized_values.stored, weight.scales.stored, weight.zero_points.stored if weight.zero_points else None):
            assert array is not None
            assert not array.flags.owndata
            assert not array.flags.writeable


def test_act_order_is_a_permutation_that_brings_groups_together(made: Made) -> None:
    folder = made("gptq-order")
    with folder.open() as checkpoint:
        weight = checkpoint.quantized_weight(Q_PROJ)
        assert weight is not None
        assert weight.permutation is not None
        assert weight.group_index is not None
        assert weight.group_index[weight.permutation].tolist() == sorted(np.arange(32) // 8)
    with made("gptq").open() as checkpoint:
        weight = checkpoint.quantized_weight(Q_PROJ)
        assert weight is not None
        assert weight.permutation is None


def test_modules_that_are_not_quantized_stay_as_stored(made: Made) -> None:
    with made("awq").open() as checkpoint:
        assert checkpoint.quantized_weight("lm_head.weight") is None
        assert not checkpoint.tensor("lm_head.weight").flags.owndata
