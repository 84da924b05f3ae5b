"""Weights in super-blocks of GGUF files as packed matrices: the values of the ``gguf`` package, bit by bit, in as little memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.helpers.gguf_files import SUPER_BLOCKS, random_super_blocks, write_q4_k_m
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import Checkpoint, HostMemory  # noqa: E402
from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks  # noqa: E402
from trt_kvcache.kernels.sources import source_names  # noqa: E402
from trt_kvcache.kernels.super_block_layout import dequantized_super_blocks  # noqa: E402
from trt_kvcache.torch_engine import super_block_weight  # noqa: E402
from trt_kvcache.torch_engine.kernel_variants import packed_variants  # noqa: E402
from trt_kvcache.torch_engine.packed_stack import stack_of  # noqa: E402
from trt_kvcache.torch_engine.packing import packed_weight  # noqa: E402
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight, joined_super_blocks  # noqa: E402
from trt_kvcache.torch_engine.upload import Upload  # noqa: E402

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", SUPER_BLOCKS)
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def stored(kind, shape=(48, 512), seed=0):
    return random_super_blocks(kind, shape, np.random.default_rng(seed))


def values_of(kind, array):
    return gguf.quants.dequantize(array, gguf.GGMLQuantizationType[kind])


def packed(kind, array, dtype="float16", rows=None):
    whole = SuperBlocks(kind=kind, stored=array)
    return SuperBlockWeight.of(whole if rows is None else whole.of_rows(rows), dtype, Upload(CPU), HostMemory())


def check(weight, expected):
    """Compare values bit by bit. Zeros of both signs are one."""
    assert weight.outputs == len(expected)
    rounded = torch.from_numpy(expected.copy()).to(weight.dtype)
    arrays = (tensor.numpy() for tensor in (weight.values, weight.scales, weight.factors))
    twin = dequantized_super_blocks(*arrays, weight.kind, (weight.outputs, weight.inputs))
    np.testing.assert_array_equal(twin, expected)
    torch.testing.assert_close(weight.dequantized(), rounded, rtol=0, atol=0)


@KINDS
@DTYPES
def test_values_are_those_of_the_gguf_package(kind, dtype):
    array = stored(kind)
    check(packed(kind, array, dtype), values_of(kind, array))


@KINDS
def test_outputs_that_no_tile_ends_with(kind):
    array = stored(kind, (37, 256))
    check(packed(kind, array), values_of(kind, array))


@KINDS
def test_rows_of_a_fused_tensor(kind):
    array, rows = stored(kind), [slice(8, 24), [40, 3, 3], slice(32, None)]
    check(packed(kind, array, rows=rows), np.concatenate([values_of(kind, array)[part] for part in rows]))


@KINDS
def test_many_rows_are_packed_in_parts(kind, monkeypatch):
    array = stored(kind, (88, 256))
    monkeypatch.setattr(super_block_weight, "ON_DEVICE", 20 * 256)
    check(packed(kind, array), values_of(kind, array))


@KINDS
def test_memory_is_within_three_percent_of_the_file(kind):
    array = stored(kind, (256, 1024))
    assert packed(kind, array).nbytes <= 1.03 * array.nbytes


@KINDS
@pytest.mark.parametrize("factor", [np.nan, np.inf, 6e4])
def test_factors_whose_values_the_dtype_cannot_hold_are_not_packed(kind, factor):
    array = stored(kind).reshape(48, 2, -1)
    array[5, 1, slice(-2, None) if kind == "Q6_K" else slice(2)] = np.array([factor], np.float16).view(np.uint8)
    array = array.reshape(48, -1)
    assert packed(kind, array) is None
    if factor == 6e4:
        check(packed(kind, array, "bfloat16"), values_of(kind, array))


@KINDS
def test_joined(kind):
    arrays = [stored(kind, (32, 256), seed=1), stored(kind, (21, 256), seed=2)]
    check(joined_super_blocks([packed(kind, array) for array in arrays]), np.concatenate([values_of(kind, array) for array in arrays]))


def test_others_are_not_joined():
    first = packed("Q4_K", stored("Q4_K"))
    assert joined_super_blocks((first, packed("Q5_K", stored("Q5_K")))) is None
    assert joined_super_blocks((first, packed("Q4_K", stored("Q4_K", (48, 256))))) is None
    assert joined_super_blocks((packed("Q4_K", stored("Q4_K", (24, 512))), first)) is None


@KINDS
def test_stacks(kind):
    """Gate and up of three experts."""
    arrays = [stored(kind, (32, 256), seed=seed) for seed in range(6)]
    stack = stack_of([packed(kind, array) for array in arrays], 3)
    assert (len(stack), stack.shape) == (3, (3, 64, 256))
    assert (stack.tensors.outputs, stack.tensors.expert_variant("float16")) == (64, f"linear_super_block_experts-float16-8-{kind.lower()}")
    for index, matrix in enumerate(np.array(arrays).reshape(3, 64, -1)):
        check(stack[index], values_of(kind, matrix))


@KINDS
@DTYPES
def test_variants_that_are_compiled_ahead(kind, dtype):
    weight = packed(kind, stored(kind), dtype)
    of_all = [f"linear_super_blocks-{dtype}-8-{weight.kind}"]
    assert [*packed_variants(weight, dtype, of_expert=False)] == of_all
    of_experts = [f"linear_super_block_{name}-{dtype}-{rows}-{weight.kind}" for name, rows in (("experts", 8), ("expert_tiles", 64))]
    assert [*packed_variants(weight, dtype, of_expert=True)] == [*of_experts, *of_all]
    assert {*packed_variants(weight, dtype, of_expert=True)} <= {*source_names()}


def test_stacks_of_several_types():
    first, others = packed("Q4_K", stored("Q4_K")), [packed("Q6_K", stored("Q6_K")), int8_weight(48, 256)]
    for other in others:
        assert stack_of([first, other], 2) is None
        assert stack_of([other, first], 1) is None
    assert stack_of([packed("Q4_K", stored("Q4_K", (24, 256))) for _ in range(2)], 2) is None, "no whole tiles"


def int8_weight(outputs, inputs):
    weight = rounded_to_nearest(np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32), "int8", "float16")
    return packed_weight([weight], "float16", Upload(CPU), HostMemory())


class TestCheckpoint:
    @pytest.fixture
    def model(self, tmp_path):
        return tmp_path / "model", write_q4_k_m(tmp_path / "model")

    @pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
    def test_matrices_as_they_are_stored(self, model):
        folder, values = model
        with Checkpoint.open(folder) as checkpoint:
            for name, expected in values.items():
                found = checkpoint.super_blocks(name)
                assert (found is None) == (expected.ndim == 1)
                if found is not None:
                    assert found.shape == expected.shape
                    check(SuperBlockWeight.of(found, "bfloat16", Upload(CPU), HostMemory()), expected)

    @pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
    def test_rounded_weights_are_not_as_they_are_stored(self, model):
        with Checkpoint.open(model[0], quantize="int8") as checkpoint:
            assert checkpoint.super_blocks("model.layers.0.mlp.up_proj.weight") is None
            assert checkpoint.super_blocks("lm_head.weight") is not None
