"""How attention that TensorRT has no layer for gets into a network: as a plugin layer, or by ending the network there."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine_folder.decoder_segments import attention_tensor_names, hidden_state_name
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.trt.plugin import AttentionAttributes, register
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION


class AttentionLowering(Protocol):
    """Attention as an operation of this package."""

    def attend(self, graph: Graph, layer: int, qkv: Sequence[Any], residual: Any) -> tuple[Any, Any]:
        """Add it to a network.

        Parameters
        ----------
        graph : Graph
        layer : int
        qkv : three ITensor ``[B, s, heads, D]``
            Not rotated, in the dtype of the model.
        residual : ITensor ``[B, s, hidden]``
            What else is needed after it.

        Returns
        -------
        attended : ITensor ``[B, s, heads, D]``
        residual : ITensor ``[B, s, hidden]``
            The same values; no other tensor from before may be used.
        """


class PluginLayerLowering:
    """Adds ``KVCacheAttention`` layers, and the combined caches as inputs and outputs of the network (full TensorRT).

    Parameters
    ----------
    fields : AttentionAttributes
    names : TensorNames
    max_sequence_length : int
    start_index : ITensor ``[B]``, int32
    cos_sin : ITensor ``[S, 2, D / 2]``, float32
    """

    def __init__(
        self, fields: AttentionAttributes, names: TensorNames, *, max_sequence_length: int, start_index: Any, cos_sin: Any
    ) -> None:
        self._fields = fields
        self._names = names
        self._shape = (-1, 2, fields.num_kv_heads, max_sequence_length, fields.head_dim)
        self._lengths = start_index
        self._cos_sin = cos_sin
        self._arrays = fields.plugin_field_arrays()  # plugin fields point into them

    def attend(self, graph: Graph, layer: int, qkv: Sequence[Any], residual: Any) -> tuple[Any, Any]:
        """See :class:`AttentionLowering`."""
        trt = graph.trt
        register(graph.tensorrt)
        creator = trt.get_plugin_registry().get_creator(PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE)
        kinds = trt.PluginFieldType
        fields = [trt.PluginField(name, array, getattr(kinds, ATTRIBUTE_TYPES[name])) for name, array in self._arrays.items()]
        name = f"model.layers.{layer}.self_attn/attend"
        plugin = creator.create_plugin(name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        before, after = self._names.combined_pair(layer)
        cache = graph.input(before, graph.dtype, self._shape)
        added = graph.layer(name, "plugin_v3", [*qkv, cache, self._lengths, self._cos_sin], [], plugin)
        attended = graph.result(added)
        graph.output(added.get_output(1), after)
        return attended, residual


class SegmentCutLowering:
    """Ends the network at each attention and begins the next one behind it (TensorRT for RTX has no plugin layers).

    Parameters
    ----------
    begin : callable
        Returns a new, empty ``INetworkDefinition``.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def attend(self, graph: Graph, layer: int, qkv: Sequence[Any], residual: Any) -> tuple[Any, Any]:
        """See :class:`AttentionLowering`."""
        *names, attended = attention_tensor_names(layer)
        for tensor, name in zip(qkv, names, strict=True):
            graph.output(tensor, name)
        if residual.name != hidden_state_name(layer):  # the first one is an input of its segment: it is there already
            graph.output(residual, hidden_state_name(layer))
        shapes = [tuple(tensor.shape) for tensor in (residual, qkv[0])]
        graph.network = self._begin()
        after, result = (
            graph.input(name, graph.dtype, shape) for name, shape in zip((hidden_state_name(layer), attended), shapes, strict=True)
        )
        return result, after
