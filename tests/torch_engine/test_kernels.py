"""The torch engine with the attention kernels, on the emulated device, whose addresses are those of the host: torch computes there too.

The emulated device runs what is enqueued when it is waited for, torch at once: so every launch is waited for.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.gguf_experts import Q4_K_M_EXPERTS, write_gguf_experts
from tests.helpers.gguf_files import Q4_K_M, write_q4_k_m
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.helpers.models import HYBRID_TOLERANCES, changed_model, hybrid_model, sinks_model, write_model
from tests.helpers.quantized_models import write_fp8, write_gptq, write_nvfp4
from tests.helpers.token_trees import path_to
from tests.paths import GOLDEN
from tests.simt.standin import needs_standin
from tests.torch_engine.gemma4_in_blocks import write_gemma4_in_blocks
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from trt_kvcache import HostMemory, HybridCacheManager, InferenceSession, KVCacheManager, ReferenceEngine  # noqa: E402
from trt_kvcache.builder.torch_memory import TorchMemory  # noqa: E402
from trt_kvcache.cache.edge_llm import make_cache  # noqa: E402
from trt_kvcache.checkpoint import Checkpoint  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config, decoder_cache_config  # noqa: E402
from trt_kvcache.engine.quantized_kv import QuantizedKV  # noqa: E402
from trt_kvcache.model import MlpConfig, RoutedMlpConfig  # noqa: E402
from trt_kvcache.torch_engine import (  # noqa: E402
    TorchEngine,
    engine,
    kernel_adapted_projections,
    kernel_experts,
    kernel_projections,
    kernel_router,
    kernels,
    packed_projections,
    row_lookup,
    state_kernels,
    tiled_experts,
)
from trt_kvcache.torch_engine.device import HostDevice  # noqa: E402
from trt_kvcache.torch_engine.device_views import DeviceViews  # noqa: E402
from trt_kvcache.torch_engine.experts import FixedProducts, SortedProducts  # noqa: E402
from trt_kvcache.torch_engine.operations import Elementwise, Experts, Projections  # noqa: E402
from trt_kvcache.torch_engine.routed_mlp import RoutedMlp  # noqa: E402
from trt_kvcache.torch_engine.row_lookup import HostRows  # noqa: E402
from trt_kvcache.torch_engine.stored_rows import StoredRows  # noqa: E402

pytestmark = [needs_standin, pytest.mark.device]

SIZES = {"max_batch_size": 2, "max_sequence_length": 24}
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}

#: By module, the kernels that it launches.
LAUNCHED = {
    kernels: ("attend", "add_rms_norm", "activated_mul", "gated_mul", "qk_rms_norm"),
    kernel_adapted_projections: ("adapter_ranks", "adapter_outputs"),
    kernel_experts: ("expert_up", "expert_down"),
    tiled_experts: ("sort_by_expert", "expert_tiles_up", "expert_tiles_down", "weighted_sums"),
    kernel_router: ("router_logits", "choose_experts"),
    kernel_projections: ("linear", "linear_gated_mul"),
    packed_projections: ("packed_linear", "packed_linear_pair", "packed_linear_gated_mul", "packed_dequantize", "gather_columns"),
    row_lookup: ("embed",),
    state_kernels: ("causal_conv1d", "gated_delta_rule", "gated_rms_norm", "mamba2_scan"),
}


class EmulatedDevice(HostDevice):
    """Torch's CPU over the memory of the emulated device."""

    def __init__(self, memory):
        self._memory = memory

    def run(self, key, stream, work):
        self._memory.synchronize(stream)
        work()

    def view(self, tensor):
        dtype = getattr(torch, tensor.dtype)
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=dtype)
        assert tensor.is_contiguous
        return torch.frombuffer((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.ptr), dtype=dtype).reshape(tensor.shape)


@pytest.fixture
def calls(memory, monkeypatch):
    """How often each kernel was launched, by the engine that computes here; kernels of a gate with their activation."""
    found = Counter()

    def at_once(name, kernel):
        def call(*arguments):
            kernel(*arguments)
            memory.synchronize(arguments[-1])
            activations = [argument for argument in arguments if isinstance(argument, str)]
            found[" ".join([name, *activations])] += 1

        return call

    monkeypatch.setattr(engine, "torch_device", EmulatedDevice)
    for module, names in LAUNCHED.items():
        for name in names:
            monkeypatch.setattr(module, f"{name}_kernel", at_once(name, getattr(module, f"{name}_kernel")))
    return found


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 80)])
def test_sessions_agree_with_the_reference_engine(memory, calls, tmp_path, dtype, head_dim, attention):
    changes = {"head_dim": head_dim, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40}
    folder = write_model(tmp_path / "model", **changes, torch_dtype=dtype)
    with Checkpoint.open(folder) as checkpoint:
        kv = cache_config(checkpoint.config, **SIZES, dtype=dtype, attention=attention)
        ours = TorchEngine.open(checkpoint, kv=kv, max_prefill_length=7, attention=attention, memory=memory)
    with (
        InferenceSession(ours, KVCacheManager(kv, memory=memory)) as session,
        InferenceSession.from_model(folder, engine="reference", attention=attention, dtype=dtype, **SIZES) as reference,
    ):
        check_agreement(session, reference, TOLERANCES[dtype])
    assert calls["attend"] == calls["gated_mul silu"] + calls["linear_gated_mul silu"] == calls["add_rms_norm"] / 2
    assert calls["gated_mul silu"] == 2, "the first chunk, of two layers, has more rows than the kernels of few rows take"
    assert calls["linear_gated_mul silu"] == 6, "the second chunk and two decode steps have few"
    assert calls["linear"] == 3 * 6 + 4, "qkv, o and down of these, and the head of each of four steps"


@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_layers_that_differ_agree_with_the_reference_engine(memory, calls, attention):
    checkpoint = RandomCheckpoint(mixed_model(64, 128, 256, 64))  # for which the emulator has kernels
    kv = cache_config(checkpoint.config, **SIZES, dtype="float16", attention=attention)
    options = {"kv": kv, "max_prefill_length": 7, "attention": attention}
    host = HostMemory()
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=memory), KVCacheManager(kv, memory=memory)) as session,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), KVCacheManager(kv, memory=host)) as reference,
    ):
        check_agreement(session, reference, 1e-2)  # as without kernels, see test_mixed_layers.py; seen: 0.0055
    assert calls["attend"] == 5 * (calls["gated_mul silu"] + calls["linear_gated_mul silu"]) / 4 > 0, "the first layer has no SiLU"
    assert calls["gated_mul gelu_tanh"] + calls["linear_gated_mul gelu_tanh"] == calls["attend"] / 5, "but GELU"
    sums = 11 * calls["attend"] / 5
    assert calls["add_rms_norm"] == sums, "two of each layer and two of per-layer inputs, without one whose norms have different offsets"
    assert calls["activated_mul gelu_tanh"] == calls["activated_mul silu"] == calls["attend"] / 5, "two layers have per-layer inputs"
    assert calls["qk_rms_norm"] == 4 * calls["attend"] / 5, "of all heads, of each with an offset, of each after RoPE, and of queries alone"


class Computations(TorchDispatchMode):
    """Counts the operations of torch that are neither views nor allocations."""

    OTHERS = ("view", "flatten", "unflatten", "select", "split", "new_empty", "empty_like")

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.__name__.partition(".")[0]
        if name not in self.OTHERS:
            self.found[name] += 1
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("readers", [0, 2])
def test_layers_of_gemma4_are_launches_of_kernels_alone(memory, calls, readers, scheme):
    """A decode step of four layers, two of which may read K and V of others, against one of two layers."""
    found, host = [], HostMemory()
    for layers in (4, 2):
        sizes = {"head_dim": 64, "global_head_dim": 128, "hidden_size": 64, "hidden_size_per_layer_input": 16, "intermediate_size": 32}
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        shared = {"num_kv_shared_layers": readers if layers == 4 else 0}
        config = changed_model("gemma4-ple", **sizes, **shared, num_hidden_layers=layers, layer_types=kinds)
        checkpoint = RandomCheckpoint(config, scheme)
        kv = decoder_cache_config(config, **SIZES, dtype="float16", attention="plugin")
        options = {"kv": kv, "max_prefill_length": 7, "attention": "plugin"}
        ours, reference = TorchEngine.open(checkpoint, **options, memory=memory), ReferenceEngine(checkpoint, **options, memory=host)
        with (
            InferenceSession(ours, make_cache(kv, memory=memory)) as session,
            InferenceSession(reference, make_cache(kv, memory=host)) as expected,
        ):
            check_agreement(session, expected, 4e-2)  # torch without kernels: up to 0.024
            calls.clear()
            with Computations() as computations:
                session.decode([9, 7])
            found.append((computations.found, Counter(calls)))
    assert found[0][0] == found[1][0], "of the embeddings and the logits alone"
    product = "linear" if scheme is None else "packed_linear"
    expected = {
        "add_rms_norm": 3,
        "attend": 1,
        "qk_rms_norm": 1,
        "activated_mul gelu_tanh": 1,
        f"{product}_gated_mul gelu_tanh": 1,
        product: 5,
    }
    assert found[0][1] - found[1][1] == {name: 2 * count for name, count in expected.items()}


@pytest.mark.parametrize(("quantized", "tolerance"), [(None, 1e-2), (QuantizedKV("int8"), 3e-2)], ids=["float16", "int8"])
def test_logits_of_each_token_of_a_tree_are_those_of_its_path(memory, calls, quantized, tolerance):
    """As near as those of chains of other lengths: products of other sizes round K and V to other quantized values."""
    checkpoint, row, parents = RandomCheckpoint(mixed_model(64, 128, 256, 64)), [4, 9, 8, 7, 6, 5], [-1, 0, 0, 2, 2, 4]
    kv = decoder_cache_config(checkpoint.config, **SIZES, dtype="float16", attention="plugin", quantized=quantized)
    options = {"kv": kv, "dtype": "float16", "max_prefill_length": 7, "attention": "plugin", "max_logits_per_slot": "all"}
    with InferenceSession(TorchEngine.open(checkpoint, **options, memory=memory), make_cache(kv, memory=memory)) as session:
        session.prefill([[5, 6, 7, 8, 9, 3, 4], [7]])
        found = session.verify([row, row[:2]], [parents, parents[:2]])
        for index in range(len(row)):
            path = [row[place] for place in path_to(parents, index)]
            logits = session.verify([path, row[:2]])
            assert_close(found[0, index], logits[0, len(path) - 1], tolerance)
        assert_close(found[1, :2], logits[1, :2], tolerance)
    assert calls["attend"] == 5 * 8


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("model", "launched"),
    [
        ("lfm2-bias", {"causal_conv1d"}),
        ("bamba", {"causal_conv1d", "gated_rms_norm", "mamba2_scan"}),
        ("falcon_h1", {"causal_conv1d", "mamba2_scan"}),
        ("falcon_h1-bias", {"causal_conv1d", "gated_rms_norm", "mamba2_scan"}),
        ("mamba2", {"causal_conv1d", "gated_rms_norm", "mamba2_scan"}),
        ("qwen3_next", {"causal_conv1d", "gated_delta_rule", "gated_rms_norm"}),
    ],
)
def test_layers_with_states_agree_with_the_reference_engine(memory, calls, model, launched, dtype):
    with Checkpoint.open(GOLDEN / model) as checkpoint:
        config = decoder_cache_config(checkpoint.config, **SIZES, dtype=dtype)
        ours = TorchEngine.open(checkpoint, kv=config, max_prefill_length=7, memory=memory)
    with (
        InferenceSession(ours, HybridCacheManager(config, memory=memory)) as session,
        InferenceSession.from_model(GOLDEN / model, engine="reference", dtype=dtype, **SIZES) as reference,
    ):
        check_agreement(session, reference, TOLERANCES[dtype])
    assert set(calls) & set(LAUNCHED[state_kernels]) == launched


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "nemotron_h", "qwen3_next"])
def test_so_do_layers_with_states_and_attention_of_published_sizes(memory, calls, name):
    checkpoint, host = RandomCheckpoint(hybrid_model(name)), HostMemory()
    config = decoder_cache_config(checkpoint.config, **SIZES, dtype="float16", attention="plugin")
    options = {"kv": config, "max_prefill_length": 7, "attention": "plugin"}
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=memory), HybridCacheManager(config, memory=memory)) as session,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), HybridCacheManager(config, memory=host)) as reference,
    ):
        check_agreement(session, reference, HYBRID_TOLERANCES["float16"])
    assert calls["attend"] > 0
    assert calls["causal_conv1d"] > 0
    assert (calls["qk_rms_norm"] == calls["attend"]) == (name in ("lfm2", "qwen3_next")), "which have norms of q and k"


def test_layer_norm_agrees_with_the_reference_engine(memory, calls, tmp_path):
    changes = {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "head_dim": 64, "num_hidden_layers": 2}
    folder = write_model(tmp_path / "model", **changes, torch_dtype="float16")
    with Checkpoint.open(folder) as checkpoint:
        kv = cache_config(checkpoint.config, **SIZES, dtype="float16")
        ours = TorchEngine.open(checkpoint, kv=kv, max_prefill_length=7, memory=memory)
    with (
        InferenceSession(ours, KVCacheManager(kv, memory=memory)) as session,
        InferenceSession.from_model(folder, engine="reference", dtype="float16", **SIZES) as reference,
    ):
        check_agreement(session, reference, TOLERANCES["float16"])
    assert calls["attend"] > 0
    assert calls["add_rms_norm"] == 0, "which does not subtract the mean"


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 80)])
@pytest.mark.parametrize(
    ("name", "changes", "launched"),
    [
        ("qwen3_moe", {}, "expert_up silu_mul"),
        ("gpt_oss", {"intermediate_size": 40}, "expert_up"),  # clamped SwiGLU
        ("nemotron_h-latent", {"moe_intermediate_size": 40, "mamba_head_dim": 64, "ssm_state_size": 128}, "expert_up relu2"),
        (
            "gemma4-experts",
            {
                "moe_intermediate_size": 40,
                "global_head_dim": 64,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "expert_up gelu_tanh_mul",
        ),
    ],
)
def test_experts_agree_with_the_reference_engine(memory, calls, name, changes, launched, dtype, head_dim):
    checkpoint, host = RandomCheckpoint(changed_model(name, **changes, head_dim=head_dim)), HostMemory()
    config = decoder_cache_config(checkpoint.config, **SIZES, dtype=dtype, attention="plugin")
    options = {"kv": config, "max_prefill_length": 7, "attention": "plugin"}
    ours, reference = TorchEngine.open(checkpoint, **options, memory=memory), ReferenceEngine(checkpoint, **options, memory=host)
    with (
        InferenceSession(ours, make_cache(config, memory=memory)) as session,
        InferenceSession(reference, make_cache(config, memory=host)) as expected,
    ):
        check_agreement(session, expected, TOLERANCES[dtype])
    routers = [layer.mlp.router for layer in checkpoint.config.layers if isinstance(layer.mlp, RoutedMlpConfig)]
    assert calls[launched] == calls["expert_down"] == 3 * len(routers) > 0, "the second chunk and two decode steps have few rows"
    assert calls["router_logits"] == calls["choose_experts"] == 4 * len(routers)


@pytest.mark.parametrize("gated", [False, True])
def test_other_activations_of_experts_follow_the_kernels(memory, calls, gated):
    random, stream = torch.Generator().manual_seed(5), memory.create_stream()

    def normal(*shape):
        return torch.randn(shape, generator=random).half()

    config = MlpConfig(intermediate_size=24, activation="relu2" if gated else "gelu_tanh", gated=gated, bias=True)
    width = 48 if gated else 24
    experts = Experts(
        config=config, inputs=normal(6, width, 16), inputs_bias=normal(6, width), down=normal(6, 16, 24), down_bias=normal(6, 16)
    )
    rows, chosen = normal(3, 16), torch.tensor([[5, 0], [2, 5], [0, 1]])
    weights, others = torch.rand((3, 2), generator=random), FixedProducts(SortedProducts(Projections(Elementwise())), Elementwise())
    ours = kernel_experts.KernelExperts(others, Elementwise(), DeviceViews(memory), stream)
    expected = others(rows, chosen, weights, experts).float()
    assert (ours(rows, chosen, weights, experts) - expected).abs().max() <= 4e-3 * expected.abs().max()
    assert calls == {"expert_up linear": 1, "expert_down": 1}


@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_attention_sinks_agree_with_the_reference_engine(memory, calls, attention):
    checkpoint, host = RandomCheckpoint(sinks_model()), HostMemory()
    kv = cache_config(checkpoint.config, **SIZES, dtype="float16", attention=attention)
    options = {"kv": kv, "max_prefill_length": 9, "attention": attention}
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=memory), KVCacheManager(kv, memory=memory)) as session,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), KVCacheManager(kv, memory=host)) as reference,
    ):
        check_agreement(session, reference, TOLERANCES["float16"])
    assert calls["attend"] > 0
    assert calls["linear_gated_mul silu"] == calls["gated_mul silu"] == 0, "clamped SwiGLU is an operation of torch"


PACKED_SIZES = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}


def packed_sessions(memory, folder, dtype, quantize):
    """A session on the torch engine with packed weights, and one on the reference engine, which dequantizes them."""
    with Checkpoint.open(folder, quantize=quantize) as checkpoint:
        kv = cache_config(checkpoint.config, **SIZES, dtype=dtype)
        ours = TorchEngine.open(checkpoint, kv=kv, max_prefill_length=7, memory=memory)
    reference = InferenceSession.from_model(folder, engine="reference", dtype=dtype, quantize=quantize, **SIZES)
    return InferenceSession(ours, KVCacheManager(kv, memory=memory)), reference


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 80)])
@pytest.mark.parametrize("quantize", ["int4", "int4:128", "int8", "int4,head=int8"])
def test_packed_weights_agree_with_the_reference_engine(memory, calls, tmp_path, dtype, head_dim, quantize):
    folder = write_model(tmp_path / "model", **PACKED_SIZES, head_dim=head_dim, intermediate_size=96, torch_dtype="bfloat16")
    session, reference = packed_sessions(memory, folder, dtype, quantize)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    steps = calls["packed_linear_gated_mul silu"] / 2
    assert steps == calls["attend"] / 2 > 0, "of prefill too"
    assert calls["packed_linear"] == (7 if "head" in quantize else 6) * steps
    assert calls["packed_dequantize"] == calls["gated_mul silu"] == 0
    assert (calls["linear"] == 0) == ("head" in quantize), "the head alone has 16 bits"


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 80)])
@pytest.mark.parametrize("block", [(128, 128), (32, 32)], ids=str)
@pytest.mark.filterwarnings("ignore:(?s).*activations are not quantized")
def test_fp8_agrees_with_the_reference_engine(memory, calls, tmp_path, dtype, head_dim, block):
    """Blocks that end early, in which the projections of one input begin, and smaller ones than a projection."""
    sizes = {**PACKED_SIZES, "head_dim": head_dim, "intermediate_size": 160}
    session, reference = packed_sessions(memory, write_fp8(tmp_path / "model", block, **sizes, torch_dtype="bfloat16"), dtype, None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    steps = calls["packed_linear_gated_mul silu"] / 2
    assert steps == calls["attend"] / 2 > 0, "of prefill too"
    assert calls["packed_linear"] == 6 * steps
    assert calls["packed_dequantize"] == calls["gated_mul silu"] == 0
    assert calls["linear"] > 0, "the head has 16 bits"


def test_packed_rows_of_interleaved_rope_agree_with_the_reference_engine(memory, calls, tmp_path):
    changes = {"model_type": "ernie4_5", "use_bias": True, "head_dim": 80, "intermediate_size": 96}
    folder = write_model(tmp_path / "model", **PACKED_SIZES, **changes, torch_dtype="bfloat16")
    session, reference = packed_sessions(memory, folder, "bfloat16", "int4")
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["packed_linear"] > 0


@pytest.mark.parametrize("tie", [False, True])
def test_packed_weights_of_many_rows_are_dequantized_in_parts(memory, calls, tmp_path, monkeypatch, tie):
    monkeypatch.setattr(packed_projections, "MAX_PACKED_ROWS", 5)
    monkeypatch.setattr(packed_projections, "LAUNCH_ROWS", 2)
    monkeypatch.setattr(packed_projections, "WORKSPACE_WEIGHTS", 16 * 480)  # a tile of o
    changes = {"model_type": "qwen2", "tie_word_embeddings": tie, "head_dim": 80}  # with biases
    folder = write_model(tmp_path / "model", **PACKED_SIZES, **changes, intermediate_size=96, torch_dtype="bfloat16")
    session, reference = packed_sessions(memory, folder, "bfloat16", "int4" if tie else "int4,head=int4")
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["packed_dequantize"] > 0
    assert calls["gated_mul silu"] > 0
    assert calls["packed_linear"] > 0
    assert calls["packed_linear_gated_mul silu"] > 0


def test_packed_weights_that_the_kernels_cannot_join_have_launches_of_their_own(memory, calls, tmp_path):
    folder = write_model(tmp_path / "model", **PACKED_SIZES, head_dim=80, intermediate_size=40, torch_dtype="bfloat16")  # 2.5 tiles
    session, reference = packed_sessions(memory, folder, "bfloat16", "int8")
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["packed_linear_gated_mul silu"] == calls["linear_gated_mul silu"] == calls["packed_dequantize"] == 0
    steps = calls["attend"] / 2
    assert calls["packed_linear"] == 2 * 5 * steps > 0, "qkv, o, gate, up and down of two layers"


#: Fields of a model, True if q, k and v take their inputs in one order, launches of products in a layer, and of gathers.
ACT_ORDER_MODELS = {
    "one order": ({}, True, 3, 3),
    "an order of each matrix": ({}, False, 7, 6),
    "no gate": ({"model_type": "starcoder2"}, True, 4, 3),
}


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 80)])
@pytest.mark.parametrize("model", ACT_ORDER_MODELS)
def test_act_order_agrees_with_the_reference_engine(memory, calls, tmp_path, model, dtype, head_dim):
    """Down projections need no gather: gate and up have their outputs in its order."""
    fields, one_order, products, gathers = ACT_ORDER_MODELS[model]
    fields = {**PACKED_SIZES, **fields, "head_dim": head_dim, "intermediate_size": 96, "torch_dtype": "float16"}
    session, reference = packed_sessions(memory, write_gptq(tmp_path / "model", 32, one_order=one_order, **fields), dtype, None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    steps = calls["attend"] / 2
    assert calls["packed_linear_gated_mul silu"] == (2 * steps if model == "one order" else 0)
    assert calls["packed_linear"] == 2 * products * steps > 0
    assert calls["gather_columns"] == 2 * gathers * steps


@pytest.mark.parametrize("one_order", [False, True])
def test_act_order_of_many_rows_and_with_biases(memory, calls, tmp_path, monkeypatch, one_order):
    monkeypatch.setattr(packed_projections, "MAX_PACKED_ROWS", 5)
    monkeypatch.setattr(packed_projections, "LAUNCH_ROWS", 2)
    monkeypatch.setattr(packed_projections, "WORKSPACE_WEIGHTS", 16 * 480)
    fields = {"model_type": "granite", "attention_bias": True, "mlp_bias": True, "head_dim": 80, "intermediate_size": 160}
    folder = write_gptq(tmp_path / "model", 32, one_order=one_order, **PACKED_SIZES, **fields, torch_dtype="bfloat16")
    session, reference = packed_sessions(memory, folder, "bfloat16", None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["packed_dequantize"] > 0
    assert calls["packed_linear"] > 0
    assert calls["gather_columns"] > 0


def test_experts_with_act_order_are_dequantized(memory, calls, tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 80}
    with Checkpoint.open(write_gptq(tmp_path / "model", 32, "qwen3_moe", one_order=True, **sizes)) as checkpoint:
        session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16", is_packed=False)
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["packed_linear"] > 0


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 80)])
@pytest.mark.parametrize("inverse", [False, True], ids=["modelopt", "compressed-tensors"])
def test_nvfp4_agrees_with_the_reference_engine(memory, calls, tmp_path, dtype, head_dim, inverse):
    fields = {**PACKED_SIZES, "head_dim": head_dim, "intermediate_size": 96, "torch_dtype": "bfloat16"}
    session, reference = packed_sessions(memory, write_nvfp4(tmp_path / "model", one_factor=True, inverse=inverse, **fields), dtype, None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    steps = calls["attend"] / 2
    assert calls["packed_linear_gated_mul silu"] == 2 * steps > 0
    assert calls["packed_linear"] == 6 * steps
    assert calls["packed_dequantize"] == 0


def test_nvfp4_of_many_rows_and_of_several_factors(memory, calls, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_projections, "MAX_PACKED_ROWS", 5)
    monkeypatch.setattr(packed_projections, "WORKSPACE_WEIGHTS", 16 * 480)
    fields = {**PACKED_SIZES, "head_dim": 80, "intermediate_size": 96, "torch_dtype": "bfloat16"}
    session, reference = packed_sessions(memory, write_nvfp4(tmp_path / "model", one_factor=False, **fields), "bfloat16", None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["packed_dequantize"] > 0
    assert calls["packed_linear_gated_mul silu"] == 0
    assert calls["packed_linear"] % (2 * 7) == 0 < calls["packed_linear"], "q, k, v, o, gate, up and down of two layers"


@pytest.mark.parametrize("inverse", [False, True], ids=["modelopt", "compressed-tensors"])
def test_experts_in_nvfp4_agree_with_the_reference_engine(memory, calls, tmp_path, inverse):
    """Each matrix has a factor of its own."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 80}
    with Checkpoint.open(write_nvfp4(tmp_path / "model", "qwen3_moe", one_factor=False, inverse=inverse, **sizes)) as checkpoint:
        counted = sum(TorchMemory.of(checkpoint).packed.values())
        assert 0 < counted == sum(checkpoint.nbytes_of(name) for name in checkpoint.quantized_names)
        session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16")
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["expert_up silu_mul"] == calls["expert_down"] > 0
    assert calls["packed_linear"] > 0


#: Types of matrices, launches of a layer for one matrix beside that of gate and up, and for two; dtype and head dim. 320 inputs of o are no
#: super-blocks.
SUPER_BLOCK_MODELS = {
    "Q4_K_M": ({}, 2, 1, "float16", 64),
    "Q5_K": (dict.fromkeys(Q4_K_M, "Q5_K"), 3, 0, "float16", 64),
    "with Q8_0": ({"o_proj": "Q8_0", "k_proj": "Q8_0"}, 3, 1, "bfloat16", 80),
    "Q8_0 last": ({"q_proj": "Q6_K", "k_proj": "Q8_0", "v_proj": "Q8_0"}, 2, 1, "bfloat16", 64),
    "Q4_0, which has no launch for two": ({"v_proj": "Q4_0"}, 4, 0, "float16", 64),
}


@pytest.mark.parametrize("types", SUPER_BLOCK_MODELS)
@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_super_blocks_of_several_types_agree_with_the_reference_engine(memory, calls, tmp_path, types):
    changed, of_one, of_two, dtype, head_dim = SUPER_BLOCK_MODELS[types]
    write_q4_k_m(tmp_path / "model", changed, head_dim=head_dim)
    session, reference = packed_sessions(memory, tmp_path / "model", dtype, None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    steps = calls["attend"] / 2
    assert calls["packed_linear_gated_mul silu"] == 2 * steps > 0
    assert calls["packed_linear"] == (2 * of_one + 1) * steps, "two layers and the head"
    assert calls["packed_linear_pair"] == 2 * of_two * steps
    assert calls["linear"] == calls["packed_dequantize"] == 0


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_super_blocks_of_many_rows_and_gates_of_another_type(memory, calls, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_projections, "MAX_PACKED_ROWS", 5)
    monkeypatch.setattr(packed_projections, "WORKSPACE_WEIGHTS", 32 * 256)
    write_q4_k_m(tmp_path / "model", {"gate_proj": "Q5_K"}, tie_word_embeddings=True)
    session, reference = packed_sessions(memory, tmp_path / "model", "float16", None)
    with session, reference:
        check_agreement(session, reference, TOLERANCES["float16"])
    assert calls["packed_dequantize"] > 0
    assert calls["packed_linear"] > 0
    assert calls["packed_linear_gated_mul silu"] == 0
    assert calls["packed_linear_pair"] > calls["attend"], "q, k and v, and gate and up, of each step with few rows"
    assert calls["linear"] > 0, "a head that is the embedding has 16 bits"


@pytest.mark.parametrize("has_host_table", [False, True], ids=["device", "host"])
def test_a_per_layer_embedding_in_blocks_agrees_with_the_reference_engine(memory, calls, tmp_path, has_host_table):
    host, path = HostMemory(), write_gemma4_in_blocks(tmp_path)
    with Checkpoint.open(path) as checkpoint:
        config = decoder_cache_config(checkpoint.config, **SIZES, dtype="bfloat16", attention="native")
        options = {"kv": config, "max_prefill_length": 7}
        ours = TorchEngine.open(checkpoint, **options, memory=memory, has_host_table=has_host_table)
        reference = ReferenceEngine(checkpoint, **options, memory=host)
    assert isinstance(ours._weights.per_layer.embedding, StoredRows)
    assert isinstance(ours._weights.per_layer.embedding.blocks, HostRows) == has_host_table
    with (
        InferenceSession(ours, make_cache(config, memory=memory)) as session,
        InferenceSession(reference, make_cache(config, memory=host)) as expected,
    ):
        check_agreement(session, expected, TOLERANCES["bfloat16"])
    assert calls["embed"] == (4 if has_host_table else 0), "one launch a step"


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_per_layer_embedding_in_host_memory_gives_the_logits_of_one_on_the_device(memory, calls, dtype):
    found = []
    for has_host_table in (False, True):
        with Checkpoint.open(GOLDEN / "gemma4-ple") as checkpoint:
            config = decoder_cache_config(checkpoint.config, **SIZES, dtype=dtype, attention="native")
            ours = TorchEngine.open(checkpoint, kv=config, max_prefill_length=7, memory=memory, has_host_table=has_host_table)
        table = ours._weights.per_layer.embedding
        assert isinstance(table, HostRows) == has_host_table
        values = table.values if isinstance(table, HostRows) else table
        assert (values.dtype, values.shape) == (getattr(torch, dtype), (83, 6 * 12))
        with InferenceSession(ours, make_cache(config, memory=memory)) as session:
            steps = [session.prefill([[3, 1, 4, 1, 5, 9, 2, 6, 5], [70]]), session.decode([0, 3])]
            found.append([*steps, session.append([[1, 2, 3], [7]])])
    for host, device in zip(*found, strict=True):
        np.testing.assert_array_equal(host, device)
    assert calls["embed"] == 4


@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "qwen3_next"])
def test_layers_with_states_and_packed_weights_agree_with_the_reference_engine(memory, calls, name, scheme):
    checkpoint, host = RandomCheckpoint(hybrid_model(name), scheme), HostMemory()
    config = decoder_cache_config(checkpoint.config, **SIZES, dtype="float16", attention="plugin")
    options = {"kv": config, "max_prefill_length": 7, "attention": "plugin"}
    with (
        InferenceSession(TorchEngine.open(checkpoint, **options, memory=memory), HybridCacheManager(config, memory=memory)) as session,
        InferenceSession(ReferenceEngine(checkpoint, **options, memory=host), HybridCacheManager(config, memory=host)) as reference,
    ):
        check_agreement(session, reference, HYBRID_TOLERANCES["float16"])
    assert calls["packed_linear"] > 0


def packed_expert_sessions(memory, checkpoint, dtype, *, is_packed=True):
    """A session on the torch engine with packed experts, and one on the reference engine, which dequantizes them."""
    host = HostMemory()
    config = decoder_cache_config(checkpoint.config, **SIZES, dtype=dtype, attention="plugin")
    options = {"kv": config, "max_prefill_length": 7, "attention": "plugin"}
    ours, reference = TorchEngine.open(checkpoint, **options, memory=memory), ReferenceEngine(checkpoint, **options, memory=host)
    routed = [block.part for block in ours._weights.blocks if isinstance(block.part, RoutedMlp)]
    assert {part.experts.is_packed for part in routed} == {is_packed}
    return InferenceSession(ours, make_cache(config, memory=memory)), InferenceSession(reference, make_cache(config, memory=host))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts_in_mxfp4_agree_with_the_reference_engine(memory, calls, dtype):
    with Checkpoint.open(GOLDEN / "gpt_oss-mxfp4") as checkpoint:
        session, reference = packed_expert_sessions(memory, checkpoint, dtype)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    assert calls["expert_tiles_up"] == calls["expert_tiles_down"] == calls["sort_by_expert"] == 3, "a chunk of 14 rows"
    assert calls["expert_up"] == calls["expert_down"] == 3 * 3, "three steps"
    assert calls["packed_dequantize"] == 0


@pytest.mark.parametrize("scheme", ["int4", "int8", "int4:128"])
@pytest.mark.parametrize(
    ("name", "changes", "launched"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 32}, "expert_up silu_mul"),
        (
            "nemotron_h-latent",
            {"moe_intermediate_size": 48, "moe_latent_size": 32, "mamba_head_dim": 64, "ssm_state_size": 128},
            "expert_up relu2",
        ),
    ],
)
def test_rounded_experts_agree_with_the_reference_engine(memory, calls, name, changes, launched, scheme):
    checkpoint = RandomCheckpoint(changed_model(name, **changes, hidden_size=64, head_dim=80), scheme)
    session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16")
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls[launched] == calls["expert_down"] > 0


#: Types of experts, and the dtype: several types of super-blocks, one, and blocks of 32 inputs next to them.
EXPERT_TYPES = {
    "Q4_K_M": (Q4_K_M_EXPERTS, "float16"),
    "Q5_K": ({"exps": "Q5_K"}, "bfloat16"),
    "Q6_K and Q8_0": ({"down_exps": "Q8_0", "exps": "Q6_K"}, "float16"),
    "Q4_0 and Q5_0": ({"down_exps": "Q5_0", "exps": "Q4_0", "attn_q": "Q5_0"}, "bfloat16"),
}


@pytest.mark.parametrize(("types", "dtype"), EXPERT_TYPES.values(), ids=EXPERT_TYPES)
@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_experts_of_gguf_files_agree_with_the_reference_engine(memory, calls, tmp_path, types, dtype):
    with Checkpoint.open(write_gguf_experts(tmp_path, types)) as checkpoint:
        session, reference = packed_expert_sessions(memory, checkpoint, dtype)
    with session, reference:
        check_agreement(session, reference, TOLERANCES[dtype])
    assert calls["expert_up silu_mul"] == calls["expert_down"] > 0
    assert calls["packed_dequantize"] == 0


@pytest.mark.filterwarnings("ignore:(?s).*activations are not quantized")
def test_fp8_experts_agree_with_the_reference_engine(memory, calls, tmp_path):
    folder = write_fp8(tmp_path / "model", (32, 32), "qwen3_moe", hidden_size=64, moe_intermediate_size=32, head_dim=80)
    with Checkpoint.open(folder) as checkpoint:
        counted = sum(TorchMemory.of(checkpoint).packed.values())
        assert 0 < counted == sum(checkpoint.nbytes_of(name) for name in checkpoint.quantized_names)
        session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16")
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["expert_up silu_mul"] == calls["expert_down"] > 0
    assert calls["packed_linear"] > 0


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
@pytest.mark.parametrize("stored", ["mxfp4", "Q4_K_M"])
def test_packed_experts_of_many_rows(memory, calls, tmp_path, monkeypatch, stored):
    """In two parts, one of which is empty but for a row; nobody has chosen expert 2."""
    monkeypatch.setattr(tiled_experts, "_MAX_ROWS", 39)
    folder = GOLDEN / "gpt_oss-mxfp4" if stored == "mxfp4" else write_gguf_experts(tmp_path, Q4_K_M_EXPERTS)
    with Checkpoint.open(folder) as checkpoint:
        session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16")
    with session, reference:
        experts = next(block.part for block in session.engine._weights.blocks if isinstance(block.part, RoutedMlp)).experts
        count, _, inputs = experts.inputs.shape
        random, elementwise = torch.Generator().manual_seed(1), Elementwise()
        tiled = tiled_experts.TiledExperts(None, elementwise, DeviceViews(memory), memory.create_stream())
        rows = torch.randn((40, inputs), generator=random).bfloat16()
        chosen = torch.stack([torch.randperm(count - 1, generator=random)[:2] for _ in rows])
        chosen += chosen >= 2
        weights = torch.rand((40, 2), generator=random)
        found = tiled(rows, chosen, weights, experts)
        expected = SortedProducts(Projections(elementwise))(rows, chosen, weights, experts)
    assert (found.float() - expected.float()).abs().max() <= 2**-6 * expected.float().abs().max()
    assert calls["expert_tiles_down"] == calls["weighted_sums"] == 2


def test_packed_experts_take_what_memory_fit_counts(memory, calls):
    with Checkpoint.open(GOLDEN / "gpt_oss-mxfp4") as checkpoint:
        counted = sum(TorchMemory.of(checkpoint).packed.values())
        session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16")
    with session, reference:
        parts = [block.part for block in session.engine._weights.blocks if isinstance(block.part, RoutedMlp)]
        stacks = [stack.whole.nbytes for part in parts for stack in (part.experts.inputs, part.experts.down)]
    assert 1 <= sum(stacks) / counted <= 1.03 + 0.3, "of this small model more is padding"


def test_experts_of_no_whole_tiles_are_dequantized_when_they_are_read(memory, calls):
    """24 rows of gate, then 24 of up."""
    checkpoint = RandomCheckpoint(changed_model("qwen3_moe", head_dim=80), "int4")
    session, reference = packed_expert_sessions(memory, checkpoint, "bfloat16", is_packed=False)
    with session, reference:
        check_agreement(session, reference, TOLERANCES["bfloat16"])
    assert calls["expert_up silu_mul"] > 0
    assert calls["packed_linear"] > 0


def check_agreement(session, reference, tolerance):
    """Compare the logits of a ragged prefill in chunks and of decode steps."""
    prompts, steps = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8]], [[9, 7], [9, 3]]
    found = [[one.prefill(prompts), *(one.decode(tokens) for tokens in steps)] for one in (session, reference)]
    for logits, expected in zip(*found, strict=True):
        assert np.abs(logits - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "qwen3_next"])
def test_padding_of_buckets_changes_nothing(memory, calls, name):
    """As on a GPU, where widths are buckets: slots of uneven lengths, drafts, states, and a slot that is nearly full."""
    checkpoint = RandomCheckpoint(hybrid_model(name))
    config = decoder_cache_config(checkpoint.config, **SIZES, dtype="float16", attention="plugin")
    options = {"kv": config, "max_prefill_length": 12, "max_logits_per_slot": 12, "attention": "plugin", "memory": memory}
    found = []
    for buckets in ((), (1, 4, 12)):
        engine = TorchEngine.open(checkpoint, **options)
        engine.width_buckets = buckets
        with InferenceSession(engine, HybridCacheManager(config, memory=memory)) as session:
            logits = [session.prefill([[3, 1, 4, 1, 5, 9, 2, 6, 5], [35, 8]])]
            draft = session.verify([[9], [7, 3, 2]])
            session.accept([1, 3])
            logits += [draft[0, 0], draft[1], session.append([[1, 2, 3, 4, 5, 6], [8]]), session.decode([4, 5])]
            logits.append(session.append([[5] * 7, []])[0])
        found.append(logits)
    for one, other in zip(*found, strict=True):
        assert np.abs(one - other).max() <= HYBRID_TOLERANCES["float16"] / 4 * np.abs(one).max()
    assert calls["attend"] > 0
