"""``what_fits``: the largest numbers that fit, by the estimate of a build."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.assertions import raises
from tests.helpers.eagle3 import write_head, write_model as write_llama
from tests.helpers.gguf_experts import write_gguf_experts
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import write_model
from tests.helpers.mtp import write_mtp_model
from tests.helpers.quantized_models import ALL_CASES, GPTQ_CONFIG, gptq, write_gptq, write_nvfp4, write_quantized
from tests.paths import GOLDEN
from trt_kvcache import KVCacheConfig, estimate_build, what_fits
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.torch_memory import TorchMemory
from trt_kvcache.builder.what_fits import PACKED_KERNELS
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.adapter_inputs import AdapterInputs
from trt_kvcache.errors import ConfigError, RangeError
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.trt.module import TensorRT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 4096}
    return write_model(tmp_path_factory.mktemp("models") / "model", **sizes)


def test_the_next_token_and_the_next_slot_do_not_fit(model: Path) -> None:
    budget = 6_000_000
    for fit in what_fits(model, budget, max_batch_size=2, max_sequence_length=300):
        if fit.kv_scales is not None:
            continue
        quantize = None if fit.weights == "float16" else fit.weights

        def nbytes(slots: int, length: int, quantize: str | None = quantize) -> int:
            return estimate_build(model, max_batch_size=slots, max_sequence_length=length, quantize=quantize).device_nbytes

        assert nbytes(2, fit.longest_sequence) <= budget < nbytes(2, fit.longest_sequence + 1)
        assert nbytes(fit.largest_batch, 300) <= budget < nbytes(fit.largest_batch + 1, 300)
        assert fit.weights_nbytes == estimate_build(model, quantize=quantize).weights_nbytes


@pytest.mark.parametrize("name", ["dense", "mixtral"])
def test_adapters_take_their_bytes(model: Path, name: str) -> None:
    """The same memory holds as much with as many bytes more: with TensorRT, and with PyTorch."""
    folder = model if name == "dense" else GOLDEN / name
    nbytes = AdapterInputs.of(Checkpoint.read_config(folder), rank=16).nbytes(Checkpoint.read_config(folder), "float16")
    share = 0 if name == "dense" else 1 / 32  # of the budget, for graphs
    budget = 6_000_000 if name == "dense" else 100_000_000
    plain = what_fits(folder, budget, max_sequence_length=30, dtype="float16")
    adapted = what_fits(folder, math.ceil(budget + nbytes / (1 - share)), max_sequence_length=30, dtype="float16", adapters_rank=11)
    assert {fit.engine for fit in plain} == {"tensorrt" if name == "dense" else "torch"}
    assert [fit.largest_batch for fit in adapted] == [fit.largest_batch for fit in plain]
    fewer = what_fits(folder, budget, max_sequence_length=30, dtype="float16", adapters_rank=5000)
    assert all(fit.largest_batch < other.largest_batch for fit, other in zip(fewer, plain, strict=True))


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "experts"])
def test_a_draft_head_takes_its_bytes(tmp_path: Path, kind: str) -> None:
    """With TensorRT, and with PyTorch for a model with experts, whose head shares embedding and language model head."""
    if kind == "eagle3":
        model = write_llama(tmp_path / "model")
        head = str(write_head(tmp_path / "head", model))
    else:
        model, head = write_mtp_model(tmp_path / "model", family="qwen3_5_moe" if kind == "experts" else "qwen3_5"), "mtp"
    sizes: dict[str, Any] = {"max_sequence_length": 30, "dtype": "float16"}
    budget = 200_000_000 if kind == "experts" else 60_000_000
    plain, drafting = (what_fits(model, budget, **sizes, draft_head=one) for one in (None, head))
    assert {fit.engine for fit in drafting} == {"torch" if kind == "experts" else "tensorrt"}
    assert all(0 < fit.largest_batch < other.largest_batch for fit, other in zip(drafting, plain, strict=True))
    if kind == "experts":
        with Checkpoint.open(model) as checkpoint, Checkpoint.open_mtp_head(model) as own:
            memory = TorchMemory.of(checkpoint, head=own)
            cache = memory.cache_for(3, 30, "float16", None)
            [with_head, without] = (
                one.device_nbytes(cache, "float16", max_prefill_length=11, gpu_nbytes=0) for one in (memory, replace(memory, head=None))
            )
            states, of_head = 3 * (30 + 11 + 2 * 11 + 1) * 40 * 2, TorchMemory.of(own)
            assert with_head - without == states + of_head.device_nbytes(
                of_head.cache_for(3, 30, "float16", None), "float16", max_prefill_length=11, gpu_nbytes=0
            )
            of_model = own.config.vocab_size * own.config.hidden_size * 2
            assert of_head.weights_nbytes("float16") < sum(math.prod(shape) for shape in tensor_shapes(own.config).values()) * 2 + of_model


@pytest.mark.parametrize("name", ["gemma4-ple", "gemma4-experts-ple"])
def test_a_table_in_host_memory_takes_no_bytes_of_the_gpu(name: str) -> None:
    model = Checkpoint.read_config(GOLDEN / name)
    assert model.per_layer_embedding is not None
    nbytes = math.prod(model.per_layer_embedding.shape(model.num_layers)) * 2
    with Checkpoint.open(GOLDEN / name) as checkpoint:
        on_device, on_host = (TorchMemory.of(checkpoint, has_host_table=place).weights_nbytes(model.dtype) for place in (False, True))
    assert on_device - on_host == nbytes
    fits = what_fits(GOLDEN / name, 10**9, per_layer_table="host")
    assert {fit.engine for fit in fits} == {"torch"}
    assert fits[0].weights_nbytes == on_host
    assert max(fit.weights_nbytes for fit in fits[1:]) <= on_host
    for given in ("cpu", None):
        with raises(ConfigError, "per_layer_table", expected="one of device, host", got=repr(given)):
            what_fits(GOLDEN / name, 10**9, per_layer_table=given)  # type: ignore[arg-type]
    with raises(ConfigError, "per_layer_table", expected="device", got="llama"):
        what_fits(GOLDEN / "llama", 10**9, per_layer_table="host")


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_installed_tensorrt_decides_about_attention_and_v_outputs(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str | None
) -> None:
    """Full TensorRT 10.13 has plugin attention only, and V as outputs: memory that 10.14 needs too, and 10.15 does not."""

    def slots(release: tuple[int, int], budget: int) -> int:
        full = TensorRT(module=object(), flavour="tensorrt", version=".".join(map(str, release)), log=None)  # type: ignore[arg-type]
        monkeypatch.setattr("trt_kvcache.builder.what_fits.installed_tensorrt", lambda flavour: full)
        fits = what_fits(model, budget, max_sequence_length=300)
        return next(fit.largest_batch for fit in fits if fit.weights == "float16" and fit.kv_dtype == (kv_dtype or "float16"))

    options: dict[str, Any] = {"max_sequence_length": 300, "attention": "plugin", "kv_dtype": kv_dtype}
    plain, marked = (
        estimate_build(model, max_batch_size=3, **options, flavour="tensorrt", v_outputs=one).device_nbytes for one in (False, True)
    )
    assert [slots((10, minor), marked) for minor in (12, 13, 14, 15)] == [3, 3, 3, 3]
    assert [slots((10, minor), marked - 1) for minor in (12, 13, 14, 15)] == [3, 2, 2, 3]
    assert [slots((10, minor), plain) for minor in (12, 13, 14, 15)] == [3, 2, 2, 3]


def test_k_and_v_in_8_bits_count_their_scales(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        given = BuildOptions(max_batch_size=2, max_sequence_length=300, attention="plugin")
        cache = ResolvedOptions.of_model(given, checkpoint.config).cache_for(checkpoint.config)
    assert isinstance(cache, KVCacheConfig)
    estimate = estimate_build(model, max_batch_size=2, max_sequence_length=300, attention="plugin")
    packed = KVCacheConfig(
        layers=cache.layers, max_batch_size=2, max_sequence_length=300, dtype="int8", layout=cache.layout, scales="token"
    )
    exact = estimate.device_nbytes - cache.nbytes + packed.nbytes
    for budget, batch in ((exact, 2), (exact - 1, 1)):
        fits = what_fits(model, budget, max_sequence_length=300)
        (fit,) = [one for one in fits if (one.weights, one.kv_scales) == ("float16", "token")]
        assert (fit.largest_batch, fit.kv_dtype) == (batch, "int8")


def test_only_a_checkpoint_with_static_scales_has_rows_for_them(tmp_path: Path, model: Path) -> None:
    assert {fit.kv_scales for fit in what_fits(model, 10**9)} == {None, "token"}
    quantize, config = ALL_CASES["compressed-int8"]
    for name, shape, scales in (("tensor", (1,), "tensor"), ("head", (2,), "head")):
        folder = tmp_path / name
        write_quantized(folder, str(model), quantize, {**config, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}})
        tensors = load_file(folder / "model.safetensors")
        layers = {f"model.layers.{i}.self_attn.{side}_scale": np.full(shape, 0.5, np.float32) for i in range(2) for side in "kv"}
        save_file({**tensors, **layers}, folder / "model.safetensors")
        fits = what_fits(folder, 10**9)
        assert [(fit.kv_dtype, fit.kv_scales) for fit in fits] == [("float16", None), ("int8", "token"), ("float8_e4m3fn", scales)]
        static, by_token = (estimate_build(folder, kv_dtype="fp8", kv_scales=kind).cache_nbytes for kind in (scales, "token"))
        assert static < by_token


def test_weights_of_an_engine_in_segments_have_a_dense_embedding(model: Path) -> None:
    fits = {(fit.weights, fit.kv_scales): fit.weights_nbytes for fit in what_fits(model, 10**9)}
    rounded = "int4:128,embedding=int8,head=int8"
    for quantize in ("int8", rounded):
        assert fits[quantize, "token"] == fits[quantize, None]
    options = {"quantize": rounded, "attention": "plugin", "plugin_layers": "segments"}
    assert estimate_build(model, **options).weights_nbytes > fits[rounded, "token"]


def test_a_gguf_file_is_what_it_is(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model", "Q4_0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert {fit.weights for fit in what_fits(tmp_path / "model", 10**9)} == {"GGUF Q4_0"}
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            packed = {name: checkpoint.nbytes_of(name) for name in checkpoint.quantized_names}
        norms = {name: math.prod(shape) * 2 for name, shape in tensor_shapes(checkpoint.config).items() if name not in packed}
        assert estimate_build(tmp_path / "model").weights_nbytes == sum(packed.values()) + sum(norms.values())


def test_formats_that_a_model_does_not_take_are_left_out(model: Path) -> None:
    assert {fit.weights for fit in what_fits(model, 0)} == {"float16", "int8", "int4:32", "int4:128", "int4:128,embedding=int8,head=int8"}
    narrow = what_fits(GOLDEN / "qwen2-tied", 10**9)  # 48 inputs, no head of its own, heads that the kernels do not have
    weights = ("float16", "int8", "int4:32", "int4:128", "int4:128,embedding=int4:128")
    assert [(fit.weights, fit.kv_scales) for fit in narrow] == [(one, None) for one in weights]


def test_a_quantized_checkpoint_is_what_it_is(tmp_path: Path, model: Path) -> None:
    write_quantized(tmp_path / "model", str(model), gptq(group_size=32), {**GPTQ_CONFIG, "group_size": 32})
    assert {fit.weights for fit in what_fits(tmp_path / "model", 10**9)} == {"GPTQ int4 in groups of 32"}


def test_formats_that_the_gpus_do_not_have_are_left_out(model: Path) -> None:
    turing = {(fit.weights, fit.kv_scales) for fit in what_fits(model, 10**9, compute_capabilities=["7.5"])}
    assert turing == {("float16", None), ("int8", None)}  # no INT4, no plugin attention
    ampere = {fit.weights for fit in what_fits(model, 10**9, compute_capabilities=["8.6"])}
    assert ampere == {fit.weights for fit in what_fits(model, 10**9)}


def session_nbytes(model: Path, quantize: str | None, slots: int, length: int, budget: int) -> int:
    """GPU memory of a session with the PyTorch engine."""
    with Checkpoint.open(model) as checkpoint:
        memory = TorchMemory.of(checkpoint)
    memory = memory if quantize is None else memory.rounded(quantize)
    cache = memory.cache_for(slots, length, "float16", None)
    assert cache is not None
    return memory.device_nbytes(cache, "float16", max_prefill_length=min(length, 512), gpu_nbytes=budget)


@pytest.mark.parametrize("quantize", [None, "int4:32"])
def test_a_model_with_experts_fits_into_memory_with_pytorch(quantize: str | None) -> None:
    model, budget = GOLDEN / "qwen3_moe", 70_000_000
    fits = what_fits(model, budget, max_batch_size=2, max_sequence_length=30)
    assert [fit.weights for fit in fits] == ["float16", "int8", "int4:32", "int4:128"]
    assert {fit.engine for fit in fits} == {"torch"}
    (fit,) = [fit for fit in fits if fit.weights == (quantize or "float16")]
    assert fit.longest_sequence == 96, "the positions of the model"
    batch = fit.largest_batch
    assert session_nbytes(model, quantize, batch, 30, budget) <= budget < session_nbytes(model, quantize, batch + 1, 30, budget)


def test_a_model_with_experts_that_plugin_layers_compute_fits_with_tensorrt(tmp_path: Path) -> None:
    """By the estimate of a build. With 36 inner activations PyTorch is left."""
    model = write_model(tmp_path / "model", **EXPERTS)
    fits = what_fits(model, 100_000_000, max_sequence_length=64)
    assert {fit.engine for fit in fits} == {"tensorrt"}
    assert {fit.kv_scales for fit in fits} == {None, "token"}
    for fit in fits[:1]:
        quantize = None if fit.weights == "float16" else fit.weights
        sizes = {"max_sequence_length": 64, "quantize": quantize}
        found = [estimate_build(model, max_batch_size=fit.largest_batch + more, **sizes).device_nbytes for more in (0, 1)]
        assert found[0] <= 100_000_000 < found[1]
    other = write_model(tmp_path / "other", **{**EXPERTS, "moe_intermediate_size": 36})
    assert {fit.engine for fit in what_fits(other, 100_000_000)} == {"torch"}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_an_estimate_counts_weights_and_workspace_of_experts(tmp_path: Path, quantize: str | None) -> None:
    """The router's weight is float32; the workspace has its results, and the order by expert and the products of each pair."""
    model = write_model(tmp_path / "model", **EXPERTS)
    with Checkpoint.open(model, quantize=quantize) as checkpoint:
        names = {
            name: (2 + 2 * name.endswith("mlp.gate.weight")) * math.prod(shape) for name, shape in tensor_shapes(checkpoint.config).items()
        }
        names |= {name: checkpoint.nbytes_of(name) for name in checkpoint.quantized_names}
    sizes = {"quantize": quantize, "max_sequence_length": 64}
    assert estimate_build(model, **sizes).weights_nbytes == sum(names.values())
    few, many = (estimate_build(model, max_prefill_length=tokens, **sizes).activations_nbytes for tokens in (32, 64))
    dense = write_model(tmp_path / "dense", model_type="qwen3", hidden_size=64, head_dim=64, intermediate_size=1)
    other_few, other_many = (
        estimate_build(dense, max_prefill_length=tokens, max_sequence_length=64).activations_nbytes for tokens in (32, 64)
    )

    def workspace(tokens: int) -> int:
        pairs = 2 * tokens
        of_pairs = (pairs * 32 * 2, pairs * 4, (pairs // 64 + 5) * 16, pairs * 64 * 2)  # inner, order, row tiles, products
        return sum(-(-size // 256) * 256 for size in (tokens * 5 * 4, tokens * 2 * 4, tokens * 2 * 4, *of_pairs))

    assert (many - few) - (other_many - other_few) == workspace(64) - workspace(32)


def test_weights_of_experts_are_counted_in_their_dtypes() -> None:
    with Checkpoint.open(GOLDEN / "qwen3_moe") as checkpoint:
        sizes = {name: math.prod(shape) for name, shape in tensor_shapes(checkpoint.config).items()}
    routers = sum(size for name, size in sizes.items() if name.endswith("mlp.gate.weight"))
    fits = {fit.weights: fit.weights_nbytes for fit in what_fits(GOLDEN / "qwen3_moe", 10**9)}
    assert fits["float16"] == 2 * (sum(sizes.values()) - routers) + 4 * routers
    with Checkpoint.open(GOLDEN / "gpt_oss-mxfp4") as checkpoint:
        packed = sum(checkpoint.nbytes_of(name) for name in checkpoint.quantized_names)
        others = sum(checkpoint.nbytes_of(name) for name in checkpoint.tensor_names) - packed
    (fit,) = [fit for fit in what_fits(GOLDEN / "gpt_oss-mxfp4", 10**9) if fit.kv_scales is None]
    assert (fit.weights, fit.engine) == ("MXFP4", "torch")
    assert packed + others < fit.weights_nbytes < 1.03 * packed + 1.1 * others, "routers are float32"


#: A model whose heads and experts are of sizes that the kernels have.
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 64, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip

EXPERT_SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 64}


def test_experts_with_act_order_have_16_bits(tmp_path: Path) -> None:
    """Other matrices are packed."""
    with Checkpoint.open(write_gptq(tmp_path / "model", group_size=32, one_order=True, name="qwen3_moe", **EXPERT_SIZES)) as checkpoint:
        packed, names = TorchMemory.of(checkpoint).packed, set(checkpoint.quantized_names)
    experts = {name for name in names if ".experts." in name}
    assert experts
    assert set(packed) == names - experts


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_super_blocks_that_pytorch_keeps_packed_have_their_stored_size(tmp_path: Path) -> None:
    """Those of experts too. Q5_0 takes the bytes of Q8_0; the embedding, and matrices in Q5_1, have 16 bits."""
    pytest.importorskip("gguf")
    of_attention = {"attn_q": "Q5_K", "attn_k": "Q8_0", "attn_v": "Q5_1", "attn_output": "Q5_0"}
    types = {**of_attention, "output": "Q6_K", "exps": "Q4_K", "token_embd": "Q4_K"}
    path = write_gguf_experts(tmp_path, types, head_dim=16)
    with Checkpoint.open(path) as checkpoint:
        packed, shapes = TorchMemory.of(checkpoint).packed, tensor_shapes(checkpoint.config)
    bits = {"lm_head": 210 / 32, ".experts.": 144 / 32, "q_proj": 176 / 32, "k_proj": 34 / 4, "o_proj": 34 / 4}
    expected = {
        name: math.prod(shape) * bits[part] / 8 for name, shape in shapes.items() for part in bits if part in name and len(shape) == 2
    }
    assert dict(packed) == expected
    (fit,) = [fit for fit in what_fits(path, 10**9, dtype="bfloat16") if fit.kv_scales is None]
    assert (fit.weights, fit.engine) == ("GGUF", "torch")


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_super_blocks_fit_as_a_build_with_packed_kernels_stores_them(tmp_path: Path) -> None:
    """Before the roundings; not in float32, for which there are no such kernels."""
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import write_q4_k_m

    write_q4_k_m(tmp_path / "model")
    fits = [fit for fit in what_fits(tmp_path / "model", 10**9) if fit.kv_scales is None]
    assert [fit.weights for fit in fits][:3] == ["bfloat16", PACKED_KERNELS, "int8"]
    built = estimate_build(tmp_path / "model", attention="plugin", packed_kernels=True)
    assert fits[1].weights_nbytes == built.weights_nbytes < fits[0].weights_nbytes / 2
    assert PACKED_KERNELS not in {fit.weights for fit in what_fits(tmp_path / "model", 10**9, dtype="float32")}


def test_fp4_fits_as_a_build_with_packed_kernels_stores_it(tmp_path: Path) -> None:
    """Elsewhere than on GPUs that have it."""
    model = write_nvfp4(tmp_path / "model", one_factor=False, hidden_size=64, head_dim=64, intermediate_size=96, torch_dtype="bfloat16")
    wide, packed = (fit for fit in what_fits(model, 10**9) if fit.kv_scales is None)
    assert (wide.weights, packed.weights) == ("ModelOpt NVFP4", PACKED_KERNELS)
    assert packed.weights_nbytes < wide.weights_nbytes
    assert PACKED_KERNELS not in {fit.weights for fit in what_fits(model, 10**9, compute_capabilities=["12.0"])}


def test_in_float32_pytorch_has_neither_packed_weights_nor_k_and_v_in_8_bits(tmp_path: Path) -> None:
    config = {**json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()), "head_dim": 64, "moe_intermediate_size": 36}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fits = {dtype: what_fits(tmp_path, 10**9, dtype=dtype) for dtype in ("float16", "float32")}
    assert {fit.kv_scales for fit in fits["float16"]} == {None, "token"}
    assert {fit.kv_scales for fit in fits["float32"]} == {None}
    assert len({fit.weights_nbytes for fit in fits["float32"]}) == 1


def test_nothing_fits_into_nothing(model: Path) -> None:
    assert {(fit.longest_sequence, fit.largest_batch) for fit in what_fits(model, 0)} == {(0, 0)}
    with raises(RangeError, "nbytes", "at least 0", -1):
        what_fits(model, -1)
