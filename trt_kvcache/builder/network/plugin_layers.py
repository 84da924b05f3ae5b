"""Plugin layers of a decoder: what each one is, before the network exists, and how a network gets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.cache.config import DecoderCacheConfig, KVCacheConfig
from trt_kvcache.engine.decoder_tensors import indices_in_kind, kv_tensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine_folder.decoder_segments import attention_op_attributes
from trt_kvcache.model import AttentionConfig, ModelConfig
from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.trt.onnx_parser import parse_plugin_layers
from trt_kvcache.trt.plugin import can_add_plugins, register
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, plugin_version
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


@dataclass(frozen=True, kw_only=True)
class AttentionPluginNode:
    """The plugin layer of an attention layer, and the tensors of its K, V and scales in the engine."""

    layer: PluginNode
    past: tuple[TensorSpec, ...]  # K and V, and their scales; as plugin layers take them
    present: tuple[TensorSpec, ...]  # the outputs after the attended tokens


@dataclass(frozen=True, kw_only=True)
class AttentionPluginLayers:
    """The plugin layers of a decoder by the index of the layer, and what adds them to its network."""

    nodes: Mapping[int, AttentionPluginNode]
    layers: PluginLayers


def attention_plugin_layers(
    graph: Graph, model: ModelConfig, names: TensorNames, cache: DecoderCacheConfig
) -> AttentionPluginLayers | None:
    """Prepare an empty network for the plugin layers of a decoder; None for a decoder without attention."""
    nodes = _nodes(model, names, kv=cache.kv, dtype=graph.dtype, max_sequence_length=cache.max_sequence_length)
    return AttentionPluginLayers(nodes=nodes, layers=plugin_layers(graph, [node.layer for node in nodes.values()])) if nodes else None


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


def _nodes(
    model: ModelConfig, names: TensorNames, *, kv: KVCacheConfig | None, dtype: str, max_sequence_length: int
) -> dict[int, AttentionPluginNode]:
    """Return the plugin layers of a decoder that computes in ``dtype``, by the index of the layer."""
    nodes = {}
    for layer, (config, index) in enumerate(zip(model.layers, indices_in_kind(model), strict=True)):
        if isinstance(config.mixer, AttentionConfig):
            assert kv is not None
            assert index is not None
            past, present = (tuple(map(packed_as_int32, side)) for side in kv_tensors(kv, names, index))
            attributes = _attributes(config.mixer, kv, max_sequence_length)
            inputs = _input_types(config.mixer, past, dtype=dtype, max_sequence_length=max_sequence_length)
            node = PluginNode(
                name=f"model.layers.{layer}.self_attn/attend",
                plugin=PLUGIN_NAME,
                version=plugin_version(attributes),
                namespace=PLUGIN_NAMESPACE,
                fields=attributes.plugin_field_arrays(),
                field_types=QUANTIZED_ATTRIBUTE_TYPES,
                inputs=inputs,
                num_outputs=1 + len(present),
            )
            nodes[layer] = AttentionPluginNode(layer=node, past=past, present=present)
    return nodes


def _attributes(mixer: AttentionConfig, kv: KVCacheConfig, max_sequence_length: int) -> AttentionAttributes:
    """Return the attributes of the plugin of a layer."""
    attributes = attention_op_attributes(mixer, max_sequence_length=max_sequence_length)
    plain = AttentionOp(**attributes).kernel_attributes()  # type: ignore[arg-type]  # each of its type
    if not kv.has_scales:
        return plain
    return replace(plain, kv_dtype=kv.dtype, kv_scales="token" if kv.scales_by_token else "head")


def _input_types(mixer: AttentionConfig, past: Sequence[TensorSpec], *, dtype: str, max_sequence_length: int) -> tuple[TensorType, ...]:
    """Return the inputs of attention in the order of the plugin: q, k, v, the cache, lengths, scales, and the angles of RoPE."""
    heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
    qkv = [TensorType((-1, -1, count, mixer.head_dim), dtype) for count in heads]
    cache, *scales = [TensorType(spec.shape, spec.dtype) for spec in past]
    angles = [TensorType((max_sequence_length, 2, mixer.rotary_dim // 2), "float32")] if mixer.rope is not None else []
    return (*qkv, cache, TensorType((-1,), "int32"), *scales, *angles)
