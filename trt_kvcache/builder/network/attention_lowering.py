"""Lowering of attention over a combined cache, for which TensorRT has no layer: to a plugin layer, or to a cut between segments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.query_scaling import query_factors
from trt_kvcache.builder.network.step_lengths import step_lengths
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.engine.decoder_tensors import indices_in_kind, kv_tensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine_folder.decoder_segments import (
    RopeKind,
    attention_op_attributes,
    attention_tensor_names,
    rope_kind,
)
from trt_kvcache.model import AttentionConfig, ModelConfig, QueryScaling
from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.trt.plugin import register
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, plugin_version


class AttentionLowering(Protocol):
    """Adds the attention of a layer to a network."""

    def query_factors(self, graph: Graph, scaling: QueryScaling, hidden: Any) -> Any:
        """Return the factors of queries that are scaled by position.

        Parameters
        ----------
        graph : Graph
            The network.
        scaling : QueryScaling
            Which factor a position has.
        hidden : ITensor [B, s, hidden]
            A hidden state in this network.

        Returns
        -------
        ITensor [B, s, 1, 1] float32
            In this network.
        """

    def add_attention(self, graph: Graph, layer: int, qkv: Sequence[Any], kept: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Add the attention of one layer.

        Parameters
        ----------
        graph : Graph
            The network; afterwards it may be another one.
        layer : int
            Index of the layer.
        qkv : sequence of ITensor [B, s, heads, D]
            q, k and v before RoPE, in the dtype of the model.
        kept : mapping of str to ITensor [B, s, ...]
            Tensors that are needed after the attention, by the names of tensors between segments.

        Returns
        -------
        attended : ITensor [B, s, heads, D]
            The result of the attention.
        kept : mapping of str to ITensor [B, s, ...]
            ``kept`` in the network that ``graph`` now builds. No other tensor from before the call may be used.
        """


class PluginLayerLowering:
    """Adds ``KVCacheAttention`` plugin layers, and the combined caches as inputs and outputs (full TensorRT).

    Quantized K and V are inputs and outputs in int32: see :mod:`trt_kvcache.ops.int32_packing`.
    """

    def __init__(
        self,
        model: ModelConfig,
        names: TensorNames,
        *,
        kv: KVCacheConfig | None,
        max_sequence_length: int,
        start_index: Any,
        cos_sin: Mapping[RopeKind, Any],
    ) -> None:
        self._model = model
        self._names = names
        self._kv = kv
        self._max_sequence_length = max_sequence_length
        self._start_index = start_index
        self._cos_sin = cos_sin
        self._positions: Any = None
        self._query_factors: dict[QueryScaling, Any] = {}
        self._field_arrays: list[dict[str, np.ndarray[Any, Any]]] = []  # the plugin fields point into them

    def query_factors(self, graph: Graph, scaling: QueryScaling, hidden: Any) -> Any:
        """See :class:`AttentionLowering`."""
        if self._positions is None:
            self._positions = step_lengths(graph, tokens=hidden, start_index=self._start_index).position_ids
        if scaling not in self._query_factors:
            sizes = {"length": self._max_sequence_length, "index": len(self._query_factors)}
            self._query_factors[scaling] = query_factors(graph, scaling, self._positions, **sizes)
        return self._query_factors[scaling]

    def add_attention(self, graph: Graph, layer: int, qkv: Sequence[Any], kept: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """See :class:`AttentionLowering`."""
        trt = graph.trt
        register(graph.tensorrt)
        mixer = self._model.layers[layer].attention
        attributes = self._attributes(mixer)
        creator = trt.get_plugin_registry().get_creator(PLUGIN_NAME, plugin_version(attributes), PLUGIN_NAMESPACE)
        arrays, types = attributes.plugin_field_arrays(), trt.PluginFieldType
        self._field_arrays.append(arrays)
        fields = [trt.PluginField(name, array, getattr(types, QUANTIZED_ATTRIBUTE_TYPES[name])) for name, array in arrays.items()]
        name = f"model.layers.{layer}.self_attn/attend"
        plugin = creator.create_plugin(name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        index = indices_in_kind(self._model)[layer]
        assert index is not None
        assert self._kv is not None
        inputs, outputs = kv_tensors(self._kv, self._names, index)
        cache, *scales = [graph.input(spec.name, spec.dtype, spec.shape) for spec in map(packed_as_int32, inputs)]
        kind = rope_kind(mixer)
        angles = [] if kind is None else [self._cos_sin[kind]]
        plugin_layer = graph.layer(name, "plugin_v3", [*qkv, cache, self._start_index, *scales, *angles], [], plugin)
        attended = graph.result(plugin_layer)
        for position, spec in enumerate(outputs, 1):
            graph.output(plugin_layer.get_output(position), spec.name)
        return attended, kept

    def _attributes(self, mixer: AttentionConfig) -> AttentionAttributes:
        """Return the attributes of the plugin of a layer."""
        attributes = attention_op_attributes(mixer, max_sequence_length=self._max_sequence_length)
        plain = AttentionOp(**attributes).kernel_attributes()  # type: ignore[arg-type]  # each of its type
        if self._kv is None or not self._kv.has_scales:
            return plain
        return replace(plain, kv_dtype=self._kv.dtype, kv_scales="token" if self._kv.scales_by_token else "head")


class SegmentCutLowering:
    """Ends the network at each attention and begins the next network after it (TensorRT for RTX has no plugin layers)."""

    def __init__(self, create_network: Callable[[], Any], names: TensorNames, *, max_sequence_length: int) -> None:
        self._create_network = create_network
        self._names = names
        self._max_sequence_length = max_sequence_length

    def query_factors(self, graph: Graph, scaling: QueryScaling, hidden: Any) -> Any:
        """See :class:`AttentionLowering`. A segment has the attention of one layer, so the input is added once."""
        start_index = graph.input(self._names.kvcache_start_index, "int32", (-1,))
        positions = step_lengths(graph, tokens=hidden, start_index=start_index).position_ids
        return query_factors(graph, scaling, positions, length=self._max_sequence_length)

    def add_attention(self, graph: Graph, layer: int, qkv: Sequence[Any], kept: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """See :class:`AttentionLowering`."""
        *qkv_names, attended_name = attention_tensor_names(layer)
        for tensor, name in zip(qkv, qkv_names, strict=True):
            graph.output(tensor, name)
        shapes = {}
        for name, tensor in kept.items():
            shapes[name] = tuple(tensor.shape)
            if tensor.name != name:  # in the first segment the hidden state is an input, so the next segment can read it anyway
                graph.output(tensor, name)
        attended_shape = tuple(qkv[0].shape)
        graph.network = self._create_network()
        next_kept = {name: graph.input(name, graph.dtype, shape) for name, shape in shapes.items()}
        return graph.input(attended_name, graph.dtype, attended_shape), next_kept
