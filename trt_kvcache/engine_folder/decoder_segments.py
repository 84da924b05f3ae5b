"""``decoder_stages``: a decoder cut into segments and operations, for builder, engine folder, runtime and inspection.

A segment ends at an attention or a registered operation; the last one ends in the logits. Layers with states are within segments.
"""

from itertools import accumulate

from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.engine.attention_variants import window_in_cache
from trt_kvcache.engine.decoder_tensors import cache_indices, logits_tensors, scale_tensors, state_tensors
from trt_kvcache.engine.embedding_rows import embedding_tensors
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.model import AttentionConfig, ModelConfig, RopeConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.segments import CustomOpNode, Segment, Stage

#: Names of the constants of an engine in segments. They are stored in one file of the engine folder, which all segments share.
#: Where layers differ in RoPE, the second table is ``"rope.cos_sin_1"`` and so on.
EMBEDDING, COS_SIN = "model.embed_tokens.weight", "rope.cos_sin"

#: Names of the rows ``[B, s, layers * size]`` of the per-layer embedding, and of the inputs ``[B, s, layers, size]`` of all layers.
PER_LAYER_ROWS, PER_LAYER_INPUTS = "per_layer_rows", "per_layer_inputs"

#: RoPE and the head dimension: they determine the angles of a layer.
RopeKind = tuple[RopeConfig, int]


def hidden_state_name(layer: int) -> str:
    """Return the name of the hidden state ``[B, s, hidden]`` to which a layer adds its attention."""
    return f"hidden_{layer}"


def embedding_output_name(model: ModelConfig, max_embeddings: int = 0) -> str:
    """Return the name of the embedded tokens: ``"embedded"`` where the first segment changes the hidden state, else ``"hidden_0"``."""
    is_changed = model.embedding_multiplier != 1 or model.layers[0].parallel_mixer is not None or max_embeddings > 0
    return "embedded" if is_changed else hidden_state_name(0)


def attention_tensor_names(layer: int) -> tuple[str, str, str, str]:
    """Return the names of a layer's q, k and v, and of the result of its attention."""
    return f"q_{layer}", f"k_{layer}", f"v_{layer}", f"attended_{layer}"


def output_gate_name(layer: int) -> str:
    """Return the name of the output gate ``[B, s, heads * D]`` of a layer's attention, before its sigmoid."""
    return f"output_gate_{layer}"


def rope_kind(mixer: AttentionConfig) -> RopeKind | None:
    """Return RoPE and head dimension of a layer, which determine its angles; None without RoPE."""
    return None if mixer.rope is None else (mixer.rope, mixer.head_dim)


def cos_sin_names(model: ModelConfig) -> dict[RopeKind, str]:
    """Return the name of the table of cosines and sines of each kind of RoPE."""
    kinds = dict.fromkeys(map(rope_kind, model.attention_layers))
    return {kind: f"{COS_SIN}_{index}" if index else COS_SIN for index, kind in enumerate(filter(None, kinds))}


def segments_with_per_layer_inputs(model: ModelConfig) -> set[int]:
    """Return the indices of the segments with layers that read a per-layer input. The first segment computes these inputs."""
    segments = accumulate(isinstance(layer.mixer, AttentionConfig) for layer in model.layers)
    return {segment for layer, segment in zip(model.layers, segments, strict=True) if layer.per_layer_input is not None}


def attention_op_attributes(mixer: AttentionConfig, *, max_sequence_length: int) -> dict[str, int | float]:
    """Return the attributes of :class:`~trt_kvcache.ops.attention_op.AttentionOp` for a layer."""
    mixer = mixer.after_norms
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
        "sinks": 1 if mixer.sinks else None,
    }
    return {**attributes, **{name: value for name, value in own.items() if value is not None}}


def decoder_constants(model: ModelConfig, cache: DecoderCacheConfig, *, dtype: str | None = None) -> tuple[TensorSpec, ...]:
    """Return the embedding table ``[vocab, hidden]``, that of per-layer embeddings, and for each kind of RoPE one of angles.

    Angles are ``[S, 2, rotary_dim / 2]`` float32.
    """
    computed, per_layer = dtype or cache.dtype, model.per_layer_embedding
    tables = [TensorSpec.input(EMBEDDING, (model.vocab_size, model.hidden_size), computed)]
    if per_layer is not None:
        tables.append(TensorSpec.input(PER_LAYER_EMBEDDING, per_layer.shape(model.num_layers), computed))
    angles = (
        TensorSpec.input(name, (cache.max_sequence_length, 2, rope.rotary_dim(head_dim) // 2), "float32")
        for (rope, head_dim), name in cos_sin_names(model).items()
    )
    return *tables, *angles


def decoder_stages(
    model: ModelConfig,
    cache: DecoderCacheConfig,
    names: TensorNames,
    *,
    max_logits_per_slot: int = 1,
    dtype: str | None = None,
    max_embeddings: int = 0,
) -> tuple[Stage, ...]:
    """Return the stages over a combined cache, in order: embeddings, a segment and its operation for each cut, the last segment.

    Rows in place of rows of the embedding come in within the first segment.
    """
    computed = dtype or cache.dtype
    table, *tables = decoder_constants(model, cache, dtype=computed)
    angles = {spec.name: spec for spec in tables}
    rows = _embedded(model, computed, max_embeddings)
    stages: list[Stage] = [
        CustomOpNode(operation=EmbeddingOp.name, attributes={}, inputs=(name, names.input_ids), outputs=(spec.name,))
        for name, spec in rows.items()
    ]
    hidden = (-1, -1, model.hidden_size)
    entering, tensors = rows[EMBEDDING].name, [*rows.values(), *_per_layer_inputs(model, 0, computed)]
    if max_embeddings:
        tensors += [TensorSpec.input(names.input_ids, (-1, -1), "int32"), *embedding_tensors(model, max_embeddings, computed)]
    for layer, (config, index) in enumerate(zip(model.layers, cache_indices(model), strict=True)):
        mixer = config.mixer
        if index.states is not None:
            tensors += [spec for spec in _states_in_segment(cache, names, index.states) if spec not in tensors]
        if not isinstance(mixer, AttentionConfig) or index.kv is None:
            continue
        q, k, v, attended_name = attention_tensor_names(layer)
        heads = {q: mixer.num_heads, **dict.fromkeys((k, v) if mixer.stores_kv else (), mixer.num_kv_heads)}
        tensors += [TensorSpec.output(name, (-1, -1, count, mixer.head_dim), computed) for name, count in heads.items()]
        if entering != hidden_state_name(layer):
            tensors.append(TensorSpec.output(hidden_state_name(layer), hidden, computed))
        gates = [(output_gate_name(layer), (-1, -1, mixer.num_heads * mixer.head_dim))] if mixer.output_gate else []
        tensors += [TensorSpec.output(name, shape, computed) for name, shape in gates]
        kind = rope_kind(mixer)
        if kind is not None and mixer.rotates_before_norm:
            tensors.append(angles[cos_sin_names(model)[kind]])
        if mixer.query_scaling is not None or mixer.rotates_before_norm:
            tensors.append(TensorSpec.input(names.kvcache_start_index, (-1,), "int32"))
        stages += [Segment(tensors=tuple(tensors)), _attention_node(model, cache, names, layer, index.kv)]
        entering, attended = hidden_state_name(layer), (-1, -1, mixer.num_heads, mixer.head_dim)
        tensors = [TensorSpec.input(entering, hidden, computed), TensorSpec.input(attended_name, attended, computed)]
        tensors += [TensorSpec.input(name, shape, computed) for name, shape in gates]
        tensors += _per_layer_inputs(model, sum(isinstance(stage, Segment) for stage in stages), computed)
    last_token_ids, logits = logits_tensors(model, names, max_logits_per_slot=max_logits_per_slot)
    tensors += [last_token_ids, table, logits] if model.tie_word_embeddings else [last_token_ids, logits]
    return (*stages, Segment(tensors=tuple(tensors)))


def _embedded(model: ModelConfig, dtype: str, max_embeddings: int) -> dict[str, TensorSpec]:
    """Return the rows of the token ids in each table, which the first segment reads."""
    found = {EMBEDDING: TensorSpec.input(embedding_output_name(model, max_embeddings), (-1, -1, model.hidden_size), dtype)}
    if model.per_layer_embedding is None:
        return found
    width = model.num_layers * model.per_layer_embedding.size
    return found | {PER_LAYER_EMBEDDING: TensorSpec.input(PER_LAYER_ROWS, (-1, -1, width), dtype)}


def _per_layer_inputs(model: ModelConfig, segment: int, dtype: str) -> list[TensorSpec]:
    """Return the inputs of all layers if a segment reads them, or writes them for later ones; else nothing."""
    readers = segments_with_per_layer_inputs(model)
    if model.per_layer_embedding is None or (segment not in readers if segment else readers <= {0}):
        return []
    make = TensorSpec.input if segment else TensorSpec.output
    return [make(PER_LAYER_INPUTS, (-1, -1, model.num_layers, model.per_layer_embedding.size), dtype)]


def _attention_node(model: ModelConfig, cache: DecoderCacheConfig, names: TensorNames, layer: int, index: int) -> CustomOpNode:
    """Return the attention of a layer, which has the K and V of an index; it appends those of the layer that stores them."""
    mixer = model.layers[layer].attention
    q, *_, attended = attention_tensor_names(layer)
    _, k, v, _ = attention_tensor_names(layer if mixer.kv_source_layer is None else mixer.kv_source_layer)
    past, present = names.combined_pair(index)
    kind = rope_kind(mixer.after_norms)
    angles = () if kind is None else (cos_sin_names(model)[kind],)
    scales = [spec.name for spec in ([] if cache.kv is None else scale_tensors(cache.kv, names, index))]
    return CustomOpNode(
        operation=AttentionOp.name,
        attributes=attention_op_attributes(mixer, max_sequence_length=cache.max_sequence_length),
        inputs=(q, k, v, past, names.kvcache_start_index, *scales[:1], *angles),
        outputs=(attended, present, *scales[1:]),
    )


def _states_in_segment(cache: DecoderCacheConfig, names: TensorNames, index: int) -> list[TensorSpec]:
    """Return the tensors of a layer with states that TensorRT computes within a segment."""
    assert cache.mamba is not None
    states = state_tensors(cache.mamba, names, index).values()
    return [TensorSpec.input(names.new_lengths, (-1,), "int32"), *(spec for pair in states for spec in pair)]
