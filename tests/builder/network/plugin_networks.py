"""Networks with plugin layers: of TensorRT for RTX, by its ONNX parser, and of a stand-in for full TensorRT.

In the stand-in identity layers stand for the outputs of a plugin layer. The plugins are real: objects of the class that full TensorRT gets,
made by fields. Nothing here has met full TensorRT.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.builder.network.resolved import resolved
from trt_kvcache.builder.definition import DecoderDefinition, define_decoder
from trt_kvcache.builder.network import plugin_layers
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.serialization import make_config
from trt_kvcache.trt import module as trt_module
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class

from .conftest import SIZES, declared, recording
from .interpreter import plugin_layers_of
from .plugin_layer import PluginLayer


@dataclass(frozen=True)
class PluginNetwork:
    """A network with plugin layers, and the arrays behind its constants."""

    tensorrt: TensorRT
    definition: DecoderDefinition
    options: ResolvedOptions
    plugins: list[PluginLayer]
    constants: dict[str, np.ndarray[Any, Any]]


def define_with_plugin_layers(
    rtx,
    model,
    *,
    flavour="tensorrt_rtx",
    dtype="float16",
    quantized=None,
    logits=1,
    operations=None,
    window=None,
    v_outputs=False,
    draft_tree=None,
    packed_kernels=False,
):
    """Define the network of a model with TensorRT for RTX, or for a stand-in of full TensorRT; ``window`` for all its layers."""
    given = {**SIZES, "dtype": dtype, "attention": "plugin", "max_logits_per_slot": logits, "operations": operations}
    with pytest.MonkeyPatch.context() as patch, recording(rtx, model) as (checkpoint, constants, messages):
        tensorrt, plugins = (rtx, []) if flavour == "tensorrt_rtx" else full_tensorrt(rtx, patch)
        if window is not None:
            layers = [replace(layer, mixer=replace(layer.mixer, window=window)) for layer in checkpoint.config.layers]
            checkpoint.config = replace(checkpoint.config, layers=tuple(layers))
        own = {"v_outputs": v_outputs, "draft_tree": draft_tree, "packed_kernels": packed_kernels}
        options = replace(resolved(checkpoint.config, **given), **own)
        definition = define_decoder(checkpoint, options, options.cache_for(checkpoint.config, quantized), tensorrt, messages)
        config = make_config(definition, options, rtx, messages)
    assert config.get_preview_feature(rtx.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
    assert config.get_flag(rtx.module.BuilderFlag.REQUIRE_USER_ALLOCATION)
    assert declared(rtx, definition.network) == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in definition.tensors}
    plugins = plugins or plugin_layers_of(rtx, definition.network)
    for one in plugins:
        one.owner = definition  # of the tensors
    return PluginNetwork(rtx, definition, options, plugins, constants)


def full_tensorrt(rtx, patch):
    """Return a stand-in of full TensorRT for one network, and the plugin layers that it will have."""
    plugins, original = [], Graph.layer

    def layer(graph, name, kind, *arguments):
        if kind != "plugin_v3":
            return original(graph, name, kind, *arguments)
        inputs, shape_inputs, plugin = arguments
        assert shape_inputs == []
        plugins.append(made := PluginLayer(rtx, name, inputs, plugin))
        sides = [original(graph, f"{name}/{side}", "identity", made.inputs[max(side, 0)]) for side in made.aliases]
        made.outputs = [side.get_output(0) for side in sides]
        assert [one.dtype for one in made.outputs] == made.plugin.get_output_data_types([one.dtype for one in made.inputs])
        return SimpleNamespace(name=name, get_output=lambda index: made.outputs[index])

    def creator_of(name, version, namespace):
        assert (name, namespace) == ("KVCacheAttention", "trt_kvcache")

        def create(layer, fields, phase):
            assert phase.name == "BUILD"
            kind = {"quantized": version in "24", "takes_trees": version in "34"}
            made = plugin_class(full)(AttentionAttributes.from_plugin_fields(fields, **kind))
            assert made.plugin_version == version
            return made

        return SimpleNamespace(create_plugin=create)

    network = SimpleNamespace(add_plugin_v3=None)
    registry = SimpleNamespace(get_creator=creator_of)
    module = SimpleNamespace(**{**vars(rtx.module), "get_plugin_registry": lambda: registry, "INetworkDefinition": network})
    full = TensorRT(module=module, flavour="tensorrt", version="10.3.0", log=rtx.log)
    patch.setattr(trt_module, "driver_failure", lambda: None)
    patch.setattr(Graph, "layer", layer)
    patch.setattr(plugin_layers, "register", lambda tensorrt: None)
    return full, plugins
