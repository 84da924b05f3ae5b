"""How a decoder is cut into segments and operations: defined once for builder, engine folder, runtime and inspection.

Segment ``i`` ends where layer ``i`` needs its attention; the last one ends in the logits.
"""

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.engine.decoder_tensors import logits_tensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.model import ModelConfig
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.segments import CustomOpNode, Segment, Stage

#: Names of the constants of an engine in segments. They are stored in one file of the engine folder, whatever stages read them.
EMBEDDING, COS_SIN = "model.embed_tokens.weight", "rope.cos_sin"


def hidden_state_name(layer: int) -> str:
    """Return the name of the hidden state ``[B, s, hidden]`` that enters a layer.

    Parameters
    ----------
    layer : int
        Index of the layer.

    Returns
    -------
    str
        ``"hidden_0"`` for the first layer: what the embedding gives.
    """
    return f"hidden_{layer}"


def attention_tensor_names(layer: int) -> tuple[str, str, str, str]:
    """Return the names of a layer's q, k and v, and of the result of its attention.

    Parameters
    ----------
    layer : int
        Index of the layer.

    Returns
    -------
    tuple of str
        Each names a tensor ``[B, s, heads, D]``.
    """
    return f"q_{layer}", f"k_{layer}", f"v_{layer}", f"attended_{layer}"


def decoder_constants(model: ModelConfig, cache: KVCacheConfig) -> tuple[TensorSpec, ...]:
    """Return the constants that the stages of a decoder read.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    cache : KVCacheConfig
        The cache that the engine runs on.

    Returns
    -------
    tuple of TensorSpec
        The embedding table ``[vocab, hidden]`` in the dtype of the cache, and cosines and sines of RoPE, float32
        ``[S, 2, D / 2]``.
    """
    table = (model.vocab_size, model.hidden_size)
    cos_sin = (cache.max_sequence_length, 2, model.layers[0].attention.rotary_dim // 2)  # all layers have the same RoPE
    return TensorSpec.input(EMBEDDING, table, cache.dtype), TensorSpec.input(COS_SIN, cos_sin, "float32")


def decoder_stages(model: ModelConfig, cache: KVCacheConfig, names: TensorNames, *, max_logits_per_slot: int = 1) -> tuple[Stage, ...]:
    """Return the stages of an engine of ``model`` over a combined cache.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    cache : KVCacheConfig
        In the COMBINED layout.
    names : TensorNames
        Names of the engine's inputs and outputs.
    max_logits_per_slot : int
        Most new tokens per slot whose logits one enqueue returns.

    Returns
    -------
    tuple of Segment or CustomOpNode
        In the order in which they run: the embedding, then for each layer a segment and an attention, then the last segment.
    """
    table, _ = decoder_constants(model, cache)
    stages: list[Stage] = [
        CustomOpNode(operation=EmbeddingOp.name, attributes={}, inputs=(EMBEDDING, names.input_ids), outputs=(hidden_state_name(0),))
    ]
    hidden = (-1, -1, model.hidden_size)
    for layer in range(model.num_layers + 1):
        tensors = [TensorSpec.input(hidden_state_name(max(layer - 1, 0)), hidden, cache.dtype)]
        if layer:
            mixer = model.layers[layer - 1].attention
            attended = (-1, -1, mixer.num_heads, mixer.head_dim)
            tensors.append(TensorSpec.input(attention_tensor_names(layer - 1)[-1], attended, cache.dtype))
        if layer == model.num_layers:
            last_token_ids, logits = logits_tensors(model, names, max_logits_per_slot=max_logits_per_slot)
            tensors += [last_token_ids, table, logits] if model.tie_word_embeddings else [last_token_ids, logits]
            stages.append(Segment(tensors=tuple(tensors)))
            break
        *qkv, attended_name = attention_tensor_names(layer)
        mixer = model.layers[layer].attention
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
        tensors += [TensorSpec.output(name, (-1, -1, count, mixer.head_dim), cache.dtype) for name, count in zip(qkv, heads, strict=True)]
        tensors += [TensorSpec.output(hidden_state_name(layer), hidden, cache.dtype)] if layer else []
        past, present = names.combined_pair(layer)
        inputs = (*qkv, past, names.kvcache_start_index, COS_SIN)
        stages.append(Segment(tensors=tuple(tensors)))
        attributes = {"num_heads": mixer.num_heads, "num_kv_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim}
        stages.append(CustomOpNode(operation=AttentionOp.name, attributes=attributes, inputs=inputs, outputs=(attended_name, present)))
    return tuple(stages)
