"""Networks with plugin layers: what they declare, and what they compute with the NumPy twin of the plugin's kernels."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.helpers.models import write_model
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.trt.plugin import AttentionAttributes

from .plugin_networks import define_with_plugin_layers

pytestmark = pytest.mark.trt

#: How K and V may be stored: static scales are those of two layers of two heads.
FORMS = {
    "fp8 by token": QuantizedKV("fp8"),
    "int8 by token": QuantizedKV("int8"),
    "fp8 by head": QuantizedKV("fp8", "head", [((0.01, 0.02), (0.005, 0.008)), ((0.012, 0.015), (0.007, 0.004))]),
    "int8 by tensor": QuantizedKV("int8", "tensor", [(0.02, 0.01), (0.03, 0.015)]),
}


def small(folder, **changes):
    return write_model(folder / "model", **{"head_dim": 64, "num_hidden_layers": 2, **changes})


@pytest.fixture(params=["tensorrt_rtx", "tensorrt"])
def define_plugins(rtx, request):
    """Return ``define_plugins(model, ...)`` for TensorRT for RTX, then for a stand-in of full TensorRT."""
    return partial(define_with_plugin_layers, rtx, flavour=request.param)


def test_plugin_layers_in_one_network(define_plugins, tmp_path):
    plugins = define_plugins(small(tmp_path)).plugins
    heads = [("float16", (-1, -1, count, 64)) for count in (4, 2, 2)]
    inputs = [*heads, ("float16", (-1, 2, 2, 38, 64)), ("int32", (-1,)), ("float32", (38, 2, 32))]
    assert [(one.name, one.described) for one in plugins] == [(f"model.layers.{index}.self_attn/attend", inputs) for index in (0, 1)]
    attributes = AttentionAttributes(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64)
    assert [one.plugin.attributes for one in plugins] == [attributes] * 2


@pytest.mark.parametrize("form", FORMS)
def test_plugin_layers_over_quantized_k_and_v(define_plugins, tmp_path, form):
    """Quantized values are words, 64 of them 16; scales by token are updated, static ones are read."""
    network = define_plugins(small(tmp_path), quantized=FORMS[form])
    heads = [("float16", (-1, -1, count, 64)) for count in (4, 2, 2)]
    by_token = FORMS[form].scales == "token"
    scales = ("float32", (-1, 2, 2, 40) if by_token else (2, 2))
    inputs = [*heads, ("int32", (-1, 2, 2, 38, 16)), ("int32", (-1,)), scales, ("float32", (38, 2, 32))]
    plain = AttentionAttributes(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64)
    for index, one in enumerate(network.plugins):
        assert one.described == inputs
        assert one.plugin.attributes == replace(plain, kv_dtype=FORMS[form].dtype, kv_scales="token" if by_token else "head")
        assert [one.inputs[3].name, one.inputs[5].name] == [f"past_key_values_{index}", f"kv_scales_{index}"]
        outputs = [f"present_key_values_{index}", f"present_kv_scales_{index}"]
        assert [each.name for each in one.outputs[1:]] == outputs[: 2 if by_token else 1]


def test_plugin_layers_have_the_attributes_of_their_layers(define_plugins, tmp_path):
    shapes = {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2, "sliding_window": 7}
    gemma = small(tmp_path, **shapes, query_pre_attn_scalar=100, max_position_embeddings=64)
    network = define_plugins(gemma)
    scale = 0.1 if define_plugins.keywords["flavour"] == "tensorrt" else float(np.float32(0.1))  # an attribute of ONNX is a float32
    same = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64, "scale": scale}
    assert [one.plugin.attributes for one in network.plugins] == [AttentionAttributes(**same, window=window) for window in (7, 0, 7)]
    layers = network.definition.network
    tables = [layers.get_layer(index).name for index in range(layers.num_layers)]
    assert [name for name in tables if name.startswith("rope")] == ["rope.cos_sin", "rope.cos_sin_1"]
    assert [len(one.inputs) for one in network.plugins] == [6] * 3


@pytest.mark.parametrize("quantized", [None, QuantizedKV("int8")])
def test_plugin_layers_without_rope_have_no_table(define_plugins, tmp_path, quantized):
    model = small(tmp_path, model_type="smollm3", no_rope_layers=[1, 0])
    plugins = define_plugins(model, quantized=quantized).plugins
    assert [one.plugin.attributes.rotary_dim for one in plugins] == [64, 0]
    assert [len(one.inputs) for one in plugins] == ([6, 5] if quantized is None else [7, 6])


def test_plugin_layers_of_queries_that_are_scaled_by_position(define_plugins, tmp_path):
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1, "rope_theta": 1e4}
    network = define_plugins(small(tmp_path, model_type="ministral3", rope_parameters=yarn))
    assert [len(one.inputs) for one in network.plugins] == [6, 6]
    layers = network.definition.network
    names = [layers.get_layer(index).name for index in range(layers.num_layers)]
    assert (names.count("lengths/position_ids"), names.count("query_scaling/factors")) == (1, 1)  # for both layers
