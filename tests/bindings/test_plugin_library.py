"""The plugin library through the bindings of each release: their registry finds its creators, and networks take its plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bindings.plugin_calls import fields
from tests.plugin_library.build import build_library, need_cmake
from tests.plugin_library.creators import creators_of
from tests.plugin_library.layers import LAYERS, Layer
from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, allow_aliasing, plugin_version

need_cmake()


@pytest.fixture(params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


@pytest.fixture
def creator(stand_in: Any, full: TensorRT, layer: Layer) -> Iterator[Any]:
    """The creator of the library as the bindings give it to Python, in place of one that a test before registered."""
    before = dict(stand_in.creators)
    stand_in.creators |= {one.key: one for one in creators_of(build_library()).values()}
    yield full.module.get_plugin_registry().get_creator(PLUGIN_NAME, plugin_version(layer.attributes), PLUGIN_NAMESPACE)
    stand_in.creators.clear()
    stand_in.creators |= before


@pytest.fixture
def plugin(full: TensorRT, creator: Any, layer: Layer) -> Any:
    trt, arrays = full.module, layer.attributes.plugin_field_arrays()
    types = {name: getattr(trt.PluginFieldType, QUANTIZED_ATTRIBUTE_TYPES[name]) for name in arrays}
    given = trt.PluginFieldCollection([trt.PluginField(name, array, types[name]) for name, array in arrays.items()])
    return creator.create_plugin("layer", given, trt.TensorRTPhase.BUILD)


def test_the_bindings_know_the_creator_by_its_interface(full: TensorRT, creator: Any, layer: Layer) -> None:
    assert isinstance(creator, full.module.IPluginCreatorV3One)
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == (
        PLUGIN_NAME, plugin_version(layer.attributes), PLUGIN_NAMESPACE
    )  # fmt: skip
    types = {field.name: field.type.name for field in creator.field_names}
    assert types == {name: kind for name, kind in QUANTIZED_ATTRIBUTE_TYPES.items() if name in layer.attributes.plugin_field_arrays()}


def test_an_engine_is_built_and_opened_with_the_library(stand_in: Any, full: TensorRT, plugin: Any, layer: Layer) -> None:
    trt = full.module
    builder = trt.Builder(full.log.logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    allow_aliasing(full, config)
    inputs = [
        network.add_input(name, full.data_type(dtype), tuple(-1 if isinstance(size, str) else size for size in shape))
        for name, (shape, dtype) in layer.inputs.items()
    ]
    added = network.add_plugin_v3(inputs, [], plugin)
    for index, name in enumerate(layer.outputs):
        added.get_output(index).name = name
        network.mark_output(added.get_output(index))
    blob = builder.build_serialized_network(network, config)
    assert blob is not None
    stored = [*stand_in.plans.values()][-1].plugins[0].fields
    assert stored == {name: array[0] for name, array in layer.attributes.plugin_field_arrays().items()}
    assert fields(stored).count == len(stored)
    assert trt.Runtime(full.log.logger).deserialize_cuda_engine(blob) is not None
