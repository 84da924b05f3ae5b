"""The whole decoder: inputs, layers, outputs."""

from collections.abc import Callable
from typing import Any

from trt_kvcache.builder.network import head
from trt_kvcache.builder.network.attention_lowering import PluginLayerLowering, SegmentCutLowering
from trt_kvcache.builder.network.causal_mask import causal_mask
from trt_kvcache.builder.network.decoder_layer import decoder_layer
from trt_kvcache.builder.network.decomposable import attention_layer_config
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.rope import cos_sin, rope_tables
from trt_kvcache.builder.network.self_attention import DecoderContext
from trt_kvcache.builder.network.step_lengths import step_lengths
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine_folder.decoder_segments import COS_SIN, EMBEDDING, hidden_state_name
from trt_kvcache.trt.plugin import AttentionAttributes


def add_decoder(
    graph: Graph,
    weights: Weights,
    model: ModelConfig,
    *,
    max_sequence_length: int,
    attention: str = "native",
    min_batch_size: int = 1,
    names: TensorNames = DEFAULT_NAMES,
) -> tuple[AttentionLayerConfig, ...]:
    """Fill an empty network with a decoder.

    Parameters
    ----------
    graph : Graph
        To be kept until the build is done: it owns the arrays that TensorRT points at.
    weights : Weights
    model : ModelConfig
    max_sequence_length : int
        S: static in the caches, and the length of the RoPE tables.
    attention : str
        One of :data:`~trt_kvcache.engine.attention_variants.ATTENTION_VARIANTS`.
    min_batch_size : int
        Smallest batch of any profile.
    names : TensorNames

    Returns
    -------
    tuple of AttentionLayerConfig
        How each layer's attention was built.

    Raises
    ------
    BuildError
        TensorRT refused a layer, which is named.
    """
    input_ids = graph.input(names.input_ids, "int32", (-1, -1))
    start_index = graph.input(names.kvcache_start_index, "int32", (-1,))
    last_token_ids = graph.input(names.last_token_ids, "int32", (-1, 1))

    context: dict[str, Any]
    if attention == "plugin":
        heads = {"num_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads}
        fields = AttentionAttributes(**heads, head_dim=model.head_dim, rotary_dim=model.head_dim)
        angles = graph.constant(COS_SIN, cos_sin(model, length=max_sequence_length))
        layers = PluginLayerLowering(fields, names, max_sequence_length=max_sequence_length, start_index=start_index, cos_sin=angles)
        context = {"operation": layers}
    else:
        lengths = step_lengths(graph, input_ids=input_ids, start_index=start_index)
        context = {"lengths": lengths, "tables": rope_tables(graph, model, length=max_sequence_length)}
        if attention == "mask":
            context["mask"] = causal_mask(graph, position_ids=lengths.position_ids, max_sequence_length=max_sequence_length)
    shared = DecoderContext(model=model, names=names, max_sequence_length=max_sequence_length, **context)
    choices = attention_layer_configs(
        model, attention, dtype=graph.dtype, min_batch_size=min_batch_size, max_sequence_length=max_sequence_length
    )
    table = head.embedding_table(graph, weights)
    x = head.embed(graph, table, input_ids)
    for choice in choices:
        x = decoder_layer(graph, x, weights, shared, choice)
    x = head.last_token(graph, x, last_token_ids)
    graph.output(head.logits(graph, x, weights, model, table), names.logits)
    return choices


def add_segments(
    graph: Graph,
    weights: Weights,
    model: ModelConfig,
    begin: Callable[[], Any],
    *,
    max_sequence_length: int,
    names: TensorNames = DEFAULT_NAMES,
) -> tuple[AttentionLayerConfig, ...]:
    """Fill one network after another with the segments of a decoder: ``decoder_stages`` says what each has.

    Parameters
    ----------
    graph : Graph
        Over the first, empty network; then over the others.
    begin : callable
        Returns the next, empty network.
    weights, model, max_sequence_length, names
        As for :func:`add_decoder`.

    Raises
    ------
    BuildError
        TensorRT refused a layer, which is named.
    """
    shared = DecoderContext(model=model, names=names, max_sequence_length=max_sequence_length, operation=SegmentCutLowering(begin))
    choices = attention_layer_configs(model, "plugin", dtype=graph.dtype, min_batch_size=1, max_sequence_length=max_sequence_length)
    x = graph.input(hidden_state_name(0), graph.dtype, (-1, -1, model.hidden_size))
    for choice in choices:
        x = decoder_layer(graph, x, weights, shared, choice)
    x = head.last_token(graph, x, graph.input(names.last_token_ids, "int32", (-1, 1)))
    tied = model.tie_word_embeddings
    table = graph.input(EMBEDDING, graph.dtype, (model.vocab_size, model.hidden_size)) if tied else None
    graph.output(head.logits(graph, x, weights, model, table), names.logits)
    return choices


def attention_layer_configs(
    model: ModelConfig, attention: str, *, dtype: str, min_batch_size: int, max_sequence_length: int
) -> tuple[AttentionLayerConfig, ...]:
    """Choose for every layer: see :func:`~trt_kvcache.builder.network.decomposable.attention_layer_config`."""
    return tuple(
        attention_layer_config(
            layer,
            attention,
            dtype=dtype,
            num_attention_heads=model.num_attention_heads,
            head_dim=model.head_dim,
            min_batch_size=min_batch_size,
            max_sequence_length=max_sequence_length,
        )
        for layer in range(model.num_layers)
    )
