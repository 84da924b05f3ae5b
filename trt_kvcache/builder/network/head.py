"""Both ends of a decoder: the scale of embedded tokens, and the LM head, from the last hidden state to logits."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.norm import norm
from trt_kvcache.builder.network.projection import matmul_transposed, projection
from trt_kvcache.builder.network.scalar_multiply import multiplied, softcapped
from trt_kvcache.builder.network.weights import PluginProducts, Weights
from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, final_norm_bias_name, final_norm_name

#: Module of the LM head, and role of its matrix.
HEAD_ROLE = HEAD.removesuffix(".weight")


def scaled_embedding(graph: Graph, rows: Any, model: ModelConfig) -> Any:
    """Multiply embedded tokens by the model's embedding multiplier; no layer for a multiplier of 1."""
    return multiplied(graph, "model.embed_tokens/scale", rows, model.embedding_factor(graph.dtype))


def last_token(graph: Graph, x: Any, last_token_ids: Any) -> Any:
    """Select one token of each slot: ``[B, hidden]`` of ``x`` ``[B, s, hidden]`` at ``last_token_ids`` ``[B, 1]``."""
    layer = graph.layer("last_token", "gather_v2", x, last_token_ids, graph.trt.GatherMode.ND)
    layer.num_elementwise_dims = 1  # the batch
    return graph.result(layer)


def chosen_tokens(graph: Graph, x: Any, last_token_ids: Any) -> Any:
    """Select m tokens of each slot by ``last_token_ids`` ``[B, m]``, as rows ``[B * m, hidden]``: the LM head multiplies one matrix."""
    layer = graph.layer("chosen_tokens", "gather_v2", x, last_token_ids, graph.trt.GatherMode.DEFAULT)
    layer.axis = 1
    layer.num_elementwise_dims = 1  # the batch
    return graph.shuffle("chosen_tokens/rows", graph.result(layer), reshape=(-1, x.shape[-1]))


def by_slot(graph: Graph, rows: Any, last_token_ids: Any, model: ModelConfig) -> Any:
    """Reshape the logits of selected tokens from ``[B * m, vocab]`` to ``[B, m, vocab]``."""
    vocab = graph.constant("logits/vocab", np.array([model.vocab_size], np.int64))
    shape = graph.op("logits/shape", "concatenation", [graph.op("logits/slots_and_tokens", "shape", last_token_ids), vocab])
    layer = graph.layer("logits/by_slot", "shuffle", rows)
    layer.set_input(1, shape)
    return graph.result(layer)


def final_norm(graph: Graph, x: Any, weights: Weights, model: ModelConfig) -> Any:
    """Apply the final norm to ``[..., hidden]``."""
    bias = final_norm_bias_name(model)
    stored = NormWeights(weights(final_norm_name(model)), None if bias is None else weights(bias))
    return norm(graph, x, "model.norm", stored, model.final_norm)


def logits(graph: Graph, normed: Any, weights: Weights, model: ModelConfig, table: Any, products: PluginProducts | None = None) -> Any:
    """Apply the LM head to ``[B, hidden]``, after the final norm; the logits are cast to float32, then divided and soft-capped."""
    if model.tie_word_embeddings:
        product = matmul_transposed(graph, "lm_head/matmul", normed, table)
    else:
        product = _packed_product(graph, normed, model, products)
        if product is None:
            product = projection(graph, HEAD_ROLE, normed, weights.matrix(HEAD))
    found = graph.cast("lm_head/to_float32", product, "float32")
    return softcapped(graph, "logits", multiplied(graph, "logits/scale", found, 1 / model.logits_divisor), model.final_softcap)


def _packed_product(graph: Graph, normed: Any, model: ModelConfig, products: PluginProducts | None) -> Any:
    """Apply the LM head in a plugin layer, which takes one token of each slot; None if it has none."""
    if products is None or not products.has(None, HEAD_ROLE):
        return None
    tokens = graph.shuffle("lm_head/tokens", normed, reshape=(-1, 1, model.hidden_size))
    product = products.added(graph, None, HEAD_ROLE, tokens)
    return graph.shuffle("lm_head/rows", product, reshape=(-1, product.shape[-1]))


def spread(graph: Graph, logits: Any, draft_tokens: npt.NDArray[np.int64], model: ModelConfig) -> Any:
    """Return the logits ``[n, vocab]`` of all token ids: those of ``draft_tokens``, of ``logits`` ``[n, draft vocab]``, the others -inf."""
    rows, added = np.zeros(model.vocab_size, np.int32), np.full((1, model.vocab_size), -np.inf, np.float32)
    rows[draft_tokens], added[0, draft_tokens] = np.arange(len(draft_tokens)), 0
    found = graph.op("logits/of_tokens", "gather", logits, graph.constant("logits/rows", rows), 1)
    return graph.elementwise("logits/spread", found, "SUM", graph.constant("logits/impossible", added))
