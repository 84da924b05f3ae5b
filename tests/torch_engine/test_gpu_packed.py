"""Packed weights in the torch engine on a GPU against the NumPy engine, which dequantizes them: few rows, many rows, graphs, memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.helpers.gguf_files import random_super_blocks, write_q4_k_m
from tests.helpers.models import write_model
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import CudaMemory, InferenceSession  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks  # noqa: E402
from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel  # noqa: E402
from trt_kvcache.torch_engine.device_view import device_view  # noqa: E402
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight  # noqa: E402
from trt_kvcache.torch_engine.upload import Upload  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = {"max_batch_size": 3, "max_sequence_length": 112, "max_prefill_length": 48}
MODEL = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
TOLERANCES = {"float16": 1e-2, "bfloat16": 8e-2}


def logits_of(session):
    """Return the logits of a prefill of many rows, of a few rows, and of decode steps, the last ones from a graph."""
    random, vocab = np.random.default_rng(0), session.engine.tensors["logits"].shape[-1]
    prompts = [random.integers(0, vocab, size).tolist() for size in (70, 48, 45)]
    found = [session.prefill(prompts)]
    found += [session.decode(random.integers(0, vocab, 3).tolist()) for _ in range(4)]
    found.append(session.append([[1, 2, 3], [4], [5, 6]]))
    return [row for rows in found for row in rows]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("quantize", ["int8", "int4", "int4:128", "int4,head=int8"])
def test_as_the_reference_engine(tmp_path, dtype, stored, quantize):
    folder = write_model(tmp_path / "model", **MODEL, intermediate_size=192, torch_dtype=stored, scale=0.1)
    options = {**SIZES, "dtype": dtype, "quantize": quantize}
    with (
        InferenceSession.from_model(folder, engine="torch", **options) as ours,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        assert ours.engine._weights.is_packed
        for found, expected in zip(logits_of(ours), logits_of(reference), strict=True):
            assert np.abs(found - expected).max() <= TOLERANCES[dtype] * np.abs(expected).max()
        assert len(ours.engine._device.graphs)


@pytest.mark.parametrize(("quantize", "bits"), [("int8,head=int8", 8), ("int4:128,head=int4:128", 4)])
def test_memory_of_weights(tmp_path, quantize, bits):
    """Weights need their packed size, the embedding its 16 bits. The workspace is counted apart."""
    sizes = {**MODEL, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    folder = write_model(tmp_path / "model", **sizes, torch_dtype="bfloat16", scale=0.05)
    before = torch.cuda.memory_allocated()
    with InferenceSession.from_model(folder, engine="torch", **SIZES, dtype="bfloat16", quantize=quantize) as session:
        workspace = session.engine._workspace
        used = torch.cuda.memory_allocated() - before - workspace.nbytes
    of_layer = 512 * (4 + 2 * 2) * 64 + 4 * 64 * 512 + 3 * 512 * 2048
    matrices = (2 * of_layer + 4096 * 512) * bits / 8
    assert used <= 1.06 * matrices + 2 * 4096 * 512  # scales, norms, and torch's rounding of small allocations


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("types", [{}, {"gate_proj": "Q5_K", "k_proj": "Q8_0"}], ids=["Q4_K_M", "others too"])
@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_super_blocks_as_the_reference_engine(tmp_path, dtype, types):
    write_q4_k_m(tmp_path / "model", types, vocab_size=300, max_position_embeddings=256)
    options = {**SIZES, "dtype": dtype}
    with (
        InferenceSession.from_model(tmp_path / "model", engine="torch", **options) as ours,
        InferenceSession.from_model(tmp_path / "model", engine="reference", **options) as reference,
    ):
        assert ours.engine._weights.is_packed
        for found, expected in zip(logits_of(ours), logits_of(reference), strict=True):
            assert np.abs(found - expected).max() <= TOLERANCES[dtype] * np.abs(expected).max()
        assert len(ours.engine._device.graphs)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_super_blocks_are_dequantized_bit_for_bit(kind, dtype):
    shape = (1040, 2048)
    array = random_super_blocks(kind, shape, np.random.default_rng(0))
    memory = CudaMemory()
    weight = SuperBlockWeight.of(SuperBlocks(kind=kind, stored=array), dtype, Upload(torch.device("cuda")), memory)
    out = torch.empty(shape, dtype=weight.dtype, device="cuda")
    torch.cuda.synchronize()
    stream = memory.create_stream()
    packed_dequantize_kernel(device_view(out, memory), weight.tensors, 0, stream)
    memory.synchronize(stream)
    values = torch.from_numpy(gguf.quants.dequantize(array, gguf.GGMLQuantizationType[kind])).to(weight.dtype)
    assert torch.equal(out.cpu(), values)
    assert torch.equal(weight.dequantized().cpu(), values)
