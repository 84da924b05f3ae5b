"""Adding plugin layers to a network: with the network API of full TensorRT, or by the ONNX parser of TensorRT for RTX."""

from collections.abc import Sequence
from typing import Any, Protocol

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.trt.onnx_parser import parse_plugin_layers
from trt_kvcache.trt.plugin import can_add_plugins, register
from trt_kvcache.trt.plugin_node import PluginNode


class PluginLayers(Protocol):
    """Adds plugin layers to a network."""

    def add(self, node: PluginNode, inputs: Sequence[Any]) -> Any:
        """Add one layer.

        Parameters
        ----------
        node : PluginNode
            The layer.
        inputs : sequence of ITensor
            Its inputs, as the node describes them.

        Returns
        -------
        ILayer
            With the outputs of the plugin.
        """


def plugin_layers(graph: Graph, nodes: Sequence[PluginNode]) -> PluginLayers:
    """Return what adds these layers to the network of ``graph``, which must be empty: the parser fills it with them."""
    register(graph.tensorrt)
    if can_add_plugins(graph.tensorrt):
        return _AddedPluginLayers(graph)
    parsed = parse_plugin_layers(graph.tensorrt, graph.network, nodes, graph.messages)
    graph.keep(parsed)
    return parsed


class _AddedPluginLayers:
    """Adds plugin layers with ``INetworkDefinition.add_plugin_v3``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def add(self, node: PluginNode, inputs: Sequence[Any]) -> Any:
        """See :class:`PluginLayers`."""
        graph, trt = self._graph, self._graph.trt
        creator = trt.get_plugin_registry().get_creator(node.plugin, node.version, node.namespace)
        graph.keep(node)  # the fields point into its arrays
        types = trt.PluginFieldType
        fields = [trt.PluginField(name, array, getattr(types, node.field_types[name])) for name, array in node.fields.items()]
        plugin = creator.create_plugin(node.name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        return graph.layer(node.name, "plugin_v3", [*inputs], [], plugin)
