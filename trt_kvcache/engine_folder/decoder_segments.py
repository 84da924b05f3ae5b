"""How a decoder is cut into segments and operations: defined once for builder, engine folder, runtime and inspection.

Segment ``i`` ends where layer ``i`` needs its attention; the last one ends in the logits.
"""

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.engine.attention_variants import window_in_cache
from trt_kvcache.engine.decoder_tensors import logits_tensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.model import AttentionConfig, ModelConfig, RopeConfig
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.segments import CustomOpNode, Segment, Stage

#: Names of the constants of an engine in segments. They are stored in one file of the engine folder, whatever stages read them.
#: Where layers differ in RoPE, the second table is ``"rope.cos_sin_1"`` and so on.
EMBEDDING, COS_SIN = "model.embed_tokens.weight", "rope.cos_sin"

#: What the angles of a layer depend on: RoPE and the elements of a head.
RopeKind = tuple[RopeConfig, int]


def hidden_state_name(layer: int) -> str:
    """Return the name of the hidden state ``[B, s, hidden]`` that enters a layer.

    Parameters
    ----------
    layer : int
        Index of the layer.

    Returns
    -------
    str
        ``"hidden_0"`` for the first layer.
    """
    return f"hidden_{layer}"


def embedding_output_name(model: ModelConfig) -> str:
    """Return the name of what the embedding gives.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.

    Returns
    -------
    str
        The hidden state that enters the first layer, or ``"embedded"`` where the first segment multiplies that first.
    """
    return hidden_state_name(0) if model.embedding_multiplier == 1 else "embedded"


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


def rope_kind(mixer: AttentionConfig) -> RopeKind | None:
    """Return what the angles of a layer depend on, or None if it has no RoPE.

    Parameters
    ----------
    mixer : AttentionConfig
        Attention of the layer.
    """
    return None if mixer.rope is None else (mixer.rope, mixer.head_dim)


def cos_sin_names(model: ModelConfig) -> dict[RopeKind, str]:
    """Return the names of the tables of cosines and sines.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.

    Returns
    -------
    dict of RopeKind to str
        One for each kind of RoPE, in the order in which the layers first have them.
    """
    kinds = dict.fromkeys(rope_kind(layer.attention) for layer in model.layers)
    return {kind: f"{COS_SIN}_{index}" if index else COS_SIN for index, kind in enumerate(filter(None, kinds))}


def attention_op_attributes(mixer: AttentionConfig, *, max_sequence_length: int) -> dict[str, int | float]:
    """Return what the attention of a layer is created with, as :class:`~trt_kvcache.ops.attention_op.AttentionOp` takes it.

    Parameters
    ----------
    mixer : AttentionConfig
        Attention of the layer.
    max_sequence_length : int
        Tokens that a slot can hold, S.

    Returns
    -------
    dict of str to int or float
        Sizes, and what differs from the operation's defaults.
    """
    attributes: dict[str, int | float] = {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
    }
    own = {
        "scale": mixer.scale,
        "window": window_in_cache(mixer, max_sequence_length),
        "softcap": mixer.softcap,
        "rotary_dim": None if mixer.rotary_dim == mixer.head_dim else mixer.rotary_dim,
    }
    return {**attributes, **{name: value for name, value in own.items() if value is not None}}


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
        The embedding table ``[vocab, hidden]`` in the dtype of the cache, and for each kind of RoPE cosines and sines, float32
        ``[S, 2, rotary_dim / 2]``.
    """
    table = TensorSpec.input(EMBEDDING, (model.vocab_size, model.hidden_size), cache.dtype)
    angles = (
        TensorSpec.input(name, (cache.max_sequence_length, 2, rope.rotary_dim(head_dim) // 2), "float32")
        for (rope, head_dim), name in cos_sin_names(model).items()
    )
    return table, *angles


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
    table, *_ = decoder_constants(model, cache)
    tables = cos_sin_names(model)
    embedded = embedding_output_name(model)
    stages: list[Stage] = [
        CustomOpNode(operation=EmbeddingOp.name, attributes={}, inputs=(EMBEDDING, names.input_ids), outputs=(embedded,))
    ]
    hidden = (-1, -1, model.hidden_size)
    for layer in range(model.num_layers + 1):
        entering = hidden_state_name(layer - 1) if layer else embedded
        tensors = [TensorSpec.input(entering, hidden, cache.dtype)]
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
        if entering != hidden_state_name(layer):
            tensors.append(TensorSpec.output(hidden_state_name(layer), hidden, cache.dtype))
        if mixer.query_scaling is not None:
            tensors.append(TensorSpec.input(names.kvcache_start_index, (-1,), "int32"))
        stages.append(Segment(tensors=tuple(tensors)))
        past, present = names.combined_pair(layer)
        kind = rope_kind(mixer)
        inputs = (*qkv, past, names.kvcache_start_index, *(() if kind is None else (tables[kind],)))
        attributes = attention_op_attributes(mixer, max_sequence_length=cache.max_sequence_length)
        stages.append(CustomOpNode(operation=AttentionOp.name, attributes=attributes, inputs=inputs, outputs=(attended_name, present)))
    return tuple(stages)
