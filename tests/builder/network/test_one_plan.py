"""One network with plugin layers for each golden model: what it computes, with the plugin's NumPy twin, and that it builds."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.models import model_of, write_model
from tests.helpers.quantized_models import AWQ_CONFIG, awq, write_nvfp4, write_quantized
from tests.reference.rig import golden
from tests.sweeps import one_of_each_family, some
from tests.trt.plugin.on_host import run_plugins_on_host
from trt_kvcache.builder.serialization import make_config, serialize
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError
from trt_kvcache.ops import attention_attributes, registry
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.int32_packing import packed_shape

from . import conftest
from .conftest import MAX_BATCH_SIZE, MAX_PREFILL_LENGTH, MAX_SEQUENCE_LENGTH, MODELS
from .interpreter import interpret
from .plugin_networks import define_with_plugin_layers
from .test_network_values import GOLDEN_SLOT, GOLDEN_TOLERANCE, STEPS, States, assert_near, run, tokens_of
from .test_segments import QUANTIZED_TOLERANCE

pytestmark = pytest.mark.trt


@pytest.fixture(autouse=True)
def _on_host(monkeypatch):
    """Plugins compute with NumPy: golden models have smaller heads than the kernels, and RoPE of other parts."""
    run_plugins_on_host(monkeypatch)
    monkeypatch.setattr(attention_attributes, "HEAD_DIMS", range(4, 257, 4))
    monkeypatch.setattr(attention_attributes, "_ROTARY_DIM_STEP", 2)


class OnePlan:
    """A network with plugin layers, and combined caches; driven as ``test_network_values.Network`` is."""

    def __init__(self, network):
        self.network, cache = network, network.definition.cache
        layers = cache.kv.layers if cache.kv else ()
        shapes = [(MAX_BATCH_SIZE, 2, layer.num_kv_heads, MAX_SEQUENCE_LENGTH, layer.head_dim) for layer in layers]
        self._states = States(cache.mamba)
        pairs = [DEFAULT_NAMES.combined_pair(layer) for layer in range(len(shapes))]
        if cache.kv is None or not cache.kv.has_scales:
            self.caches = {pair: np.full(shape, np.nan, numpy_dtype(cache.dtype)) for pair, shape in zip(pairs, shapes, strict=True)}
            return
        self.caches = {pair: np.full(packed_shape(shape), 0x7F7F7F7F, np.int32) for pair, shape in zip(pairs, shapes, strict=True)}
        scales = [(*shape[:3], -(-shape[3] // 4) * 4) for shape in shapes]
        self.caches |= {DEFAULT_NAMES.scales_pair(layer): np.full(shape, np.nan, np.float32) for layer, shape in enumerate(scales)}

    def step(self, ids, start, last, new=None):
        slots = len(ids)
        feed = {
            "input_ids": ids.astype(np.int32),
            "kvcache_start_index": np.array(start, np.int32),
            "last_token_ids": np.array(last, np.int32).reshape(slots, -1),
            **{past: cache[:slots] for (past, _), cache in self.caches.items()},
            **self._states.feed(ids, new),
        }
        outputs = interpret(self.network.tensorrt, self.network.definition.network, self.network.constants, feed)
        for (_, present), cache in self.caches.items():
            cache[:slots] = outputs[present]
        self._states.take(outputs, slots)
        return outputs["logits"]


def golden_logits(model):
    return np.array([golden(model)[1][length] for length in np.cumsum([new[GOLDEN_SLOT] for new in STEPS])])


def of_golden_slot(logits):
    return np.array([step[GOLDEN_SLOT] for step in logits])


@pytest.mark.parametrize("model", some(one_of_each_family(MODELS), 24))
def test_one_plan_computes_the_logits_of_hugging_face(rtx, model):
    """All that is not live is NaN."""
    logits = run(OnePlan(define_with_plugin_layers(rtx, model)), *tokens_of(model))
    assert_near(of_golden_slot(logits), golden_logits(model), GOLDEN_TOLERANCE["float16"])


@pytest.mark.parametrize("flavour", ["tensorrt_rtx", "tensorrt"])
@pytest.mark.parametrize("form", [None, QuantizedKV("int8")])
def test_layers_that_read_k_and_v_of_another_one_follow_it(rtx, flavour, form):
    """Each takes the cache as the layer before it leaves it, and k and v of the layer that stores them; the last one has the output."""
    network = define_with_plugin_layers(rtx, "gemma4-shared", flavour=flavour, v_outputs=flavour == "tensorrt", quantized=form)
    stores, before = {3: 1, 4: 1, 5: 2}, {3: 1, 4: 3, 5: 2}  # of each layer that reads: the one that stores, the one before it
    layers = dict(enumerate(network.plugins))
    shared = [3] if form is None else [3, 5]  # the cache, and its scales
    for layer, plugin in layers.items():
        if layer in stores:
            assert [one.name for one in plugin.inputs[1:3]] == [one.name for one in layers[stores[layer]].inputs[1:3]]
            assert [plugin.inputs[one].name for one in shared] == [one.name for one in layers[before[layer]].outputs[1:]]
            assert plugin.inputs[0].name != layers[before[layer]].inputs[0].name
    for index, layer in enumerate((0, 4, 5)):
        names = [*DEFAULT_NAMES.combined_pair(index)[1:], *DEFAULT_NAMES.scales_pair(index)[1:]]
        assert [one.name for one in layers[layer].outputs[1:]] == names[: len(shared)]
    v_outputs = [spec.name for spec in network.definition.tensors if spec.name.startswith("v_")]
    assert v_outputs == (["v_0", "v_1", "v_2"] if flavour == "tensorrt" else [])


@pytest.mark.parametrize("kv_dtype", list(QUANTIZED_TOLERANCE))
@pytest.mark.parametrize("model", ["llama-linear", "gemma2-bias", "granitemoehybrid-bias", "qwen3_next"])
def test_one_plan_over_quantized_k_and_v(rtx, model, kv_dtype):
    network = define_with_plugin_layers(rtx, model, quantized=QuantizedKV(kv_dtype))
    logits = run(OnePlan(network), *tokens_of(model))
    assert_near(of_golden_slot(logits), golden_logits(model), QUANTIZED_TOLERANCE[kv_dtype] + GOLDEN_TOLERANCE["float16"])


def build(network):
    """Return the plan of a network."""
    tensorrt = network.tensorrt
    with tensorrt.log.collect(ignore_missing_driver=True) as messages:
        config = make_config(network.definition, network.options, tensorrt, messages)
        plan = serialize(network.definition, config, network.options, tensorrt, messages, lambda done: None)
        reads_lengths = network.definition.cache.kv is not None  # models of states alone do not: TensorRT says so
        assert [text for text in messages.warnings if reads_lengths or DEFAULT_NAMES.kvcache_start_index not in text] == []
    return bytes(plan)


#: A family of each kind, in both dtypes, with K and V of each, and with three profiles.
BUILDS = {
    "llama-linear": {},
    "qwen2-tied": {"dtype": "bfloat16", "logits": 7},
    "gemma2-bias": {"quantized": QuantizedKV("int8")},
    "qwen3_next": {"quantized": QuantizedKV("fp8")},
    "granitemoehybrid-bias": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("model", BUILDS)
def test_it_builds_into_one_plan_that_names_the_plugin(rtx, model):
    plan = build(define_with_plugin_layers(rtx, model, **BUILDS[model]))
    assert len(plan) > 10_000
    assert b"KVCacheAttention" in plan


#: A model whose experts are of whole tiles, so that quantized ones stay packed.
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "head_dim": 64,
    "moe_intermediate_size": 32,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(("quantize", "kind"), [(None, None), ("int8", 2), pytest.param("int4:32", 1, marks=pytest.mark.slow)])
def test_experts_build_into_plugin_layers(rtx, monkeypatch, tmp_path, quantize, kind):
    """Constants are weights of 16 bits, or packed bytes; the format is an attribute."""
    folder = write_model(tmp_path / "model", num_hidden_layers=2, **EXPERTS)
    monkeypatch.setattr(conftest, "Checkpoint", SimpleNamespace(open=lambda folder: Checkpoint.open(folder, quantize=quantize)))
    network = define_with_plugin_layers(rtx, folder, logits=7)
    experts = [one.plugin for one in network.plugins if one.plugin.plugin_name == "CustomOperation"]
    assert [one.fields.attributes.get("up_kind") for one in experts] == [kind] * 2
    assert [one.fields.attributes.get("down_kind") for one in experts] == [kind] * 2
    stored = {name.rpartition(".")[2]: array.dtype.name for name, array in network.constants.items() if ".0.mlp/experts" in name}
    packed = {f"{prefix}_{part}": "int32" for prefix in ("up", "down") for part in ("values", "scales")}
    assert stored == {"router": "float32"} | (dict.fromkeys(("up", "down"), "float16") if kind is None else packed)
    plan = build(network)
    assert (b"CustomOperation" in plan, b"experts" in plan, b"KVCacheAttention" in plan) == (True, True, True)


def test_experts_in_nvfp4_keep_their_factors(rtx, tmp_path):
    network = define_with_plugin_layers(rtx, write_nvfp4(tmp_path / "model", one_factor=False, **EXPERTS), logits=7)
    stored = {name.rpartition(".")[2]: array for name, array in network.constants.items() if ".0.mlp/experts" in name}
    packed = {f"{prefix}_{part}" for prefix in ("up", "down") for part in ("values", "scales", "factors")}
    assert stored.keys() == {"router"} | packed
    experts, tiles_of_up, tiles_of_down = 5, 4, 4
    assert len(np.unique(stored["up_factors"].reshape(2, -1, 2)[0], axis=0)) > experts, "gate and up have factors of their own"
    sizes = [stored[f"{prefix}_factors"].size for prefix in ("up", "down")]
    assert sizes == [2 * 2 * experts * tiles_of_up, 2 * 2 * experts * tiles_of_down]
    assert b"CustomOperation" in build(network)


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_experts_of_gguf_stay_in_their_super_blocks(rtx, tmp_path):
    pytest.importorskip("gguf")
    from tests.helpers.gguf_experts import write_gguf_experts

    path = write_gguf_experts(tmp_path, {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"})
    network = define_with_plugin_layers(rtx, path, dtype="bfloat16")
    experts = [one.plugin.fields.attributes for one in network.plugins if one.plugin.plugin_name == "CustomOperation"]
    assert {(one["up_kind"], one["down_kind"]) for one in experts} == {(5, 7)}
    stored = {name.rpartition(".")[2] for name in network.constants if ".0.mlp/experts" in name}
    assert stored == {"router"} | {f"{prefix}_{part}" for prefix in ("up", "down") for part in ("values", "scales", "factors")}
    assert b"experts" in build(network)


def layer_names(network):
    layers = network.definition.network
    return {layers.get_layer(index).name for index in range(layers.num_layers)}


def products_of(network):
    """Return the plugin layers of packed products, by name."""
    return {one.name: one for one in network.plugins if one.plugin.plugin_name == "CustomOperation"}


def awq_model(folder):
    """Return a model whose matrices have zero points, in groups that the kernels know."""
    source = write_model(folder / "dense", hidden_size=64, head_dim=64, intermediate_size=96, num_hidden_layers=2)
    config = {**AWQ_CONFIG, "group_size": 32, "modules_to_not_convert": []}
    write_quantized(folder / "model", str(source), awq(group_size=32), config)
    return folder / "model"


class TestPackedKernels:
    def test_they_compute_what_the_layers_of_tensorrt_do(self, rtx, tmp_path):
        """With no product of offsets; in steps of up to 33 tokens, which are launched in parts."""
        model, found = awq_model(tmp_path), {}
        random = np.random.default_rng(1)
        tokens, padding = (random.integers(0, 37, (MAX_BATCH_SIZE, width)) for width in (24, MAX_PREFILL_LENGTH))
        for packed_kernels in (False, True):
            network = define_with_plugin_layers(rtx, model, packed_kernels=packed_kernels)
            found[packed_kernels] = run(OnePlan(network), tokens, padding)
            operations = [one.plugin.fields.operation for one in network.plugins if one.plugin.plugin_name == "CustomOperation"]
            assert operations == ["packed_linear"] * (2 * 7 if packed_kernels else 0)
            of_layers = [name for name in network.constants if name.startswith("model.layers")]
            assert any(name.endswith(".offsets") for name in of_layers) is not packed_kernels
            assert "lm_head/tokens" not in layer_names(network), "its head is in 16 bits"
        for step, expected in zip(found[True], found[False], strict=True):
            assert_near(step, expected, 0.01)

    def test_they_build(self, rtx, tmp_path):
        plan = build(define_with_plugin_layers(rtx, awq_model(tmp_path), packed_kernels=True, dtype="bfloat16"))
        assert (b"packed_linear" in plan, b"KVCacheAttention" in plan) == (True, True)

    def test_matrices_in_nvfp4_compute_what_they_do_in_8_bits(self, rtx, tmp_path):
        """Each has a factor of its own, which is in its attributes and in its inputs."""
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 64, "intermediate_size": 96}
        model, found = write_nvfp4(tmp_path / "model", one_factor=False, **sizes), {}
        random = np.random.default_rng(1)
        tokens, padding = (random.integers(0, 37, (MAX_BATCH_SIZE, width)) for width in (24, MAX_PREFILL_LENGTH))
        for packed_kernels in (False, True):
            network = define_with_plugin_layers(rtx, model, dtype="bfloat16", packed_kernels=packed_kernels)
            found[packed_kernels] = run(OnePlan(network), tokens, padding)
        factors = [one.plugin.fields.attributes["factor_high"] for one in products_of(network).values()]
        assert len(factors) == 2 * 7
        assert len(set(factors)) > 7
        for step, expected in zip(found[True], found[False], strict=True):
            assert_near(step, expected, 0.03)
        assert b"packed_linear" in build(network)

    @pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
    @pytest.mark.parametrize("logits", [1, 5])
    def test_matrices_of_gguf_compute_what_they_do_in_16_bits(self, rtx, tmp_path, logits):
        """In super-blocks of each type, and Q5_0, which has 8 bits there."""
        pytest.importorskip("gguf")
        from tests.helpers.gguf_files import write_q4_k_m

        write_q4_k_m(tmp_path / "model", {"q_proj": "Q5_K", "k_proj": "Q5_0"})
        random = np.random.default_rng(1)
        tokens, padding = (random.integers(0, 37, (MAX_BATCH_SIZE, width)) for width in (24, MAX_PREFILL_LENGTH))
        found = {}
        for packed_kernels in (False, True):
            network = define_with_plugin_layers(rtx, tmp_path / "model", dtype="bfloat16", logits=logits, packed_kernels=packed_kernels)
            found[packed_kernels] = run(OnePlan(network), tokens, padding)
        kinds = {name: one.plugin.fields.attributes["weight_kind"] for name, one in products_of(network).items()}
        assert {role: kinds[f"model.layers.0.{role}/packed_linear"] for role in ("q", "k", "v", "up")} == {"q": 6, "k": 2, "v": 7, "up": 5}
        assert (len(kinds), kinds["lm_head/packed_linear"]) == (2 * 7 + 1, 7)
        assert "lm_head/tokens" in layer_names(network)
        for step, expected in zip(found[True], found[False], strict=True):
            assert_near(step, expected, 0.03)
        assert b"packed_linear" in build(network)

    def test_a_model_without_packed_weights_is_refused(self, rtx):
        with raises(ConfigError, "packed_kernels", "packed weights in a format of the kernels", "none"):
            define_with_plugin_layers(rtx, "llama-linear", packed_kernels=True)


def test_attention_with_sinks_builds_into_our_operation(rtx):
    network = define_with_plugin_layers(rtx, "gpt_oss-mxfp4", dtype="bfloat16", quantized=QuantizedKV("int8"))
    operations = [one.plugin.fields.operation for one in network.plugins]
    assert sorted(operations) == ["attention"] * 3 + ["experts"] * 3
    assert network.constants["model.layers.0.self_attn.sinks"].dtype == np.float32
    plan = build(network)
    assert (b"CustomOperation" in plan, b"KVCacheAttention" in plan) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"logits": 7}, {"quantized": QuantizedKV("int8")}, {"quantized": QuantizedKV("fp8")}], ids=str
)
@pytest.mark.parametrize("model", MODELS)
def test_every_family_builds(rtx, model, options):
    if "quantized" in options and any(mixer.head_dim % 16 for mixer in model_of(model).attention_layers):
        pytest.skip("rows of K and V in 8 bits are a multiple of 16 bytes")
    assert len(build(define_with_plugin_layers(rtx, model, **options))) > 10_000


class Windowed(AttentionOp):
    """Attention with a window of five tokens."""

    name = "windowed"

    def __init__(self, **attributes):
        super().__init__(**attributes, window=5)


class FirstEmbeddings(EmbeddingOp):
    """Embeds token ids of 20 and above as zeros."""

    name = "first_embeddings"

    def enqueue(self, inputs, outputs, workspace, stream):
        table, ids = inputs
        super().enqueue([table[:20], ids], outputs, workspace, stream)


@pytest.fixture
def registered(monkeypatch):
    for operation in (Windowed, FirstEmbeddings):
        monkeypatch.setitem(registry.OPERATIONS, operation.name, operation)


class TestRegisteredOperations:
    def test_they_compute_in_place_of_ours(self, rtx, registered):
        """Attention with a window: the same model with a window in its configuration, by our plugin."""
        operations = {"attention": "windowed", "embedding": "first_embeddings"}
        ids, padding = tokens_of("llama-linear")
        found = run(OnePlan(define_with_plugin_layers(rtx, "llama-linear", operations=operations)), ids, padding)
        network = define_with_plugin_layers(rtx, "llama-linear", window=5)
        table = network.constants["model.embed_tokens.weight"].copy()
        table[20:] = 0
        network.constants["model.embed_tokens.weight"] = table
        for step, expected in zip(found, run(OnePlan(network), ids, padding), strict=True):
            assert_near(step, expected, 1e-6)
        with pytest.raises(AssertionError):
            assert_near(found[1], run(OnePlan(define_with_plugin_layers(rtx, "llama-linear")), ids, padding)[1], 1e-2)

    @pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
    def test_they_build(self, rtx, registered, kv_dtype):
        quantized = None if kv_dtype is None else QuantizedKV(kv_dtype)
        operations = {"attention": "windowed", "embedding": "first_embeddings"}
        plan = build(define_with_plugin_layers(rtx, "llama-linear", quantized=quantized, operations=operations))
        assert (b"CustomOperation" in plan, b"windowed" in plan, b"KVCacheAttention" in plan) == (True, True, False)
