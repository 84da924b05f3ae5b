"""Lowering of attention over a combined cache, for which TensorRT has no layer: to a plugin layer, or to a cut between segments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.plugin_nodes import DecoderPluginLayers
from trt_kvcache.builder.network.query_scaling import query_factors
from trt_kvcache.builder.network.rope import RopeTables, split_table
from trt_kvcache.builder.network.step_lengths import step_lengths
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine_folder.decoder_segments import RopeKind, attention_tensor_names, cos_sin_names, rope_kind
from trt_kvcache.engine_folder.v_outputs import v_output_name
from trt_kvcache.model import ModelConfig, QueryScaling


class AttentionLowering(Protocol):
    """Adds the attention of a layer to a network."""

    def query_factors(self, graph: Graph, scaling: QueryScaling, hidden: Any) -> Any:
        """Return the factors of queries that are scaled by position.

        Parameters
        ----------
        graph : Graph
            The network.
        scaling : QueryScaling
            The factor of each position.
        hidden : ITensor [B, s, hidden]
            A hidden state in this network.

        Returns
        -------
        ITensor [B, s, 1, 1] float32
            In this network.
        """

    def rope(self, graph: Graph, kind: RopeKind, hidden: Any) -> tuple[RopeTables, Any]:
        """Return the tables and positions of RoPE for a layer that applies it before the norms of q and k.

        Parameters
        ----------
        graph : Graph
            The network.
        kind : tuple of RopeConfig and int
            RoPE and head dimension.
        hidden : ITensor [B, s, hidden]
            A hidden state in this network.

        Returns
        -------
        tables : RopeTables
            In this network.
        position_ids : ITensor [B, s] int32
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
            q, k and v after their norms, in the dtype of the model: before RoPE, unless it is applied before the norms. Only q, if the
            layer reads K and V of another one.
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
    """Adds ``KVCacheAttention`` plugin layers, and the combined caches as inputs and outputs.

    Quantized K and V are inputs and outputs in int32: see :mod:`trt_kvcache.ops.int32_packing`.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: DecoderPluginLayers,
        *,
        max_sequence_length: int,
        start_index: Any,
        trees: Sequence[Any],
        cos_sin: Mapping[RopeKind, Any],
        sinks: Mapping[int, Any],
        v_outputs: bool,
    ) -> None:
        self._model = model
        self._layers = layers
        self._max_sequence_length = max_sequence_length
        self._start_index = start_index
        self._ancestors, self._depths = trees[:1], trees[1:]  # the inputs for trees of draft tokens, or nothing
        self._cos_sin = cos_sin
        self._sinks = sinks
        self._v_outputs = v_outputs
        self._positions: Any = None
        self._query_factors: dict[QueryScaling, Any] = {}
        self._rope_tables: dict[RopeKind, RopeTables] = {}
        # Of each layer that stores K and V: its k and v, its cache and scales as they are after the layers so far, and its last user.
        # Each user gets these, and so appends the same rows again, at the same place: a plugin layer cannot read without appending.
        self._new: dict[int, Sequence[Any]] = {}
        self._kv: dict[int, list[Any]] = {}
        users = zip(model.attention_indices, model.attention_layers, strict=True)
        self._last_user = {layer if mixer.kv_source_layer is None else mixer.kv_source_layer: layer for layer, mixer in users}

    def query_factors(self, graph: Graph, scaling: QueryScaling, hidden: Any) -> Any:
        """See :class:`AttentionLowering`."""
        if scaling not in self._query_factors:
            sizes = {"length": self._max_sequence_length, "index": len(self._query_factors)}
            self._query_factors[scaling] = query_factors(graph, scaling, self._position_ids(graph, hidden), **sizes)
        return self._query_factors[scaling]

    def rope(self, graph: Graph, kind: RopeKind, hidden: Any) -> tuple[RopeTables, Any]:
        """See :class:`AttentionLowering`."""
        if kind not in self._rope_tables:
            name = f"{cos_sin_names(self._model)[kind]}/split"
            self._rope_tables[kind] = split_table(graph, name, self._cos_sin[kind], kind)
        return self._rope_tables[kind], self._position_ids(graph, hidden)

    def _position_ids(self, graph: Graph, hidden: Any) -> Any:
        if self._positions is None:
            depths = self._depths[0] if self._depths else None
            self._positions = step_lengths(graph, tokens=hidden, start_index=self._start_index, depths=depths).position_ids
        return self._positions

    def add_attention(self, graph: Graph, layer: int, qkv: Sequence[Any], kept: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """See :class:`AttentionLowering`."""
        node, mixer = self._layers.attention[layer], self._model.layers[layer].attention
        q, *new = qkv
        source = layer if mixer.kv_source_layer is None else mixer.kv_source_layer
        if source == layer:
            self._new[layer] = new
            self._kv[layer] = [graph.input(spec.name, spec.dtype, spec.shape) for spec in node.past]
            if self._v_outputs:
                graph.output(new[-1], v_output_name(layer))
        cache, *scales = self._kv[source]
        kind = rope_kind(mixer.after_norms)
        angles = [] if kind is None else [self._cos_sin[kind]]
        sinks = [self._sinks[layer]] if layer in self._sinks else []
        lengths = [self._start_index, *self._ancestors]
        plugin_layer = self._layers.layers.add(node.layer, [q, *self._new[source], cache, *lengths, *scales, *angles, *sinks])
        attended = graph.result(plugin_layer)
        for index, spec in enumerate(node.present):
            self._kv[source][index] = plugin_layer.get_output(1 + index)
            if self._last_user[source] == layer:
                graph.output(self._kv[source][index], spec.name)
        return attended, kept


class SegmentCutLowering:
    """Ends the network at each attention and begins the next network after it (TensorRT for RTX, by ``plugin_layers="segments"``)."""

    def __init__(self, model: ModelConfig, create_network: Callable[[], Any], names: TensorNames, *, max_sequence_length: int) -> None:
        self._model = model
        self._create_network = create_network
        self._names = names
        self._max_sequence_length = max_sequence_length
        self._positions: Any = None  # of the segment that is being built

    def query_factors(self, graph: Graph, scaling: QueryScaling, hidden: Any) -> Any:
        """See :class:`AttentionLowering`."""
        return query_factors(graph, scaling, self._position_ids(graph, hidden), length=self._max_sequence_length)

    def rope(self, graph: Graph, kind: RopeKind, hidden: Any) -> tuple[RopeTables, Any]:
        """See :class:`AttentionLowering`. A segment has the attention of one layer, so the input is added once."""
        name, (rope, head_dim) = cos_sin_names(self._model)[kind], kind
        table = graph.input(name, "float32", (self._max_sequence_length, 2, rope.rotary_dim(head_dim) // 2))
        return split_table(graph, f"{name}/split", table, kind), self._position_ids(graph, hidden)

    def _position_ids(self, graph: Graph, hidden: Any) -> Any:
        if self._positions is None:
            start_index = graph.input(self._names.kvcache_start_index, "int32", (-1,))
            self._positions = step_lengths(graph, tokens=hidden, start_index=start_index).position_ids
        return self._positions

    def add_attention(self, graph: Graph, layer: int, qkv: Sequence[Any], kept: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """See :class:`AttentionLowering`."""
        *qkv_names, attended_name = attention_tensor_names(layer)
        for tensor, name in zip(qkv, qkv_names, strict=False):  # q alone, if the layer reads K and V of another one
            graph.output(tensor, name)
        shapes = {}
        for name, tensor in kept.items():
            shapes[name] = tuple(tensor.shape)
            if tensor.name != name:  # in the first segment the hidden state is an input, so the next segment can read it anyway
                graph.output(tensor, name)
        attended_shape = tuple(qkv[0].shape)
        graph.network = self._create_network()
        self._positions = None
        next_kept = {name: graph.input(name, graph.dtype, shape) for name, shape in shapes.items()}
        return graph.input(attended_name, graph.dtype, attended_shape), next_kept
