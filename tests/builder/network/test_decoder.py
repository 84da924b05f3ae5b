"""What the network declares and how its layers are set. What it computes: ``test_network_values.py``."""

import pytest

from .conftest import MAX_SEQUENCE_LENGTH, declared
from .interpreter import attention_layers, layer_kind

pytestmark = pytest.mark.trt


@pytest.mark.parametrize("attention", ["native", "mask"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", ["llama-llama3-bias", "qwen2-tied", "qwen3-sharded"])
def test_declares_the_tensors_of_a_decoder(define, model, dtype, attention):
    defined = define(model, dtype=dtype, attention=attention)
    specs = {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in defined.definition.tensors}
    assert declared(defined.tensorrt, defined.definition.network) == specs


def layers_of(defined):
    layers = attention_layers(defined.tensorrt, defined.definition.network)
    assert len(layers) == 2
    return layers


def test_attention_is_causal_from_the_lower_right_or_has_a_mask(define):
    for layer in layers_of(define("qwen3-sharded", dtype="float16")):
        assert (layer.causal_kind.name, layer.mask, layer.decomposable) == ("LOWER_RIGHT", None, False)
        assert layer.key_value_lengths.name == "lengths/key_lengths"
    for layer in layers_of(define("qwen3-sharded", dtype="float16", attention="mask")):
        assert (layer.causal_kind.name, layer.key_value_lengths) == ("NONE", None)
        assert (layer.mask.name, tuple(layer.mask.shape)) == ("mask/causal", (-1, 1, -1, MAX_SEQUENCE_LENGTH))


def test_decomposable_is_set_as_chosen(define):
    for model, dtype in (("qwen3-sharded", "float16"), ("qwen3-sharded", "float32"), ("qwen2-tied", "bfloat16")):
        defined = define(model, dtype=dtype)
        choices = defined.definition.attention
        assert [choice.layer for choice in choices] == [0, 1]
        assert [layer.decomposable for layer in layers_of(defined)] == [choice.decomposable for choice in choices]
        assert all(choice.decomposable is (dtype == "float32" or model == "qwen2-tied") for choice in choices)


def test_every_layer_has_a_name_of_its_own(rtx, define):
    network = define("llama-llama3-bias", dtype="float16").definition.network
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    names = [layer.name for layer in layers if layer_kind(rtx, layer) != "ATTENTION_INPUT"]
    assert not [name for name in names if "Unnamed" in name]
    assert len(set(names)) == len(names)
    assert "model.layers.1.self_attn.q_proj/matmul" in names


def test_weights_in_the_dtype_of_the_build_are_not_copied(define):
    same, converted = define("qwen2-tied", dtype="float16"), define("qwen2-tied", dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not same.constants[name].flags.owndata
    assert not same.constants[name].flags.writeable
    assert converted.constants[name].base is None or converted.constants[name].base.flags.owndata
