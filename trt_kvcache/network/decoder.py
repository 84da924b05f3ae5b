"""The whole decoder: inputs, layers, outputs."""

from __future__ import annotations

from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.network import head
from trt_kvcache.network.attention import AttentionContext
from trt_kvcache.network.causal_mask import causal_mask
from trt_kvcache.network.decoder_layer import decoder_layer
from trt_kvcache.network.decomposable import AttentionChoice, choose
from trt_kvcache.network.graph import Graph
from trt_kvcache.network.lengths import step_lengths
from trt_kvcache.network.rope import rope_tables
from trt_kvcache.network.weights import Weights

#: The variants of attention: TensorRT's own causal mask with key lengths, or an explicit mask.
ATTENTION_VARIANTS = ("native", "mask")


def add_decoder(
    graph: Graph,
    weights: Weights,
    model: ModelConfig,
    *,
    max_sequence_length: int,
    attention: str = "native",
    min_batch_size: int = 1,
    names: TensorNames = DEFAULT_NAMES,
) -> tuple[AttentionChoice, ...]:
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
        One of :data:`ATTENTION_VARIANTS`.
    min_batch_size : int
        Smallest batch of any profile.
    names : TensorNames

    Returns
    -------
    tuple of AttentionChoice
        How each layer's attention was built.

    Raises
    ------
    BuildError
        TensorRT refused a layer, which is named.
    """
    input_ids = graph.input(names.input_ids, "int32", (-1, -1))
    start_index = graph.input(names.kvcache_start_index, "int32", (-1,))
    last_token_ids = graph.input(names.last_token_ids, "int32", (-1, 1))

    lengths = step_lengths(graph, input_ids=input_ids, start_index=start_index)
    masked = attention == "mask"
    context = AttentionContext(
        model=model,
        names=names,
        max_sequence_length=max_sequence_length,
        lengths=lengths,
        tables=rope_tables(graph, model, length=max_sequence_length),
        mask=causal_mask(graph, position_ids=lengths.position_ids, max_sequence_length=max_sequence_length) if masked else None,
    )
    choices = tuple(
        choose(
            layer,
            attention,
            dtype=graph.dtype,
            num_attention_heads=model.num_attention_heads,
            head_dim=model.head_dim,
            min_batch_size=min_batch_size,
            max_sequence_length=max_sequence_length,
        )
        for layer in range(model.num_layers)
    )
    table = head.embedding_table(graph, weights)
    x = head.embed(graph, table, input_ids)
    for choice in choices:
        x = decoder_layer(graph, x, weights, context, choice)
    x = head.last_token(graph, x, last_token_ids)
    graph.output(head.logits(graph, x, weights, model, table), names.logits)
    return choices
