"""Networks with plugin layers, made with TensorRT for RTX, which has none: identity layers stand for the outputs of a plugin layer.

The plugins are real: objects of the class that full TensorRT gets, made by fields. Nothing here has met full TensorRT.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trt_kvcache.builder import definition as network_definition, serialization
from trt_kvcache.builder.definition import DecoderDefinition, define_decoder
from trt_kvcache.builder.network import attention_lowering
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.serialization import make_config
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.trt import module as trt_module
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class

from .conftest import SIZES, declared, recording


class PluginLayer:
    """A plugin layer: its tensors in the network, and the plugin. ``run_plugins_on_host`` lets it run."""

    def __init__(self, tensorrt, name, inputs, shape_inputs, plugin):
        self.tensorrt, self.name, self.inputs, self.shape_inputs, self.plugin = tensorrt, name, inputs, shape_inputs, plugin
        self.aliases = [plugin.get_aliased_input(output) for output in range(plugin.num_outputs)]
        self.outputs = []

    @property
    def described(self):
        return [(self.tensorrt.dtype_name(one.dtype), tuple(one.shape)) for one in self.inputs]

    def run(self, arrays):
        arrays = [np.array(array, order="C") for array in arrays]
        types = [one.dtype for one in self.inputs]
        assert [array.dtype for array in arrays] == [numpy_dtype(self.tensorrt.dtype_name(one)) for one in types]
        descs = [SimpleNamespace(dims=array.shape, type=one) for array, one in zip(arrays, types, strict=True)]
        results = [np.full_like(arrays[0], np.nan), *(arrays[alias] for alias in self.aliases[1:])]
        self.plugin.on_shape_change(descs, [])
        self.plugin.enqueue(descs, [], [one.ctypes.data for one in arrays], [one.ctypes.data for one in results], 0x1000, 0)
        return results


@dataclass(frozen=True)
class PluginNetwork:
    """A network with plugin layers, and the arrays behind its constants."""

    tensorrt: TensorRT
    definition: DecoderDefinition
    plugins: list[PluginLayer]
    constants: dict[str, np.ndarray[Any, Any]]


def define_with_plugin_layers(rtx, model, *, dtype="float16", quantized=None, logits=1):
    """Define the network of a model for full TensorRT."""
    plugins, original = [], Graph.layer

    def layer(graph, name, kind, *arguments):
        if kind != "plugin_v3":
            return original(graph, name, kind, *arguments)
        plugins.append(made := PluginLayer(rtx, name, *arguments))
        sides = [original(graph, f"{name}/{side}", "identity", made.inputs[max(side, 0)]) for side in made.aliases]
        made.outputs = [side.get_output(0) for side in sides]
        assert [one.dtype for one in made.outputs] == made.plugin.get_output_data_types([one.dtype for one in made.inputs])
        return SimpleNamespace(name=name, get_output=lambda index: made.outputs[index])

    def creator_of(name, version, namespace):
        assert (name, namespace) == ("KVCacheAttention", "trt_kvcache")

        def create(layer, fields, phase):
            assert phase.name == "BUILD"
            made = plugin_class(full)(AttentionAttributes.from_plugin_fields(fields, quantized=version == "2"))
            assert made.plugin_version == version
            return made

        return SimpleNamespace(create_plugin=create)

    module = SimpleNamespace(**{**vars(rtx.module), "get_plugin_registry": lambda: SimpleNamespace(get_creator=creator_of)})
    full = TensorRT(module=module, flavour="tensorrt", version="10.3.0", log=rtx.log)
    given, allowed = BuildOptions(**SIZES, dtype=dtype, attention="plugin", max_logits_per_slot=logits), []
    with pytest.MonkeyPatch.context() as patch:
        for module in (network_definition, serialization):
            patch.setattr(module, "can_add_plugins", lambda tensorrt: True)
        patch.setattr(trt_module, "driver_failure", lambda: None)
        patch.setattr(Graph, "layer", layer)
        patch.setattr(attention_lowering, "register", lambda tensorrt: None)
        patch.setattr(serialization, "allow_aliasing", lambda tensorrt, config: allowed.append(config))
        with recording(rtx, model) as (checkpoint, constants, messages):
            options = ResolvedOptions.of_model(given, checkpoint.config)
            definition = define_decoder(checkpoint, options, options.cache_for(checkpoint.config, quantized), full, messages)
            make_config(definition, options, full, messages)
    assert len(allowed) == 1
    assert declared(rtx, definition.network) == {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in definition.tensors}
    return PluginNetwork(rtx, definition, plugins, constants)
