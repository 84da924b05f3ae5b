"""The plugin layers of a decoder: attention over the combined cache, experts, and operations that users registered in place of ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trt_kvcache.builder.network.expert_weights import ExpertWeights
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.head import HEAD_ROLE
from trt_kvcache.builder.network.packed_products import PackedProduct, packed_head, packed_products
from trt_kvcache.builder.network.plugin_layers import PluginLayers, plugin_layers
from trt_kvcache.builder.network.weights import LayerWeights, Weights
from trt_kvcache.cache.config import DecoderCacheConfig, KVCacheConfig
from trt_kvcache.engine.decoder_tensors import cache_indices, kv_tensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine_folder.decoder_segments import attention_op_attributes
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import AttentionConfig, ModelConfig, RoutedMlpConfig
from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.experts_op import ExpertsOp
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.ops.packed_linear_op import PackedLinearOp
from trt_kvcache.trt.plugin.operation_fields import OPERATION_FIELD_TYPES, OperationFields
from trt_kvcache.trt.plugin.operation_plugin import OPERATION_PLUGIN_NAME, OPERATION_PLUGIN_VERSION, as_plugin_input
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, plugin_version
from trt_kvcache.trt.plugin_node import PluginNode


@dataclass(frozen=True, kw_only=True)
class AttentionPluginNode:
    """The plugin layer of an attention layer, and the tensors of its K, V and scales in the engine."""

    layer: PluginNode
    past: tuple[TensorSpec, ...]  # K and V, and their scales; as plugin layers take them
    present: tuple[TensorSpec, ...]  # the outputs after the attended tokens


@dataclass(frozen=True, kw_only=True)
class DecoderPluginLayers:
    """The plugin layers of a decoder, and what adds them to its network."""

    attention: Mapping[int, AttentionPluginNode]  # by index of the layer
    embedding: PluginNode | None  # a registered operation in place of TensorRT's lookup
    experts: Mapping[int, tuple[PluginNode, ExpertWeights]]  # by index of the layer
    layers: PluginLayers
    products: Mapping[tuple[int | None, str], tuple[PluginNode, PackedProduct]]  # by layer (None: the head) and role of the matrix

    def has(self, layer: int | None, role: str) -> bool:
        """See ``PluginProducts``."""
        return (layer, role) in self.products

    def added(self, graph: Graph, layer: int | None, role: str, x: Any) -> Any:
        """See ``PluginProducts``."""
        found = self.products.get((layer, role))
        if found is None:
            return None
        node, product = found
        constants = [graph.constant(f"{node.name}.{name}", array) for name, array in product.matrix.arrays.items()]
        return graph.result(self.layers.add(node, [x, *constants]))


def decoder_plugin_layers(
    graph: Graph,
    weights: Weights,
    model: ModelConfig,
    names: TensorNames,
    cache: DecoderCacheConfig,
    operations: Mapping[str, str],
    trees: Sequence[TensorSpec] = (),
    *,
    packed_kernels: bool,
) -> DecoderPluginLayers | None:
    """Prepare an empty network for the plugin layers of a decoder; None for a decoder without any.

    ``operations``: registered operations, by the names of ours that they replace. ``trees``: the input for trees, or nothing.
    """
    attention = {
        layer: _attention_node(model, layer, index.kv, names, cache, graph.dtype, operations.get(AttentionOp.name), trees)
        for layer, index in enumerate(cache_indices(model))
        if index.kv is not None
    }
    table = TensorType((model.vocab_size, model.hidden_size), graph.dtype), TensorType((-1, -1), "int32")
    registered = operations.get(EmbeddingOp.name)
    embedding = None if registered is None else _operation_node("model.embed_tokens", EmbeddingOp(), registered, table)
    experts = {
        layer: _experts_node(model, layer, config.mlp, weights, graph.dtype, operations)
        for layer, config in enumerate(model.layers)
        if isinstance(config.mlp, RoutedMlpConfig)
    }
    products = _packed_products(graph, weights, model, operations) if packed_kernels else {}
    if packed_kernels and not products:
        raise ConfigError("packed_kernels: expected packed weights in a format of the kernels, got none. Leave it out, or give quantize.")
    nodes = [node.layer for node in attention.values()] + [node for node, _ in (*experts.values(), *products.values())]
    nodes += [] if embedding is None else [embedding]
    if not nodes:
        return None
    return DecoderPluginLayers(
        attention=attention, embedding=embedding, experts=experts, layers=plugin_layers(graph, nodes), products=products
    )


def _packed_products(
    graph: Graph, weights: Weights, model: ModelConfig, operations: Mapping[str, str]
) -> dict[tuple[int | None, str], tuple[PluginNode, PackedProduct]]:
    """Return the products with packed matrices, and their plugin layers."""
    of_layers = (packed_products(LayerWeights(weights, model, layer), graph.dtype) for layer in range(model.num_layers))
    found: dict[tuple[int | None, str], PackedProduct] = {
        (layer, role): product for layer, products in enumerate(of_layers) for role, product in products.items()
    }
    of_head = packed_head(weights, model, graph.dtype)
    found |= {} if of_head is None else {(None, HEAD_ROLE): of_head}
    return {place: (_product_node(*place, product, graph.dtype, operations), product) for place, product in found.items()}


def _experts_node(
    model: ModelConfig, layer: int, config: RoutedMlpConfig, weights: Weights, dtype: str, operations: Mapping[str, str]
) -> tuple[PluginNode, ExpertWeights]:
    """Return the plugin layer of the experts of a layer, and their weights."""
    stored = ExpertWeights.of(config, LayerWeights(weights, model, layer), dtype)
    inputs = tuple(stored.input_types(model.hidden_size, dtype).values())
    registered = operations.get(ExpertsOp.name, ExpertsOp.name)
    return _operation_node(f"model.layers.{layer}.mlp/experts", stored.op, registered, inputs, stored.op.attributes), stored


def _product_node(layer: int | None, role: str, product: PackedProduct, dtype: str, operations: Mapping[str, str]) -> PluginNode:
    """Return the plugin layer of a product with a packed matrix."""
    inputs = tuple(product.op.input_types(product.inputs, dtype).values())
    name = f"{role if layer is None else f'model.layers.{layer}.{role}'}/packed_linear"
    registered = operations.get(PackedLinearOp.name, PackedLinearOp.name)
    return _operation_node(name, product.op, registered, inputs, product.op.attributes)


def _attention_node(
    model: ModelConfig,
    layer: int,
    index: int,
    names: TensorNames,
    cache: DecoderCacheConfig,
    dtype: str,
    registered: str | None,
    trees: Sequence[TensorSpec],
) -> AttentionPluginNode:
    """Return the plugin layer of a layer with the K and V of an index: of our plugin, or of a registered operation.

    Our plugin has no input for attention sinks, so with them our operation is a layer of ``CustomOperation``.
    """
    mixer, kv, length = model.layers[layer].attention, cache.kv, cache.max_sequence_length
    assert kv is not None
    past, present = kv_tensors(kv, names, index)
    attributes: dict[str, Any] = attention_op_attributes(mixer, max_sequence_length=length)
    if mixer.sinks and registered is None:
        registered, attributes = AttentionOp.name, attributes | ({"trees": 1} if trees else {})
    op, name = AttentionOp(**attributes), f"model.layers.{layer}.self_attn/attend"
    inputs = _attention_inputs(mixer, past, trees, dtype=dtype, max_sequence_length=length)
    node = (
        _kernel_node(name, op, kv, inputs, 1 + len(present), takes_trees=bool(trees))
        if registered is None
        else _operation_node(name, op, registered, inputs, attributes)
    )
    return AttentionPluginNode(layer=node, past=tuple(map(packed_as_int32, past)), present=tuple(present))


def _attention_inputs(
    mixer: AttentionConfig, past: Sequence[TensorSpec], trees: Sequence[TensorSpec], *, dtype: str, max_sequence_length: int
) -> tuple[TensorType, ...]:
    """Return the inputs of attention in order: q, k, v, the cache, lengths, ancestors, scales, the angles of RoPE, and sinks."""
    heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
    qkv = [TensorType((-1, -1, count, mixer.head_dim), dtype) for count in heads]
    cache, *scales = [TensorType(spec.shape, spec.dtype) for spec in past]
    ancestors = [TensorType(spec.shape, spec.dtype) for spec in trees]
    angles = [TensorType((max_sequence_length, 2, mixer.rotary_dim // 2), "float32")] if mixer.after_norms.rope is not None else []
    sinks = [TensorType((mixer.num_heads,), "float32")] if mixer.sinks else []
    return (*qkv, cache, TensorType((-1,), "int32"), *ancestors, *scales, *angles, *sinks)


def _kernel_node(
    name: str, op: AttentionOp, kv: KVCacheConfig, inputs: Sequence[TensorType], num_outputs: int, *, takes_trees: bool
) -> PluginNode:
    """Return a layer of ``KVCacheAttention``."""
    attributes = replace(op.kernel_attributes(), takes_trees=takes_trees)
    if kv.has_scales:
        attributes = replace(attributes, kv_dtype=kv.dtype, kv_scales="token" if kv.scales_by_token else "head")
    return PluginNode(
        name=name,
        plugin=PLUGIN_NAME,
        version=plugin_version(attributes),
        namespace=PLUGIN_NAMESPACE,
        fields=attributes.plugin_field_arrays(),
        field_types=QUANTIZED_ATTRIBUTE_TYPES,
        inputs=tuple(map(as_plugin_input, inputs)),
        num_outputs=num_outputs,
    )


def _operation_node(
    name: str, own: CustomOp, registered: str, inputs: Sequence[TensorType], attributes: Mapping[str, int | float] | None = None
) -> PluginNode:
    """Return a layer of ``CustomOperation`` for a registered operation in place of ``own``, which must have the same outputs."""
    fields = OperationFields(registered, attributes or {}, tuple(inputs))
    expected, got = own.outputs(inputs), fields.create_op().outputs(inputs)
    if expected != got:
        raise ConfigError(f"operations: expected {registered} to have the outputs of {own.name}, {expected}, got {got}.")
    return PluginNode(
        name=name,
        plugin=OPERATION_PLUGIN_NAME,
        version=OPERATION_PLUGIN_VERSION,
        namespace=PLUGIN_NAMESPACE,
        fields=fields.plugin_field_arrays(),
        field_types=OPERATION_FIELD_TYPES,
        inputs=tuple(map(as_plugin_input, inputs)),
        num_outputs=len(got),
    )
