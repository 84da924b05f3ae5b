"""The plugin that is compiled ahead of time, in the releases that have such plugins: registered, created, described, stored."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import EngineError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import AttentionAttributes, register_decode

FIELDS = AttentionAttributes(num_heads=22, num_kv_heads=2, head_dim=80, softcap=30.5, window=7, rotary_dim=20)
SHAPES = {
    "q": (-1, 1, 22, 80),
    "k": (-1, 1, 2, 80),
    "v": (-1, 1, 2, 80),
    "cache": (-1, 2, 2, 9, 80),
    "lengths": (-1,),
    "cos_sin": (9, 2, 10),
}


@pytest.fixture(scope="module")
def operation(full: TensorRT) -> Any:
    """What makes the plugin of a network's tensors."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")  # of NVIDIA's code, when it is compiled
        importlib.import_module("tensorrt.plugin")
    if full.release < (10, 9):
        with raises(EngineError, "tensorrt.plugin", expected="plugins compiled ahead of time"):
            register_decode(full, arch="sm_87")
        pytest.skip(f"{full} has no plugins compiled ahead of time")
    register_decode(full, arch="sm_87")
    return importlib.import_module("tensorrt.plugin").op.trt_kvcache.KVCacheAttentionDecode


@pytest.fixture
def made(full: TensorRT, operation: Any) -> Any:
    """The plugin, as ``INetworkDefinition.add_plugin`` asks for it."""
    trt = full.module
    network = full.create("Builder").create_network(0)
    types = {"lengths": trt.DataType.INT32, "cos_sin": trt.DataType.FLOAT}
    tensors = [network.add_input(name, types.get(name, trt.DataType.HALF), shape) for name, shape in SHAPES.items()]
    returned = operation(*tensors, **FIELDS.plugin_field_arrays())
    inputs, shape_inputs, plugin = returned(full.module.QuickPluginCreationRequest.STRICT_AOT) if callable(returned) else returned
    assert len(inputs) == len(SHAPES)
    assert not shape_inputs
    return plugin


def test_the_attributes_arrive(made: Any) -> None:
    attributes = made.attrs
    assert {name: attributes[name].item() for name in ATTRIBUTE_TYPES} == {name: getattr(FIELDS, name) for name in ATTRIBUTE_TYPES}


def test_the_outputs_are_described(full: TensorRT, made: Any) -> None:
    trt = full.module
    types = [trt.DataType.HALF] * 4 + [trt.DataType.INT32, trt.DataType.FLOAT]
    assert list(made.get_output_data_types(types, [len(shape) for shape in SHAPES.values()])) == [trt.DataType.HALF] * 2
    assert [made.get_aliased_input(output) for output in (0, 1)] == [-1, 3]
