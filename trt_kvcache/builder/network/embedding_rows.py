"""Rows in place of rows of the embedding: an input of the network, from which tokens with ids past the vocabulary take rows."""

from typing import Any

from trt_kvcache.builder.network.embedding_table import bounded, replaced
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.engine.embedding_rows import embedding_tensors
from trt_kvcache.model import ModelConfig


def with_rows(graph: Graph, hidden: Any, input_ids: Any, model: ModelConfig, capacity: int) -> Any:
    """Return ``hidden`` ``[B, s, hidden]`` with the rows of ids from ``vocab_size`` on, which no multiplier scales."""
    [spec] = embedding_tensors(model, capacity, graph.dtype)
    rows = graph.input(spec.name, spec.dtype, spec.shape)
    return replaced(graph, "model.embed_tokens/rows", hidden, rows, input_ids, start=model.vocab_size)


def ids_of_tokens(graph: Graph, input_ids: Any, model: ModelConfig) -> Any:
    """Return token ids for the lookup in the embedding: any id in place of those of rows."""
    return bounded(graph, "model.embed_tokens/tokens", input_ids, "MIN", model.vocab_size - 1)
