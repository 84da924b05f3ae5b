"""Networks of every variant of attention that a release has are defined and built, and engines opened and enqueued: by this package, over
the real bindings.
"""

from __future__ import annotations

import gc
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.bindings.network import FLOAT, INT32
from tests.checkpoint.folders import edit_tensors
from tests.helpers.adapters import Q_PROJ, write_adapter
from tests.helpers.assertions import raises
from tests.helpers.eagle3 import write_head
from tests.helpers.fake_tensorrt import FakeGpuMemory, enqueue, make_ready, set_shapes, tensor
from tests.helpers.models import write_model
from tests.helpers.quantized_models import ALL_CASES, write_quantized
from tests.paths import GOLDEN
from trt_kvcache import InferenceSession, KVCacheManager, build_engine
from trt_kvcache.builder import resolved_options
from trt_kvcache.builder.attention_choice import UNSAFE_NATIVE
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, attention_variant, why_not_native
from trt_kvcache.engine.bindings import BindingPlan
from trt_kvcache.engine.hidden_tensors import HIDDEN_INPUTS, HIDDEN_STATES
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.folder import DRAFT_HEAD_FOLDER, EngineFolder
from trt_kvcache.errors import BindingError, BuildError, ConfigError, EngineError, ShapeError
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plan_inspection import inspect_plan
from trt_kvcache.trt.plugin import creator as creator_module, operation_plugin, plugin as plugin_module
from trt_kvcache.trt.plugin.operation_enqueue import OperationEnqueue
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

SIZES = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}
LAYERS = 2

#: What K and V are stored as, whether the checkpoint has scales, and what a plugin stores of both.
KVForm = tuple[str, bool, dict[str, int]]


_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1, "rope_theta": 1e4}

#: ``config.json`` of one model of each family that differs from Llama in layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"hidden_size": 256, "sliding_window": 7, "sliding_window_pattern": 2},
    "ernie4_5": {"use_bias": True},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7, "sliding_window_pattern": 2},
    "gemma4_text": {
        "layer_types": ["full_attention"] * LAYERS,
        "num_kv_shared_layers": 1,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 12,
    },
    "glm4": {"hidden_size": 64},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 5.0}},
    "ministral3": {"rope_parameters": _YARN},
    "mistral": {"sliding_window": 7},
    "olmo2": {},
    "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"hidden_size": 256, "partial_rotary_factor": 0.75},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 7},
    "smollm3": {"no_rope_layers": [1, 0]},
}

#: Families whose RoPE comes before the norms of q and k: a layer of its own, also beside our plugin.
ROTATED_BEFORE_NORMS = ("hunyuan_v1_dense",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", head_dim=64, num_hidden_layers=LAYERS)


@pytest.fixture(params=ATTENTION_VARIANTS)
def variant(request: pytest.FixtureRequest, full: TensorRT) -> str:
    """A variant that is built with this release."""
    if not is_built(full, request.param):
        pytest.skip(f"{request.param} is refused with {full}")
    return str(request.param)


def is_built(full: TensorRT, name: str) -> bool:
    """Return whether a variant is built with a release: it has what the variant needs, and computes it right."""
    first, end = UNSAFE_NATIVE
    return full.supports(attention_variant(name)) and not (name == "native" and first <= full.release < end)


def recorded_tensors(full: TensorRT, config: EngineFolderConfig) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return shape and type, by name, of all that ``config.json`` says a network has."""
    inputs = (*config.adapter_tensors, *config.embedding_tensors, *config.tree_tensors)
    specs = (*map(packed_as_int32, config.tensors), *inputs, *config.hidden_tensors, *config.v_outputs)
    return {spec.name: (spec.shape, int(full.data_type(spec.dtype))) for spec in specs}


@pytest.fixture
def built(stand_in: Any, full: TensorRT, model: Path, tmp_path: Path, variant: str) -> Path:
    """An engine folder with an engine in one piece."""
    fractions: list[float | None] = []
    report = build_engine(
        model, tmp_path / "engine", **SIZES, attention=variant, flavour="tensorrt", progress=lambda stage, done: fractions.append(done)
    )
    assert 0.5 in fractions  # TensorRT's progress came through
    assert {layer.variant for layer in report.attention} == {variant}
    return report.path


@pytest.mark.parametrize("name", ATTENTION_VARIANTS)
def test_a_variant_is_built_or_refused_before_anything_is_written(full: TensorRT, model: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "engine"
    if is_built(full, name):
        assert build_engine(model, target, **SIZES, attention=name, flavour="tensorrt").path == target
        return
    with raises(ConfigError, "attention", expected="plugin", got=(name, str(full))):
        build_engine(model, target, **SIZES, attention=name, flavour="tensorrt")
    assert not target.exists()


def test_auto_is_plugin_attention_in_every_release(full: TensorRT, model: Path, tmp_path: Path) -> None:
    config = EngineFolder.open(build_engine(model, tmp_path / "engine", **SIZES, flavour="tensorrt").path).config
    assert config.attention_variant == "plugin"
    assert config.attention_reason


def test_the_network_has_the_tensors_of_the_engine_folder(stand_in: Any, full: TensorRT, built: Path) -> None:
    config, network = EngineFolder.open(built).config, stand_in.networks[-1]
    assert network.tensors() == recorded_tensors(full, config)
    names = [layer.name for layer in network.layers]
    assert len(set(names)) == len(names)
    assert all(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_of_other_families(stand_in: Any, full: TensorRT, tmp_path: Path, variant: str, family: str) -> None:
    model = write_model(tmp_path / "model", model_type=family, head_dim=64, num_hidden_layers=LAYERS, **FAMILIES[family])

    def build() -> Path:
        return build_engine(model, tmp_path / "engine", **SIZES, attention=variant, flavour="tensorrt").path

    with Checkpoint.open(model) as checkpoint:
        obstacle = why_not_native(checkpoint.config, SIZES["max_sequence_length"])
    if variant == "native" and obstacle is not None:
        with raises(ConfigError, "attention", expected="plugin", got="native"):
            build()
        return
    if family in ROTATED_BEFORE_NORMS and not hasattr(full.module.INetworkDefinition, "add_rotary_embedding"):
        with pytest.raises(BuildError, match="rotary_embedding"):
            build()
        return
    config, network = EngineFolder.open(build()).config, stand_in.networks[-1]
    assert network.tensors() == recorded_tensors(full, config)
    names = [layer.name for layer in network.layers]
    assert len(set(names)) == len(names)


#: Quantized checkpoints, of each form of dequantize layers.
QUANTIZED = {name: ALL_CASES[name] for name in ("gptq-order", "awq", "compressed-int8", "compressed-fp8-tensor", "modelopt-nvfp4")}


@pytest.mark.filterwarnings("ignore:(?s).*are not")
@pytest.mark.parametrize("case", QUANTIZED)
def test_networks_with_packed_weights(stand_in: Any, full: TensorRT, tmp_path: Path, case: str) -> None:
    source = write_model(tmp_path / "dense", head_dim=64, hidden_size=32, intermediate_size=64)
    quantize, config = QUANTIZED[case]
    write_quantized(tmp_path / "model", str(source), quantize, {**config, "modules_to_not_convert": []})

    def build() -> None:
        build_engine(tmp_path / "model", tmp_path / "engine", **SIZES, attention="plugin", flavour="tensorrt")

    if case == "modelopt-nvfp4" and not hasattr(full.module.IDequantizeLayer, "block_shape"):
        with raises(BuildError, "dequantize`", expected="scales of blocks", says=str(full)):
            build()
        return
    build()
    kinds = [layer.values.kind for layer in stand_in.networks[-1].layers]
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert kinds.count("dequantize") == len(checkpoint.quantized_names) > 0


#: A model whose experts are of whole tiles, so that quantized ones stay packed.
_EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "head_dim": 64,
    "moe_intermediate_size": 32,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts_are_plugin_layers(
    stand_in: Any, full: TensorRT, tmp_path: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    """They get rows and weights, and are created again from what the plan stores."""
    model, runs = write_model(tmp_path / "model", num_hidden_layers=LAYERS, **_EXPERTS), []
    path = build_engine(model, tmp_path / "engine", **SIZES, quantize=quantize, flavour="tensorrt").path
    config, network = EngineFolder.open(path).config, stand_in.networks[-1]
    assert (config.attention_variant, network.tensors()) == ("plugin", recorded_tensors(full, config))
    plan = [*stand_in.plans.values()][-1]
    names = [layer.key[0] for layer in plan.plugins]
    assert (names.count(b"KVCacheAttention"), names.count(b"CustomOperation")) == (LAYERS, LAYERS)

    def record(self: OperationEnqueue, inputs: Any, outputs: Any, workspace: int, stream: int) -> None:
        runs.append(([tensor.shape for _, tensor in self._inputs], [tensor.shape for _, tensor in self._outputs]))

    record_plugin_runs(monkeypatch)
    monkeypatch.setattr(OperationEnqueue, "run", record)
    monkeypatch.setattr(operation_plugin, "current_memory", lambda: memory)
    with TensorRTEngine.open(path, memory=memory) as engine:
        bound = make_ready(engine, memory, batch=3, width=5)
        enqueue(engine)
        engine.use_profile(1)
        for name, tensor in bound.items():
            engine.bind(name, tensor)
        set_shapes(engine, batch=2)
        enqueue(engine)
    shapes = runs
    packed = [(5 * 64 * 64 // 4,), (5 * 64 * 2 // 4,), (5 * 64 * 64 // 4,), (5 * 64 * 2 // 4,)]  # values, padded to 64 inputs, and scales
    weights = [(5, 64, 64), (5, 64, 32)] if quantize is None else packed
    for rows in ((3, 5, 64), (2, 1, 64)):
        assert shapes.count(([rows, rows, (5, 64), *weights], [rows])) == LAYERS
    assert len(runs) == 2 * LAYERS
    del engine
    gc.collect()


#: Golden models with states, one of each kind of layer.
STATEFUL = ("lfm2", "bamba", "qwen3_next", "mamba2")


@pytest.fixture(params=STATEFUL)
def stateful(request: pytest.FixtureRequest, full: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine folder of a model with states."""
    if not full.supports(attention_variant("mask")):
        pytest.skip(f"{full} has no {attention_variant('mask').needs}")
    monkeypatch.setattr(resolved_options, "HEAD_DIM_MIN", 8)  # golden models are small
    return build_engine(GOLDEN / request.param, tmp_path / "engine", **SIZES, attention="mask", flavour="tensorrt").path


def test_networks_with_states(stand_in: Any, full: TensorRT, stateful: Path) -> None:
    config, network = EngineFolder.open(stateful).config, stand_in.networks[-1]
    assert network.tensors() == recorded_tensors(full, config)
    names = [layer.name for layer in network.layers]
    assert len(set(names)) == len(names)
    assert all(names)


def test_an_engine_with_states_has_contexts_for_both_buffers(stand_in: Any, full: TensorRT, stateful: Path, memory: FakeGpuMemory) -> None:
    enqueues = len(stand_in.enqueues)
    with TensorRTEngine.open(stateful, memory=memory) as engine:
        states = [spec for spec in engine.tensors.values() if "_state_" in spec.name]
        buffers = {spec.name: tensor(memory, (3, *spec.shape[1:]), spec.dtype) for spec in states}
        for parity in (0, 1):
            engine.use_bindings(parity)
            make_ready(engine, memory, batch=2, width=5)
            for spec in states:
                other = spec.name.removeprefix("present_") if spec.name.startswith("present_") else f"present_{spec.name}"
                engine.bind(spec.name, buffers[other if parity else spec.name])
            enqueue(engine)
        engine.use_bindings(0)
        enqueue(engine)
        first, second, third = stand_in.enqueues[enqueues:]
        assert first is third
        assert (first.profile, second.profile) == (0, 0)
        for spec in states:
            assert first.addresses[spec.name] == buffers[spec.name].ptr != second.addresses[spec.name]
    gc.collect()


def test_the_network_has_the_attention_of_the_variant(stand_in: Any, built: Path, variant: str, full: TensorRT) -> None:
    kinds = [layer.values.kind for layer in stand_in.networks[-1].layers]
    causal = "attention_v2" if full.release >= (11, 0) else "attention"
    assert [kinds.count(kind) for kind in ("plugin_v3", "kv_cache_update", causal)] == (
        [LAYERS, 0, 0] if variant == "plugin" else [0, 2 * LAYERS, LAYERS]
    )
    for layer in stand_in.networks[-1].layers:
        if layer.values.kind == causal:
            settings = layer.values.settings
            assert settings["decomposable"] is True
            assert ("key lengths" in settings, "mask" in settings) == (variant == "native", variant == "mask")


def test_the_builder_is_configured(stand_in: Any, full: TensorRT, built: Path, variant: str) -> None:
    config, trt = stand_in.configs[-1], full.module
    assert [profile["input_ids"] for profile in config.profiles] == [[(1, 1), (3, 11), (3, 11)], [(1, 1), (3, 1), (3, 1)]]
    assert config.cleared == [int(trt.BuilderFlag.TF32)]
    assert config.features == ({int(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03): True} if variant == "plugin" else {})


@pytest.mark.parametrize("reported", [None, b""], ids=["null", "empty"])
def test_an_engine_is_opened_and_enqueued(
    stand_in: Any, full: TensorRT, built: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, reported: bytes | None
) -> None:
    runs = record_plugin_runs(monkeypatch)
    monkeypatch.setattr(stand_in, "reports_plugin_alias", reported)
    enqueues = len(stand_in.enqueues)
    with TensorRTEngine.open(built, memory=memory) as engine:
        folder = EngineFolder.open(built).config
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.tensors}
        assert tuple(engine.profiles) == folder.profiles
        bound = make_ready(engine, memory, batch=3, width=5)
        enqueue(engine)
        engine.use_profile(1)
        for name, tensor in bound.items():
            engine.bind(name, tensor)
        set_shapes(engine, batch=2)
        enqueue(engine)
        prefill, decode = stand_in.enqueues[enqueues:]
        assert (prefill.profile, prefill.shapes["input_ids"], decode.profile, decode.shapes["input_ids"]) == (0, (3, 5), 1, (2, 1))
        assert prefill.memory == decode.memory
        v_buffers = {name: prefill.addresses[name] for name in (spec.name for spec in folder.v_outputs)}
        assert prefill.addresses == decode.addresses == {name: tensor.ptr for name, tensor in bound.items()} | v_buffers
        assert prefill.stream == 0x77
        if folder.attention_variant == "plugin":
            caches = [bound[f"past_key_values_{layer}"].ptr for layer in range(LAYERS)]
            assert [(shapes["q"], outputs[1]) for shapes, inputs, outputs in runs] == [
                (shape, cache) for shape in ((3, 5, 4, 64), (2, 1, 4, 64)) for cache in caches
            ]
            assert all(inputs[3] == outputs[1] for shapes, inputs, outputs in runs)
    del engine
    gc.collect()


def test_an_engine_binds_its_adapters(
    stand_in: Any, full: TensorRT, model: Path, variant: str, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record_plugin_runs(monkeypatch)
    options: dict[str, Any] = {**SIZES, "attention": variant, "flavour": "tensorrt", "adapters_rank": 5, "adapters_modules": ["q_proj"]}
    folder = EngineFolder.open(build_engine(model, tmp_path / "engine", **options).path)
    config, network = folder.config, stand_in.networks[-1]
    assert network.tensors() == recorded_tensors(full, config)
    assert len({layer.name for layer in network.layers}) == len(network.layers)
    assert all(stand_in.configs[-1].profiles[0]["lora_a_q_0"][place] == (1, 8, 40) for place in range(3))
    adapters = AdapterSet.open(config.model, {"a": write_adapter(tmp_path / "a", {Q_PROJ: (256, 40)}, rank=2)})
    for given, slots in ((adapters, [1, 0, 1]), (None, None)):
        enqueues = len(stand_in.enqueues)
        with TensorRTEngine.open(folder, memory=memory, adapters=given) as engine:
            assert dict(engine.tensors) == {spec.name: spec for spec in config.tensors}
            make_ready(engine, memory, batch=3, width=5)
            if engine.slot_adapters is not None:
                engine.slot_adapters.write(["a", None, "a"], stream=memory.create_stream())
            enqueue(engine)
            [done] = stand_in.enqueues[enqueues:]
            places = {spec.name: done.addresses[spec.name] for spec in config.adapter_tensors}
            assert len(set(places.values())) == (1 if slots is None else len(places))
            if engine.slot_adapters is not None:
                assert places["slot_adapters"] == engine.slot_adapters.table.ptr
                assert engine.slot_adapters.table.numpy().tolist() == slots
    gc.collect()


def test_an_engine_binds_hidden_states_and_so_does_its_draft_head(
    stand_in: Any, full: TensorRT, model: Path, variant: str, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record_plugin_runs(monkeypatch)
    sizes = {"head_dim": 64, "num_attention_heads": 4, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = write_head(tmp_path / "head", model, tokens=range(3, 20), **sizes)
    options: dict[str, Any] = {**SIZES, "attention": variant, "flavour": "tensorrt", "draft_head": head}
    folder = EngineFolder.open(build_engine(model, tmp_path / "engine", **options).path)
    of_head, of_model = stand_in.networks[-2:]
    for one, network in ((folder, of_model), (EngineFolder.open(folder.path / DRAFT_HEAD_FOLDER), of_head)):
        assert network.tensors() == recorded_tensors(full, one.config)
        assert len({layer.name for layer in network.layers}) == len(network.layers)
        enqueues = len(stand_in.enqueues)
        with TensorRTEngine.open(one, memory=memory) as engine:
            make_ready(engine, memory, batch=3, width=5)
            enqueue(engine)
            [done] = stand_in.enqueues[enqueues:]
            rows = {HIDDEN_INPUTS: engine.hidden_inputs, HIDDEN_STATES: engine.hidden_states}
            for spec in one.config.hidden_tensors:
                assert rows[spec.name].table.shape == (33, spec.shape[-1])
                assert done.addresses[spec.name] == rows[spec.name].table.ptr
    gc.collect()


def test_an_engine_binds_its_rows(
    stand_in: Any, full: TensorRT, model: Path, variant: str, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record_plugin_runs(monkeypatch)
    options: dict[str, Any] = {**SIZES, "attention": variant, "flavour": "tensorrt", "max_embeddings": 5}
    folder = EngineFolder.open(build_engine(model, tmp_path / "engine", **options).path)
    config, network = folder.config, stand_in.networks[-1]
    assert network.tensors() == recorded_tensors(full, config)
    assert len({layer.name for layer in network.layers}) == len(network.layers)
    assert all(stand_in.configs[-1].profiles[0]["embedding_rows"][place] == (5, 40) for place in range(3))
    with TensorRTEngine.open(folder, memory=memory) as engine:
        assert dict(engine.tensors) == {spec.name: spec for spec in config.tensors}
        assert engine.embeddings is not None
        make_ready(engine, memory, batch=3, width=5)
        enqueue(engine)
        assert stand_in.enqueues[-1].addresses["embedding_rows"] == engine.embeddings.table.ptr
    gc.collect()


def test_an_engine_binds_its_trees(
    stand_in: Any, full: TensorRT, model: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every plugin layer reads them, of version 3."""
    runs = record_plugin_runs(monkeypatch)
    folder = EngineFolder.open(build_engine(model, tmp_path / "engine", **SIZES, flavour="tensorrt", draft_tree=4).path)
    config, network = folder.config, stand_in.networks[-1]
    assert network.tensors() == recorded_tensors(full, config)
    assert [layer.key[1] for layer in [*stand_in.plans.values()][-1].plugins] == [b"3"] * LAYERS
    assert all(profile["ancestors"][place] == (3, 64, 2) for profile in stand_in.configs[-1].profiles for place in range(3))
    with TensorRTEngine.open(folder, memory=memory) as engine:
        assert dict(engine.tensors) == {spec.name: spec for spec in config.tensors}
        make_ready(engine, memory, batch=3, width=3)
        assert engine.ancestors is not None
        engine.ancestors.write([[-1, 0, 0], [-1], []], 3, stream=memory.create_stream())
        enqueue(engine)
        assert stand_in.enqueues[-1].addresses["ancestors"] == engine.ancestors.addresses["ancestors"]
        assert [inputs[5] for _, inputs, _ in runs] == [engine.ancestors.addresses["ancestors"]] * LAYERS
        assert engine.ancestors.of_step(3, 3).numpy().tolist() == [[1, 3, 5], [1, 2, 4], [1, 2, 4]]
    gc.collect()


def test_an_output_that_shares_memory_must_be_bound_there(built: Path, full: TensorRT, memory: FakeGpuMemory) -> None:
    with TensorRTEngine.open(built, memory=memory) as engine:
        bound = make_ready(engine, memory)
        name, alias = next((spec.name, spec.alias) for spec in engine.tensors.values() if spec.alias)
        elsewhere = memory.to_device(bound[name].numpy().copy(), stream=memory.streams[0])
        engine.bind(name, elsewhere)
        with raises(BindingError, f"`{name}`", expected=f"`{alias}`"):
            enqueue(engine)


def test_engines_in_16_bits_store_the_plugin_as_they_did_before(stand_in: Any, full: TensorRT, built: Path, variant: str) -> None:
    """A plan that another release of this package has made, and one for it to open."""
    if variant != "plugin":
        assert [*stand_in.plans.values()][-1].plugins == []
        return
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.0, "window": 0, "softcap": 0.0, "rotary_dim": 64}
    assert [(layer.key, layer.fields) for layer in [*stand_in.plans.values()][-1].plugins] == [
        ((b"KVCacheAttention", b"1", b"trt_kvcache"), fields)
    ] * LAYERS


class TestQuantizedKV:
    """Engines with quantized K and V, whose scales are by token, or those of a checkpoint."""

    FORMS: ClassVar[dict[str, KVForm]] = {
        "fp8 by token": ("fp8", False, {"kv_dtype": 1, "kv_scales": 2}),
        "int8 by token": ("int8", False, {"kv_dtype": 2, "kv_scales": 2}),
        "static fp8": ("fp8", True, {"kv_dtype": 1, "kv_scales": 1}),
        "static int8": ("int8", True, {"kv_dtype": 2, "kv_scales": 1}),
    }

    @pytest.fixture(params=FORMS)
    def form(self, request: pytest.FixtureRequest) -> KVForm:
        return self.FORMS[request.param]

    @pytest.fixture
    def source(self, model: Path, tmp_path: Path, form: KVForm) -> Path:
        kv_dtype, static, _ = form
        if not static:
            return model
        quantize, config = ALL_CASES["compressed-int8"]
        scheme = {"num_bits": 8, "type": "float" if kv_dtype == "fp8" else "int", "dynamic": False}
        write_quantized(tmp_path / "static", str(model), quantize, {**config, "kv_cache_scheme": scheme})
        names = (f"model.layers.{layer}.self_attn.{side}_scale" for layer in range(LAYERS) for side in "kv")
        scales = {name: np.array(0.5 + index, np.float32) for index, name in enumerate(names)}
        edit_tensors(tmp_path / "static", lambda tensors: tensors.update(scales))
        return tmp_path / "static"

    @pytest.fixture
    def built(self, stand_in: Any, full: TensorRT, source: Path, tmp_path: Path, form: KVForm) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the checkpoint has scales
            return build_engine(source, tmp_path / "engine", **SIZES, kv_dtype=form[0], flavour="tensorrt").path

    def test_the_network_has_codes_in_words(self, stand_in: Any, full: TensorRT, built: Path, form: KVForm) -> None:
        config, network = EngineFolder.open(built).config, stand_in.networks[-1]
        assert (config.attention_variant, config.segments, config.dtype) == ("plugin", None, "float16")
        assert network.tensors() == recorded_tensors(full, config)
        words, scales = (network.tensors()[f"{name}_0"] for name in ("past_key_values", "kv_scales"))
        assert words == ((-1, 2, 2, 38, 16), INT32)
        assert scales == ((2, 2) if form[1] else (-1, 2, 2, 40), FLOAT)
        assert ("present_kv_scales_0" in network.tensors()) is not form[1]

    def test_the_plan_says_how(self, stand_in: Any, built: Path, form: KVForm) -> None:
        plan = [*stand_in.plans.values()][-1]
        for layer in plan.plugins:
            assert layer.key == (b"KVCacheAttention", b"2", b"trt_kvcache")
            assert {name: value for name, value in layer.fields.items() if name.startswith("kv_")} == form[2]
        assert plan.profiles[1]["past_key_values_0"] == [(1, 2, 2, 38, 16), (3, 2, 2, 38, 16), (3, 2, 2, 38, 16)]
        scales = plan.profiles[0]["kv_scales_0"]
        assert scales == ([(2, 2)] * 3 if form[1] else [(1, 2, 2, 40), (3, 2, 2, 40), (3, 2, 2, 40)])

    def test_an_engine_is_opened_and_enqueued(
        self, stand_in: Any, built: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, form: KVForm
    ) -> None:
        runs = record_plugin_runs(monkeypatch)
        folder = EngineFolder.open(built)
        with TensorRTEngine.open(folder, memory=memory) as engine:
            assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
            assert engine.tensors["past_key_values_1"].shape == (-1, 2, 2, 38, 64)
            bound = make_ready(engine, memory, batch=2, width=7)
            enqueue(engine)
            updated = ["past_key_values", *([] if form[1] else ["kv_scales"])]
            for layer, (shapes, inputs, outputs) in enumerate(runs):
                assert (shapes["q"], shapes["cache"]) == ((2, 7, 4, 64), (2, 2, 2, 38, 16))
                assert shapes["kv_scales"] == ((2, 2) if form[1] else (2, 2, 2, 40))
                assert outputs[1:] == [bound[f"{name}_{layer}"].ptr for name in updated]
                assert (inputs[3], inputs[5]) == tuple(bound[f"{name}_{layer}"].ptr for name in ("past_key_values", "kv_scales"))
        del engine
        gc.collect()

    def test_other_engines_open_the_folder(self, built: Path, form: KVForm) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            session = InferenceSession.open(built, engine="reference")
        with session:
            assert np.isfinite(session.prefill([[1, 2, 3]])).all()
            assert session.cache_config.dtype == {"fp8": "float8_e4m3fn", "int8": "int8"}[form[0]]
            assert session.cache_config.scales == ("tensor" if form[1] else "token")

    def test_a_bare_plan_has_no_meaning(self, built: Path, memory: FakeGpuMemory, form: KVForm) -> None:
        """Without its folder nothing says what the words are."""
        folder = EngineFolder.open(built)
        with TensorRTEngine.open(folder.plan_path, memory=memory, flavour="tensorrt") as engine:
            assert engine.tensors["past_key_values_0"].dtype == "int32"
            cache = KVCacheManager(folder.config.cache, memory=memory)
            with raises(BindingError, "`past_key_values_0`", says="int32"):
                BindingPlan(engine, cache)
            cache.close()

    def test_states_beside_quantized_k_and_v(
        self, stand_in: Any, full: TensorRT, tmp_path: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two contexts of a profile, for either buffer of the states, each with cache and scales."""
        runs = record_plugin_runs(monkeypatch)
        config = json.loads((GOLDEN / "lfm2" / "config.json").read_text())
        model = write_model(tmp_path / "model", **config | {"hidden_size": 256, "head_dim": 64})
        path = build_engine(model, tmp_path / "engine", **SIZES, dtype="float16", kv_dtype="int8", flavour="tensorrt").path
        with TensorRTEngine.open(path, memory=memory) as engine:
            bound = []
            for parity in (0, 1):
                engine.use_bindings(parity)
                bound.append(make_ready(engine, memory, batch=2, width=5))
                enqueue(engine)
        assert [shapes["cache"] for shapes, _, _ in runs] == [(2, 2, 2, 38, 16)] * 2
        assert [outputs[1:] for _, _, outputs in runs] == [[one["past_key_values_0"].ptr, one["kv_scales_0"].ptr] for one in bound]
        del engine
        gc.collect()

    @pytest.mark.parametrize("attention", ["native", "mask"])
    def test_attention_of_tensorrt_takes_none(self, full: TensorRT, model: Path, tmp_path: Path, attention: str) -> None:
        if not is_built(full, attention):
            pytest.skip(f"{attention} is refused with {full}")
        with raises(ConfigError, "kv_dtype", expected=("plugin", "int8"), got=attention):
            build_engine(model, tmp_path / "engine", **SIZES, attention=attention, kv_dtype="int8", flavour="tensorrt")
        assert not (tmp_path / "engine").exists()


class TestVOutputs:
    """V of each plugin layer as an output: by default of 10.13 and 10.14, and wherever it is asked for."""

    @pytest.mark.parametrize("asked", [None, True, False])
    def test_v_is_an_output(self, stand_in: Any, full: TensorRT, model: Path, tmp_path: Path, asked: bool | None) -> None:
        path = build_engine(model, tmp_path / "engine", **SIZES, attention="plugin", flavour="tensorrt", v_outputs=asked).path
        config, network = EngineFolder.open(path).config, stand_in.networks[-1]
        expected = full.release in ((10, 13), (10, 14)) if asked is None else asked
        names = [f"v_{layer}" for layer in range(LAYERS)] if expected else []
        assert [spec.name for spec in config.v_outputs] == names
        assert [one.name for one in network.outputs if one.name.startswith("v_")] == names
        assert network.tensors() == recorded_tensors(full, config)
        read = [layer.values.inputs[2].name for layer in network.layers if layer.values.kind == "plugin_v3"]
        assert len(read) == LAYERS
        assert not names or read == names

    def test_plugins_read_v_in_the_memory_that_is_bound(
        self, full: TensorRT, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = record_plugin_runs(monkeypatch)
        allocated = []
        for marked in (False, True):
            options = {**SIZES, "attention": "plugin", "flavour": "tensorrt", "v_outputs": marked}
            path, memory = build_engine(model, tmp_path / f"engine {marked}", **options).path, FakeGpuMemory()
            runs.clear()
            with TensorRTEngine.open(path, memory=memory) as engine:
                allocated.append(memory.live_nbytes)
                make_ready(engine, memory, batch=3, width=11)
                enqueue(engine)
        assert allocated[1] - allocated[0] == LAYERS * (3 * 11 * 2 * 64 * 2)
        buffers = {inputs[2] for _, inputs, _ in runs}
        assert len(runs) == len(buffers) == LAYERS
        assert min(buffers) > 0x1000  # which stands for what lies inside of the engine
        del engine
        gc.collect()


class TestPluginErrors:
    @pytest.fixture
    def variant(self) -> str:
        return "plugin"

    def test_what_the_plugin_raises_is_in_the_error(
        self, built: Path, full: TensorRT, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        record_plugin_runs(monkeypatch, ShapeError("q: expected something else"))
        with TensorRTEngine.open(built, memory=memory) as engine:
            make_ready(engine, memory)
            with pytest.raises(
                EngineError, match=r"^the step failed\. .*KVCacheAttention\.enqueue: ShapeError: q: expected something else"
            ) as raised:
                enqueue(engine)
            assert isinstance(raised.value.__cause__, ShapeError)
        capfd.readouterr()  # the bindings print it too

    def test_a_plan_that_is_opened_alone_says_what_its_plugin_needs(
        self, built: Path, stand_in: Any, full: TensorRT, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def deserialize(plan: Any) -> None:
            full.log.receive("Cannot find plugin: KVCacheAttention, version: 1, namespace: trt_kvcache.", is_error=True)

        monkeypatch.setattr(stand_in, "creators", {})
        with pytest.raises(EngineError, match=r"refuses this engine\. TensorRT says: "):
            TensorRTEngine.open(EngineFolder.open(built).plan_path, memory=memory, flavour="tensorrt")

    def test_a_plan_with_plugins_is_inspected_without_its_folder(
        self, built: Path, stand_in: Any, full: TensorRT, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stand_in, "creators", {})
        first_time = cache(creator_module.register_version.__wrapped__)  # as in a process that has built nothing
        monkeypatch.setattr(creator_module, "register_version", first_time)
        found = inspect_plan(EngineFolder.open(built).plan_path, "tensorrt")
        config = EngineFolder.open(built).config
        assert {spec.name for spec in found.tensors} == {spec.name for spec in (*config.tensors, *config.v_outputs)}


def record_plugin_runs(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[Any]:
    """Write down shapes, inputs and outputs of each run of the plugin, instead of launching kernels; or raise ``error``."""
    runs: list[Any] = []

    class Recorded:
        def __init__(self, attributes: Any, dtype: str, shapes: Any, memory: Any) -> None:
            assert dtype == "float16"
            self.shapes = shapes

        def run(self, inputs: Any, outputs: Any, workspace: int, stream: int) -> None:
            if error is not None:
                raise error
            assert workspace
            assert stream == 0x77
            runs.append((self.shapes, [*inputs], [*outputs]))

    monkeypatch.setattr(plugin_module, "current_memory", lambda: None)
    monkeypatch.setattr(plugin_module, "PluginEnqueue", Recorded)
    return runs
