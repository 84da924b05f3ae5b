"""The torch engine on a GPU against the NumPy engine on the host: prefill in chunks, decode steps as graphs, slots, rewinds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.helpers.models import HYBRID_TOLERANCES, HYBRIDS, changed_model, hybrid_model, sinks_model, write_model
from tests.paths import GOLDEN
from tests.reference.rig import MODELS
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from trt_kvcache import (  # noqa: E402
    CudaMemory,
    HostMemory,
    HybridCacheManager,
    InferenceSession,
    KVCacheManager,
    ReferenceEngine,
)
from trt_kvcache.engine.decoder_cache import cache_config, decoder_cache_config  # noqa: E402
from trt_kvcache.errors import CaptureError, EngineError  # noqa: E402
from trt_kvcache.model import MlpConfig  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, device, engine  # noqa: E402
from trt_kvcache.torch_engine.experts import SortedProducts  # noqa: E402
from trt_kvcache.torch_engine.grouped_experts import GroupedProducts  # noqa: E402
from trt_kvcache.torch_engine.operations import Elementwise, Experts, Projections  # noqa: E402

pytestmark = pytest.mark.gpu

ATTENTION = pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
SIZES = {"max_batch_size": 3, "max_sequence_length": 61, "max_prefill_length": 9}
SHAPES = {64: (6, 2), 80: (3, 3), 96: (4, 1), 128: (14, 2), 256: (2, 1)}

#: Relative to the largest logit: see ``trt_kvcache.polygraphy.path_comparison.TOLERANCES``. float32 sums in another order.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}

#: The same for layers that differ, with inputs of each layer: on a CPU too torch and NumPy differ by 0.011 in float16, by 0.12 in bfloat16.
MIXED_TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.16}


def rows_of(session, vocab):
    """Return the logits of a ragged prefill, decode steps, a rewind where there are no states, and a second turn."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, vocab, size).tolist() for size in (23, 5, 14)]
    found = [session.prefill(prompts)]
    found += [session.decode(random.integers(0, vocab, 3).tolist()) for _ in range(6)]
    if session.cache.states is None:
        session.rewind(1, 3)
    found += [session.decode(random.integers(0, vocab, 3).tolist()) for _ in range(3)]
    found.append(session.prefill([prompts[2][:4], prompts[0]]))
    found += [session.decode(random.integers(0, vocab, 2).tolist()) for _ in range(6)]
    return [row for rows in found for row in rows]


def assert_same(folder, dtype, attention):
    options = {**SIZES, "dtype": dtype, "attention": attention}
    with (
        InferenceSession.from_model(folder, engine="torch", **options) as ours,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        compare(ours, reference, dtype)


def compare(ours, reference, dtype, tolerances=TOLERANCES):
    assert ours.engine.memory.device == "cuda:0"
    vocab = ours.engine.tensors["logits"].shape[-1]
    for found, expected in zip(rows_of(ours, vocab), rows_of(reference, vocab), strict=True):
        assert np.abs(found - expected).max() <= tolerances[dtype] * np.abs(expected).max()
    orders = 1 if ours.cache.states is None else 2
    # decode steps of 3 and of 2 slots are replayed, for each order of the buffers
    assert len(ours.engine._device.graphs) >= 2 * orders, ours.engine.graph_refusals


@ATTENTION
@pytest.mark.parametrize("model", MODELS)
def test_in_float32(model, attention):
    assert_same(GOLDEN / model, "float32", attention)


@ATTENTION
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dims", [(64, 80, 96, 256), (24, 64, 128, 40)], ids=["kernels", "mask"])
def test_layers_that_differ(head_dims, dtype, attention):
    checkpoint, host, gpu = RandomCheckpoint(mixed_model(*head_dims)), HostMemory(), CudaMemory()
    sizes = {"max_batch_size": 3, "max_sequence_length": 61}
    kv = cache_config(checkpoint.config, **sizes, dtype=dtype, attention=attention)
    options = {"kv": kv, "max_prefill_length": 9, "attention": attention}
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=gpu), KVCacheManager(kv, memory=gpu)) as ours,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), KVCacheManager(kv, memory=host)) as reference,
    ):
        known = dtype != "float32" and head_dims[0] == 64
        assert (ours.engine._kernel_inputs is not None) == known
        compare(ours, reference, dtype, MIXED_TOLERANCES)


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts(dtype, attention):
    """All experts are chosen, or rounding would choose others where two have nearly the same score."""
    checkpoint = RandomCheckpoint(changed_model("qwen3_moe", head_dim=64, num_experts_per_tok=7))
    host, gpu = HostMemory(), CudaMemory()
    kv = cache_config(checkpoint.config, max_batch_size=3, max_sequence_length=61, dtype=dtype, attention=attention)
    options = {"kv": kv, "max_prefill_length": 9, "attention": attention}
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=gpu), KVCacheManager(kv, memory=gpu)) as ours,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), KVCacheManager(kv, memory=host)) as reference,
    ):
        assert ours.engine._kernel_inputs is not None
        compare(ours, reference, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_of_many_rows_with_experts(dtype):
    random, dtype = torch.Generator("cuda").manual_seed(0), getattr(torch, dtype)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda").to(dtype)

    config = MlpConfig(intermediate_size=48, bias=True)
    experts = Experts(config=config, inputs=normal(9, 96, 64), inputs_bias=normal(9, 96), down=normal(9, 64, 48), down_bias=normal(9, 64))
    rows, chosen = normal(150, 64), torch.stack([torch.randperm(8, generator=random, device="cuda")[:3] for _ in range(150)])
    weights, elementwise = torch.rand((150, 3), generator=random, device="cuda"), Elementwise()
    grouped = GroupedProducts(None, elementwise)
    found = grouped(rows, chosen, weights, experts)
    expected = SortedProducts(Projections(elementwise))(rows, chosen, weights, experts)
    assert (found - expected).abs().max() <= TOLERANCES[str(dtype).removeprefix("torch.")] * expected.abs().max()


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention_sinks(dtype, attention):
    checkpoint, host, gpu = RandomCheckpoint(sinks_model()), HostMemory(), CudaMemory()
    kv = cache_config(checkpoint.config, max_batch_size=3, max_sequence_length=61, dtype=dtype, attention=attention)
    options = {"kv": kv, "max_prefill_length": 9, "attention": attention}
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=gpu), KVCacheManager(kv, memory=gpu)) as ours,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), KVCacheManager(kv, memory=host)) as reference,
    ):
        assert (ours.engine._kernel_inputs is not None) == (dtype != "float32")
        compare(ours, reference, dtype)


def open_hybrid(open_engine, model, dtype, attention, memory):
    """Return a session of a model with states and random weights. Prefill is wide enough for chunks of tokens."""
    config = decoder_cache_config(model, max_batch_size=3, max_sequence_length=61, dtype=dtype, attention=attention)
    options = {"kv": config, "max_prefill_length": 33, "attention": attention, "memory": memory}
    return InferenceSession(open_engine(RandomCheckpoint(model), **options), HybridCacheManager(config, memory=memory))


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_with_states(name, dtype, attention):
    model = hybrid_model(name)
    with (
        open_hybrid(TorchEngine.open, model, dtype, attention, CudaMemory()) as ours,
        open_hybrid(ReferenceEngine, model, dtype, attention, HostMemory()) as reference,
    ):
        assert ours.engine._has_state_kernels
        compare(ours, reference, dtype, HYBRID_TOLERANCES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_without_kernels(name, dtype, monkeypatch):
    """Operations of torch in their place, which a graph replays too."""
    monkeypatch.setattr(engine, "states_are_supported", lambda *_: False)
    model = hybrid_model(name)
    with (
        open_hybrid(TorchEngine.open, model, dtype, "native", CudaMemory()) as ours,
        open_hybrid(ReferenceEngine, model, dtype, "native", HostMemory()) as reference,
    ):
        compare(ours, reference, dtype, HYBRID_TOLERANCES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_replayed_step_is_an_eager_one(name, dtype, monkeypatch):
    model = hybrid_model(name)
    run = device.CudaDevice.run
    with (
        open_hybrid(TorchEngine.open, model, dtype, "native", CudaMemory()) as replayed,
        open_hybrid(TorchEngine.open, model, dtype, "native", CudaMemory()) as eager,
    ):
        found = rows_of(replayed, model.vocab_size)
        monkeypatch.setattr(device.CudaDevice, "run", lambda self, key, stream, work: run(self, None, stream, work))
        expected = rows_of(eager, model.vocab_size)
        assert len(replayed.engine._device.graphs) > 0
        assert len(eager.engine._device.graphs) == 0
    for row, wanted in zip(found, expected, strict=True):
        assert np.abs(row - wanted).max() <= TOLERANCES[dtype] / 10 * np.abs(wanted).max()


@ATTENTION
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", SHAPES)
def test_with_the_attention_kernels(head_dim, dtype, attention, tmp_path):
    heads, kv_heads = SHAPES[head_dim]
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 2}
    folder = write_model(tmp_path / "model", **changes, torch_dtype=dtype)
    assert_same(folder, dtype, attention)


def test_a_capturing_stream_is_refused():
    with InferenceSession.from_model(GOLDEN / "llama", engine="torch", **SIZES) as session:
        session.prefill([[1, 2]])
        session.decode([3])
        builder = session.engine.memory.create_stream().create_graph_builder()
        builder.begin_building()
        session.engine.use_profile(1)
        with pytest.raises(CaptureError, match="a step in PyTorch cannot be captured"):
            session.engine.enqueue(builder)
        builder.end_building()
        builder.close()


def test_a_torch_that_cannot_use_the_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(device, "gpu_failure", lambda index: "torch 9.9 without CUDA")
    with raises(EngineError, "torch", expected="cuda:0", got="torch 9.9 without CUDA"):
        device.CudaDevice(CudaMemory())
