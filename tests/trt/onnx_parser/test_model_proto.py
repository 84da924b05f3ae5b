"""The bytes of an ONNX model, as the onnx package reads them."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.trt.onnx_parser.model_proto import model_proto
from trt_kvcache.trt.plugin import AttentionAttributes
from trt_kvcache.trt.plugin.operation_fields import OPERATION_FIELD_TYPES, OperationFields
from trt_kvcache.trt.plugin_node import PluginNode

onnx = pytest.importorskip("onnx")

INPUTS = (TensorType((-1, -1, 4, 64), "bfloat16"), TensorType((-1, 2, 2, 300, 64), "bfloat16"), TensorType((-1,), "int32"))
ATTRIBUTES = AttentionAttributes(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, window=2**31 - 1, rotary_dim=60)


def attention_node(name: str) -> PluginNode:
    fields = ATTRIBUTES.plugin_field_arrays()
    key = {"plugin": "KVCacheAttention", "version": "1", "namespace": "trt_kvcache"}
    return PluginNode(name=name, **key, fields=fields, field_types=QUANTIZED_ATTRIBUTE_TYPES, inputs=INPUTS, num_outputs=2)


def read(*nodes: PluginNode) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.ParseFromString(model_proto(nodes))
    assert model.ByteSize() == len(model_proto(nodes))
    return model


def test_a_model_has_the_plugin_layers_over_one_placeholder_for_each_kind_of_input() -> None:
    model = read(attention_node("first"), attention_node("second"))
    assert (model.ir_version, {one.domain: one.version for one in model.opset_import}) == (8, {"": 17, "trt.plugins": 1})
    assert (len(model.graph.input), len(model.graph.output)) == (0, 0)
    expands, plugins = model.graph.node[:3], model.graph.node[3:]
    assert [one.op_type for one in expands] == ["Expand"] * 3
    assert [(one.op_type, one.name, one.domain) for one in plugins] == [
        ("KVCacheAttention", name, "trt.plugins") for name in ("first", "second")
    ]
    assert [list(one.input) for one in plugins] == [[one.output[0] for one in expands]] * 2
    assert [list(one.output) for one in plugins] == [["first:0", "first:1"], ["second:0", "second:1"]]
    onnx.checker.check_model(model)


def test_placeholders_are_zeros_of_dtype_and_shape() -> None:
    model = read(attention_node("one"))
    tensors = {one.name: one for one in model.graph.initializer}
    placeholders = [
        (tensors[zero].data_type, list(tensors[zero].dims), onnx.numpy_helper.to_array(tensors[shape]).tolist())
        for zero, shape in (node.input for node in model.graph.node[:3])
    ]
    kinds = onnx.TensorProto
    assert placeholders == [(kinds.BFLOAT16, [], [1, 1, 4, 64]), (kinds.BFLOAT16, [], [1, 2, 2, 300, 64]), (kinds.INT32, [], [1])]
    assert all(not any(tensors[node.input[0]].raw_data) for node in model.graph.node[:3])
    assert sum(len(one.raw_data) for one in tensors.values()) < 200  # whatever the size of a cache


def test_fields_are_attributes_and_doubles_are_floats() -> None:
    (node,) = read(attention_node("one")).graph.node[3:]
    values = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    assert values == {
        "plugin_version": b"1", "plugin_namespace": b"trt_kvcache", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        "scale": float(np.float32(0.1)), "window": 2**31 - 1, "softcap": 0.0, "rotary_dim": 60,
    }  # fmt: skip


def test_texts_arrive_whole() -> None:
    fields = OperationFields("naïve", {"factor": 0.1}, INPUTS)
    node = PluginNode(
        name="one", plugin="CustomOperation", version="1", namespace="trt_kvcache", fields=fields.plugin_field_arrays(),
        field_types=OPERATION_FIELD_TYPES, inputs=INPUTS, num_outputs=1,
    )  # fmt: skip
    (made,) = read(node).graph.node[3:]
    texts = {one.name: onnx.helper.get_attribute_value(one).decode() for one in made.attribute}
    assert texts["operation"] == "naïve"
    assert texts["attributes"] == '{"factor": 0.1}'
