"""What the network declares and how its layers are set. What it computes: ``test_network_values.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.trt.module import TensorRT

from .conftest import MAX_BATCH_SIZE, MAX_PREFILL_LENGTH, MAX_SEQUENCE_LENGTH, Defined
from .interpreter import attention_layers, layer_kind

pytestmark = pytest.mark.trt

Define = Callable[..., Defined]


@pytest.mark.parametrize("attention", ["native", "mask"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", ["llama-llama3-bias", "qwen2-tied", "qwen3-sharded"])
def test_declares_the_tensors_of_a_decoder(define: Define, model: str, dtype: str, attention: str) -> None:
    defined = define(model, dtype=dtype, attention=attention)
    network = defined.definition.network
    declared = {}
    for mode, count, get in (
        (TensorMode.INPUT, network.num_inputs, network.get_input),
        (TensorMode.OUTPUT, network.num_outputs, network.get_output),
    ):
        for index in range(count):
            tensor = get(index)
            declared[tensor.name] = (mode, defined.tensorrt.dtype_name(tensor.dtype), tuple(tensor.shape))
    assert declared == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in defined.definition.tensors}


def test_tensors_of_qwen3_written_out(define: Define) -> None:
    found = {
        spec.name: (spec.dtype, spec.shape, spec.mode.value, spec.alias)
        for spec in define("qwen3-sharded", dtype="float16").definition.tensors
    }
    cache = ("float16", (-1, 2, 38, 24))
    assert found == {
        "input_ids": ("int32", (-1, -1), "input", None),
        "kvcache_start_index": ("int32", (-1,), "input", None),
        "last_token_ids": ("int32", (-1, 1), "input", None),
        "k_cache_0": (*cache, "input", None),
        "v_cache_0": (*cache, "input", None),
        "k_cache_1": (*cache, "input", None),
        "v_cache_1": (*cache, "input", None),
        "present_k_cache_0": (*cache, "output", "k_cache_0"),
        "present_v_cache_0": (*cache, "output", "v_cache_0"),
        "present_k_cache_1": (*cache, "output", "k_cache_1"),
        "present_v_cache_1": (*cache, "output", "v_cache_1"),
        "logits": ("float32", (-1, 79), "output", None),
    }


def test_native_attention_is_causal_from_the_lower_right_and_knows_its_lengths(define: Define) -> None:
    defined = define("qwen3-sharded", dtype="float16")
    layers = attention_layers(defined.tensorrt, defined.definition.network)
    assert len(layers) == 2
    for layer in layers:
        assert layer.causal_kind.name == "LOWER_RIGHT"
        assert layer.mask is None
        assert layer.key_value_lengths.name == "lengths/key_lengths"
        assert not layer.decomposable


def test_masked_attention_is_not_causal_too(define: Define) -> None:
    defined = define("qwen3-sharded", dtype="float16", attention="mask")
    layers = attention_layers(defined.tensorrt, defined.definition.network)
    assert len(layers) == 2
    for layer in layers:
        assert layer.causal_kind.name == "NONE"
        assert layer.mask.name == "mask/causal"
        assert tuple(layer.mask.shape) == (-1, 1, -1, MAX_SEQUENCE_LENGTH)
        assert layer.key_value_lengths is None


def test_each_window_has_one_mask(define: Define) -> None:
    defined = define("gemma3", dtype="float16", attention="mask")
    layers = attention_layers(defined.tensorrt, defined.definition.network)
    assert [layer.mask.name for layer in layers] == ["mask/window_6", "mask/window_6", "mask/causal", "mask/window_6"]


def test_each_rope_has_one_table(define: Define) -> None:
    for model, tables in (("gemma3", ["rope/cos", "rope_1/cos"]), ("smollm3", ["rope/cos"])):
        assert [name for name in define(model, attention="mask").constants if name.endswith("/cos")] == tables


def test_rows_of_a_shared_tensor_are_not_copied(define: Define) -> None:
    constants = define("phi3-long", dtype="float16").constants
    for name in ("q", "k", "v"):
        assert not constants[f"model.layers.0.self_attn.{name}_proj.weight"].flags.owndata
    assert not constants["model.layers.0.mlp.up_proj.weight"].flags.owndata


def test_decomposable_is_set_as_chosen(define: Define) -> None:
    for model, dtype in (("qwen3-sharded", "float16"), ("qwen3-sharded", "float32"), ("qwen2-tied", "bfloat16")):
        defined = define(model, dtype=dtype)
        choices = defined.definition.attention
        layers = attention_layers(defined.tensorrt, defined.definition.network)
        assert [choice.layer for choice in choices] == [0, 1]
        assert [layer.decomposable for layer in layers] == [choice.decomposable for choice in choices]
        assert all(choice.decomposable is (dtype == "float32" or model == "qwen2-tied") for choice in choices)


@pytest.mark.parametrize(
    ("model", "attention"), [("llama-llama3-bias", "native"), ("gemma2", "mask"), ("gemma3", "mask"), ("ministral3", "native")]
)
def test_every_layer_has_a_name_of_its_own(rtx: TensorRT, define: Define, model: str, attention: str) -> None:
    network = define(model, dtype="float16", attention=attention).definition.network
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    names = [layer.name for layer in layers if layer_kind(rtx, layer) != "ATTENTION_INPUT"]
    assert not [name for name in names if "Unnamed" in name]
    assert len(set(names)) == len(names)
    assert "model.layers.1.self_attn.q_proj/matmul" in names


def test_weights_in_the_dtype_of_the_build_are_not_copied(define: Define) -> None:
    same, converted = define("qwen2-tied", dtype="float16"), define("qwen2-tied", dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not same.constants[name].flags.owndata
    assert not same.constants[name].flags.writeable
    assert converted.constants[name].base is None or converted.constants[name].base.flags.owndata


def test_profiles(define: Define) -> None:
    prefill, decode = define("llama").definition.profiles
    assert (prefill.name, prefill.min_batch, prefill.max_batch, prefill.min_width, prefill.max_width) == (
        "prefill",
        1,
        MAX_BATCH_SIZE,
        1,
        MAX_PREFILL_LENGTH,
    )
    assert (decode.name, decode.min_batch, decode.max_batch, decode.min_width, decode.max_width) == ("decode", 1, MAX_BATCH_SIZE, 1, 1)
