"""Packed weights in the torch engine on a GPU against the NumPy engine, which dequantizes them: few rows, many rows, graphs, memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.helpers.gguf_experts import Q4_K_M_EXPERTS, write_gguf_experts
from tests.helpers.gguf_files import random_super_blocks, write_q4_k_m
from tests.helpers.mixed_layers import RandomCheckpoint
from tests.helpers.models import changed_model, write_model
from tests.helpers.quantized_models import (
    CT_NVFP4,
    FP8_CONFIG,
    GPTQ_CONFIG,
    fp8_blocks,
    gptq,
    modelopt,
    nvfp4,
    write_fp8,
    write_gptq,
    write_nvfp4,
)
from tests.paths import GOLDEN
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import Checkpoint, CudaMemory, HostMemory, InferenceSession, ReferenceEngine  # noqa: E402
from trt_kvcache.cache.edge_llm import make_cache  # noqa: E402
from trt_kvcache.checkpoint.quantized.compressed_tensors import CompressedTensors  # noqa: E402
from trt_kvcache.checkpoint.quantized.fp8_blocks import FP8Blocks  # noqa: E402
from trt_kvcache.checkpoint.quantized.gptq import GPTQ  # noqa: E402
from trt_kvcache.checkpoint.quantized.modelopt import ModelOpt  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks  # noqa: E402
from trt_kvcache.engine.decoder_cache import decoder_cache_config  # noqa: E402
from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402
from trt_kvcache.torch_engine.device_view import device_view  # noqa: E402
from trt_kvcache.torch_engine.packed_stack import PackedStack  # noqa: E402
from trt_kvcache.torch_engine.packing import packed_weight  # noqa: E402
from trt_kvcache.torch_engine.routed_mlp import RoutedMlp  # noqa: E402
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


def assert_as_the_reference_engine(folder, dtype, **options):
    """Compare logits of replayed steps with packed weights with those of the NumPy engine."""
    options = {**SIZES, "dtype": dtype, **options}
    with (
        InferenceSession.from_model(folder, engine="torch", **options) as ours,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        assert ours.engine._weights.is_packed
        for found, expected in zip(logits_of(ours), logits_of(reference), strict=True):
            assert np.abs(found - expected).max() <= TOLERANCES[dtype] * np.abs(expected).max()
        assert len(ours.engine._device.graphs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("quantize", ["int8", "int4", "int4:128", "int4,head=int8"])
def test_as_the_reference_engine(tmp_path, dtype, stored, quantize):
    folder = write_model(tmp_path / "model", **MODEL, intermediate_size=192, torch_dtype=stored, scale=0.1)
    assert_as_the_reference_engine(folder, dtype, quantize=quantize)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (128, 32)], ids=str)
@pytest.mark.filterwarnings("ignore:(?s).*activations are not quantized")
def test_fp8_as_the_reference_engine(tmp_path, dtype, block):
    folder = write_fp8(tmp_path / "model", block, **MODEL, intermediate_size=320, torch_dtype="bfloat16", scale=0.1)
    assert_as_the_reference_engine(folder, dtype)


@pytest.mark.parametrize("block", [(128, 128), (1, 512)], ids=str)
@pytest.mark.filterwarnings("ignore:(?s).*activations are not quantized")
def test_memory_of_fp8(tmp_path, block):
    """Linear layers need their stored size, embedding and head 16 bits."""
    sizes = {**MODEL, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    folder = write_fp8(tmp_path / "model", block, **sizes, torch_dtype="bfloat16", scale=0.05)
    before = torch.cuda.memory_allocated()
    with InferenceSession.from_model(folder, engine="torch", **SIZES, dtype="bfloat16") as session:
        used = torch.cuda.memory_allocated() - before - session.engine._workspace.nbytes
    of_layer = 512 * (4 + 2 * 2) * 64 + 4 * 64 * 512 + 3 * 512 * 2048
    assert used <= 1.03 * 2 * of_layer + 2 * 2 * 4096 * 512 + (256 << 10)  # norms, and torch's rounding of small allocations


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("block", [(128, 128), (24, 64), (1, 1096)], ids=str)
def test_fp8_is_dequantized_bit_for_bit(block, dtype):
    shape, random = (200, 1096), np.random.default_rng(0)
    stored, _ = fp8_blocks(block=block)(random.standard_normal(shape).astype(np.float32), random)
    config = {**FP8_CONFIG, "weight_block_size": list(block)}
    assert_dequantized_bit_for_bit(FP8Blocks(config).weight("m", stored, shape), dtype)


def assert_dequantized_bit_for_bit(weight, dtype):
    """Compare what the kernel and what torch make of a packed weight with the checkpoint reader. The kernel has columns in its order."""
    memory = CudaMemory()
    packed = packed_weight([weight], dtype, Upload(torch.device("cuda")), memory)
    out = torch.empty(weight.shape, dtype=packed.dtype, device="cuda")
    torch.cuda.synchronize()
    stream = memory.create_stream()
    packed_dequantize_kernel(device_view(out, memory), packed.tensors, 0, stream)
    memory.synchronize(stream)
    expected = weight.dequantized(dtype)
    order = slice(None) if packed.order is None else packed.order.cpu().numpy()
    for found, values in ((out, expected[:, order]), (packed.dequantized(), expected)):
        np.testing.assert_array_equal(found.cpu().float().numpy(), values.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("one_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 128])
def test_act_order_as_the_reference_engine(tmp_path, dtype, group_size, one_order):
    sizes = {**MODEL, "intermediate_size": 320, "torch_dtype": "float16", "scale": 0.1}
    folder = write_gptq(tmp_path / "model", group_size, one_order=one_order, **sizes)
    assert_as_the_reference_engine(folder, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_act_order_is_dequantized_bit_for_bit(dtype):
    shape, random = (200, 1096), np.random.default_rng(0)
    stored, _ = gptq(group_size=128, order=True)(random.standard_normal(shape).astype(np.float32), random)
    weight = GPTQ({**GPTQ_CONFIG, "group_size": 128, "desc_act": True}).weight("m", stored, shape)
    assert_dequantized_bit_for_bit(weight, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("one_factor", [False, True])
@pytest.mark.parametrize("inverse", [False, True], ids=["modelopt", "compressed-tensors"])
def test_nvfp4_as_the_reference_engine(tmp_path, dtype, inverse, one_factor):
    sizes = {**MODEL, "intermediate_size": 320, "torch_dtype": "bfloat16", "scale": 0.1}
    assert_as_the_reference_engine(write_nvfp4(tmp_path / "model", one_factor=one_factor, inverse=inverse, **sizes), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nvfp4_is_dequantized_bit_for_bit(dtype):
    shape, random = (200, 1104), np.random.default_rng(0)
    values = (random.standard_normal(shape) * np.exp2(random.uniform(-12, 0, (200, 1)))).astype(np.float32)
    stored, _ = nvfp4(("weight", "weight_scale", "weight_scale_2"), inverse=False)(values, random)
    assert_dequantized_bit_for_bit(ModelOpt(modelopt("NVFP4")).weight("m", stored, shape), dtype)
    stored, _ = nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), inverse=True)(values, random)
    for divisor in (stored["weight_global_scale"], np.array([1706.5430908203125], np.float32), np.array([1402.911376953125], np.float32)):
        weight = CompressedTensors(CT_NVFP4).weight("m", {**stored, "weight_global_scale": divisor}, shape)
        assert_dequantized_bit_for_bit(weight, dtype)


def test_memory_of_nvfp4(tmp_path):
    """Linear layers need their stored size, embedding and head 16 bits."""
    sizes = {**MODEL, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    folder = write_nvfp4(tmp_path / "model", one_factor=True, **sizes, torch_dtype="bfloat16", scale=0.05)
    before = torch.cuda.memory_allocated()
    with InferenceSession.from_model(folder, engine="torch", **SIZES, dtype="bfloat16") as session:
        used = torch.cuda.memory_allocated() - before - session.engine._workspace.nbytes
    of_layer = 512 * (4 + 2 * 2) * 64 + 4 * 64 * 512 + 3 * 512 * 2048
    assert used <= 1.03 * 2 * of_layer * (4 + 8 / 16) / 8 + 2 * 2 * 4096 * 512 + (
        256 << 10
    )  # norms, and torch's rounding of small allocations


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["int4", "int8", "int4:128"])
def test_rounded_experts(dtype, scheme):
    """All experts are chosen, or rounding would choose others where two have nearly the same score."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 64, "num_experts_per_tok": 7}
    check_experts(RandomCheckpoint(changed_model("qwen3_moe", **sizes), scheme), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore:(?s).*activations are not quantized")
def test_experts_in_fp8(tmp_path, dtype):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 64, "num_experts_per_tok": 7}
    with Checkpoint.open(write_fp8(tmp_path / "model", (32, 32), "qwen3_moe", **sizes)) as checkpoint:
        check_experts(checkpoint, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts_in_mxfp4(dtype):
    with Checkpoint.open(GOLDEN / "gpt_oss-mxfp4") as checkpoint:
        check_experts(checkpoint, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("types", [Q4_K_M_EXPERTS, {"down_exps": "Q8_0", "exps": "Q5_K"}], ids=["Q4_K_M", "with Q8_0"])
@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_experts_in_super_blocks(tmp_path, types, dtype):
    with Checkpoint.open(write_gguf_experts(tmp_path, types, num_experts_per_tok=7)) as checkpoint:
        check_experts(checkpoint, dtype)


def check_experts(checkpoint, dtype):
    """Compare steps of 1 to 3 rows, of up to 64 (in graphs too), and of more."""
    memory, host = CudaMemory(), HostMemory()
    config = decoder_cache_config(checkpoint.config, max_batch_size=3, max_sequence_length=60, dtype=dtype, attention="native")
    options = {"kv": config, "max_prefill_length": 32, "attention": "native"}
    ours, reference = TorchEngine.open(checkpoint, **options, memory=memory), ReferenceEngine(checkpoint, **options, memory=host)
    assert all(block.part.experts.is_packed for block in ours._weights.blocks if isinstance(block.part, RoutedMlp))
    random, found = np.random.default_rng(0), []
    prompts = [random.integers(0, 60, size).tolist() for size in (34, 16, 15)]
    steps = [random.integers(0, 60, 3).tolist() for _ in range(4)]
    for engine, cache in ((ours, memory), (reference, host)):
        with InferenceSession(engine, make_cache(config, memory=cache)) as session:
            logits = [session.prefill(prompts), *(session.decode(step) for step in steps), session.append([[1, 2, 3], [4], [5, 6]])]
            found.append(np.concatenate(logits))
    assert np.abs(found[0] - found[1]).max() <= TOLERANCES[dtype] * np.abs(found[1]).max()
    assert not ours.graph_refusals


def test_memory_of_experts():
    """Stacks need their packed size."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "head_dim": 64, "num_experts": 32}
    checkpoint = RandomCheckpoint(changed_model("qwen3_moe", **sizes), "int4:128")
    config = decoder_cache_config(checkpoint.config, max_batch_size=1, max_sequence_length=64, dtype="bfloat16", attention="native")
    before = torch.cuda.memory_allocated()
    engine = TorchEngine.open(checkpoint, kv=config, max_prefill_length=8, attention="native", memory=CudaMemory())
    stacks = [stack for block in engine._weights.blocks if isinstance(block.part, RoutedMlp) for stack in vars(block.part.experts).values()]
    stored = sum(stack.whole.nbytes for stack in stacks if isinstance(stack, PackedStack))
    layers = sum(isinstance(block.part, RoutedMlp) for block in engine._weights.blocks)
    assert layers * 32 * 3 * 256 * 512 // 2 < stored <= layers * 32 * 3 * 256 * 512 * (4 + 16 / 128) / 8
    used = torch.cuda.memory_allocated() - before - engine._workspace.nbytes
    assert used <= 1.2 * stored, "attention, embedding and head have little of it"
    engine.close()
