"""Quantized weights that are dequantized on a device: bit by bit the values that NumPy computes on the host."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from tests.helpers import quantized_models as made
from tests.helpers.gguf_files import SUPER_BLOCKS, random_super_blocks, write_q4_k_m
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.torch_engine.test_packed_weight import NOT_PACKED, PACKED, SHAPE, of  # noqa: E402
from trt_kvcache import Checkpoint, HostMemory  # noqa: E402
from trt_kvcache._util import in_threads  # noqa: E402
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors  # noqa: E402
from trt_kvcache.checkpoint.quantized.gguf import GGUF  # noqa: E402
from trt_kvcache.checkpoint.quantized.offset_blocks import PLANES as OFFSET_PLANES, OffsetBlocks  # noqa: E402
from trt_kvcache.checkpoint.quantized.registry import quantized_format  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks  # noqa: E402
from trt_kvcache.dtypes import numpy_dtype  # noqa: E402
from trt_kvcache.torch_engine import checkpoint_tensors, offset_block_rows, super_block_rows, uploaded_rows  # noqa: E402
from trt_kvcache.torch_engine.checkpoint_tensors import CheckpointTensors  # noqa: E402
from trt_kvcache.torch_engine.offset_block_rows import dequantized_offset_blocks  # noqa: E402
from trt_kvcache.torch_engine.packing import packed_weight  # noqa: E402
from trt_kvcache.torch_engine.super_block_rows import dequantized_super_blocks  # noqa: E402
from trt_kvcache.torch_engine.upload import Upload  # noqa: E402
from trt_kvcache.torch_engine.uploaded_rows import UploadedRows, dequantized, joined_rows  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
WEIGHTS = {name: make for name, (make, _, _) in PACKED.items()} | NOT_PACKED


def published(case):
    """A weight of each way in which a checkpoint of these rules is made, with groups that end early among them."""
    quantize, config = made.ALL_CASES[case]
    return of(quantize, quantized_format({"quantization_config": config}, Path("nowhere")), (48, 96))


def bits(array):
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def check(found, expected):
    """Compare all bits, those of zeros too."""
    assert found.shape == expected.shape
    whole = found.cpu().contiguous().view(torch.uint8).numpy().view(expected.dtype)
    np.testing.assert_array_equal(bits(whole), bits(np.ascontiguousarray(expected)))


@DEVICES
@DTYPES
@pytest.mark.parametrize("case", WEIGHTS)
def test_values_are_those_of_the_host(monkeypatch, case, dtype, device):
    monkeypatch.setattr(uploaded_rows, "ON_DEVICE", 7 * SHAPE[1])  # parts that begin within the elements of AWQ and with an odd row
    weight = WEIGHTS[case]()
    check(dequantized(weight, getattr(torch, dtype), Upload(torch.device(device))), weight.dequantized(dtype))


@DEVICES
@DTYPES
@pytest.mark.parametrize("case", made.ALL_CASES)
def test_values_of_published_formats_are_those_of_the_host(monkeypatch, case, dtype, device):
    monkeypatch.setattr(uploaded_rows, "ON_DEVICE", 7 * 96)
    weight = published(case)
    check(dequantized(weight, getattr(torch, dtype), Upload(torch.device(device))), weight.dequantized(dtype))


def test_values_are_those_of_the_host_in_several_threads(monkeypatch):
    monkeypatch.setattr(in_threads, "count_processors", lambda: 4)
    weight = WEIGHTS["gptq"]()
    check(dequantized(weight, torch.float16, Upload(torch.device("cpu"))), weight.dequantized("float16"))


@pytest.mark.parametrize("case", ["Q4_0", "Q8_0", "mxfp4", "awq", "gptq", "compressed int4, zero points", "FP8, blocks"])
@pytest.mark.parametrize("rows", [slice(3, 4), slice(5, 47), slice(8, 8 + 16), [40, 3, 3, 47, 0]], ids=str)
def test_some_rows(case, rows):
    weight, upload = WEIGHTS[case](), Upload(torch.device("cpu"))
    some = weight.rows(rows)
    found = UploadedRows.of(some, upload)
    np.testing.assert_array_equal(found.values.numpy(), some.unpacked().view(np.uint8))
    np.testing.assert_array_equal(found.scales.numpy(), some.scales_of_rows())
    both = joined_rows([found, UploadedRows.of(weight, upload)])
    np.testing.assert_array_equal(both.values.numpy(), np.concatenate([some.unpacked(), weight.unpacked()]).view(np.uint8))


@pytest.mark.parametrize(("kind", "nbytes"), [("Q4_0", 18), ("Q8_0", 34)])
def test_scales_at_the_ends_of_float16(kind, nbytes):
    """All finite float16 scales of both signs: the least and the largest denormals, zeros, and the largest."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)].reshape(-1, 8)
    stored = np.random.default_rng(0).integers(0, 256, (*scales.shape, nbytes)).astype(np.uint8)
    stored[..., :2] = scales[..., None].view(np.uint8)
    weight = GGUF([kind]).weight("m", {"weight": stored.reshape(len(stored), -1)}, (len(stored), 256))
    for dtype in ("float32", "bfloat16"):
        check(dequantized(weight, getattr(torch, dtype), Upload(torch.device("cpu"))), weight.dequantized(dtype))
    assert dequantized(weight, torch.float16, Upload(torch.device("cpu"))) is None


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(scale):
    weight = WEIGHTS["Q8_0"]()
    stored = weight.quantized_values.stored.copy()
    stored[47, 34 * 7 : 34 * 7 + 2] = np.array([scale], np.float16).view(np.uint8)
    damaged = GGUF(["Q8_0"]).weight("m", {"weight": stored}, SHAPE)
    assert dequantized(damaged, torch.float32, Upload(torch.device("cpu"))) is None


def test_every_exponent_of_mxfp4():
    exponents = np.tile(np.arange(1, 253, dtype=np.uint8), (3, 1))
    stored = np.random.default_rng(0).integers(0, 256, (3, 252, 17)).astype(np.uint8)
    stored[..., 0] = exponents
    weight = GGUF(["MXFP4"]).weight("m", {"weight": stored.reshape(3, -1)}, (3, 252 * 32))
    assert weight.scales.stored.dtype == ml_dtypes.float8_e8m0fnu
    check(dequantized(weight, torch.float32, Upload(torch.device("cpu"))), weight.dequantized())


@DEVICES
@DTYPES
@pytest.mark.parametrize("kind", SUPER_BLOCKS)
def test_super_blocks(monkeypatch, kind, dtype, device):
    monkeypatch.setattr(super_block_rows, "ON_DEVICE", 5 * 512)
    stored = random_super_blocks(kind, (37, 512), np.random.default_rng(1))
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).astype(numpy_dtype(dtype))
    found = dequantized_super_blocks(SuperBlocks(kind=kind, stored=stored), getattr(torch, dtype), Upload(torch.device(device)))
    check(found, expected)


@pytest.mark.parametrize("kind", SUPER_BLOCKS)
def test_super_blocks_that_the_dtype_cannot_hold(kind):
    stored = random_super_blocks(kind, (37, 512), np.random.default_rng(1)).reshape(37, 2, -1)
    stored[36, 1, slice(-2, None) if kind == "Q6_K" else slice(2)] = np.array([np.inf], np.float16).view(np.uint8)
    whole = SuperBlocks(kind=kind, stored=stored.reshape(37, -1))
    assert dequantized_super_blocks(whole, torch.bfloat16, Upload(torch.device("cpu"))) is None


def offset_blocks(kind, scales):
    """Random blocks with scales ``[rows, blocks, 2]``: of values and of minimums, if the type has any."""
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    stored = np.random.default_rng(2).integers(0, 256, (*scales.shape[:2], nbytes)).astype(np.uint8)
    floats = scales[..., :1] if kind == "Q5_0" else scales
    stored[..., : 2 * floats.shape[-1]] = np.ascontiguousarray(floats).view(np.uint8)
    return OffsetBlocks(kind=kind, stored=stored.reshape(len(stored), -1))


@DEVICES
@DTYPES
@pytest.mark.parametrize("kind", OFFSET_PLANES)
def test_offset_blocks(monkeypatch, kind, dtype, device):
    monkeypatch.setattr(offset_block_rows, "ON_DEVICE", 5 * 96)
    scales = (np.random.default_rng(1).standard_normal((37, 3, 2)) * 0.01).astype(np.float16)
    scales[0, 0], scales[1, 1], scales[2] = (6e-8, -6e-8), (0.0, -0.0), 2000.0
    matrix = offset_blocks(kind, scales)
    expected = gguf.quants.dequantize(matrix.stored, gguf.GGMLQuantizationType[kind]).astype(numpy_dtype(dtype))
    check(dequantized_offset_blocks(matrix, getattr(torch, dtype), Upload(torch.device(device))), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_q5_0_as_integers(dtype):
    """Bit for bit, on the host and in the layout of the kernels."""
    matrix = offset_blocks("Q5_0", (np.random.default_rng(1).standard_normal((37, 4, 2)) * 0.01).astype(np.float16))
    expected = gguf.quants.dequantize(matrix.stored, gguf.GGMLQuantizationType.Q5_0).astype(numpy_dtype(dtype))
    weight = matrix.as_int8()
    np.testing.assert_array_equal(weight.dequantized(dtype), expected)
    rows = [slice(16, 32), [32, 3, 3]]
    packed = packed_weight([weight.rows(some) for some in rows], dtype, Upload(torch.device("cpu")), HostMemory())
    assert (packed.kind, packed.scales.dtype, packed.zero_points) == ("int8", torch.float16, None)
    check(packed.dequantized(), np.concatenate([expected[some] for some in rows]))
    for kind in ("Q4_1", "Q5_1"):
        assert offset_blocks(kind, np.ones((3, 2, 2), np.float16)).as_int8() is None


@pytest.mark.parametrize("kind", OFFSET_PLANES)
def test_offset_blocks_that_the_dtype_cannot_hold(kind):
    matrix = offset_blocks(kind, np.full((3, 2, 2), 6e4, np.float16))
    assert dequantized_offset_blocks(matrix, torch.float16, Upload(torch.device("cpu"))) is None
    assert dequantized_offset_blocks(matrix, torch.bfloat16, Upload(torch.device("cpu"))) is not None


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
class TestCheckpoint:
    """A file whose q and k have their rows in another order than transformers', and whose head is its embedding in one case."""

    @pytest.fixture(params=[False, True], ids=["untied", "tied"])
    def checkpoint(self, tmp_path, request):
        types = {"embed_tokens": "Q4_K", "gate_proj": "Q8_0", "q_proj": "Q4_0", "k_proj": "Q4_1", "up_proj": "Q5_K", "o_proj": "Q5_0"}
        write_q4_k_m(tmp_path / "model", types, tie_word_embeddings=request.param)
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            yield checkpoint

    @DEVICES
    def test_every_tensor(self, checkpoint, device, monkeypatch):
        monkeypatch.setattr(checkpoint_tensors, "dequantizes", lambda device: True)
        done = []
        tensors = CheckpointTensors(checkpoint, "bfloat16", torch.device(device), HostMemory(), lambda *counts: done.append(counts))
        host = RoundedTensors(checkpoint, "bfloat16")
        for name in checkpoint.tensor_names:
            check(tensors.load(name), host(name).astype(host.dtype))
        assert done[-1] == (checkpoint.nbytes, checkpoint.nbytes)
        assert len(done) == len(checkpoint.tensor_names)

    def test_quantized_tensors_are_not_read_on_the_host(self, checkpoint, monkeypatch):
        monkeypatch.setattr(checkpoint_tensors, "dequantizes", lambda device: True)
        tensors = CheckpointTensors(checkpoint, "bfloat16", torch.device("cpu"), HostMemory())
        monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: pytest.fail(f"{name} is dequantized on the host"))
        for name in checkpoint.tensor_names:
            if "norm" not in name:
                tensors.load(name)

    def test_values_that_the_dtype_cannot_hold_are_refused_as_on_the_host(self, checkpoint, monkeypatch):
        monkeypatch.setattr(checkpoint_tensors, "dequantizes", lambda device: True)
        monkeypatch.setattr(checkpoint_tensors, "dequantized", lambda *arguments: None)
        tensors = CheckpointTensors(checkpoint, "bfloat16", torch.device("cpu"), HostMemory())
        name = "model.layers.0.mlp.gate_proj.weight"
        check(tensors.load(name), RoundedTensors(checkpoint, "bfloat16")(name))
