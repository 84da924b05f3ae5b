"""Names and shapes of the tensors of a checkpoint, as Hugging Face transformers names them."""

from trt_kvcache.model.families.family import (
    CENTROIDS,
    EAGLE3_EMBEDDING_NORM,
    EAGLE3_HIDDEN_NORM,
    EAGLE3_PROJECTION,
    EMBEDDING,
    FINAL_NORM,
    MERGE_PROJECTION,
    MERGED_EMBEDDING_NORM,
    MERGED_HIDDEN_NORM,
    PER_LAYER_EMBEDDING,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    POST_PROJECTION,
    PRE_PROJECTION,
)
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import layer_tensors

__all__ = [
    "CENTROIDS",
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "PER_LAYER_EMBEDDING",
    "PER_LAYER_NORM",
    "PER_LAYER_PROJECTION",
    "POST_PROJECTION",
    "PRE_PROJECTION",
    "embedding_name",
    "embedding_tables",
    "final_norm_bias_name",
    "final_norm_name",
    "looked_up_tensors",
    "merge_names",
    "shared_tensors",
    "tensor_shapes",
]

HEAD = "lm_head.weight"


def embedding_name(config: ModelConfig) -> str:
    """Return the name of the embedding."""
    return FAMILIES[config.family].embedding


def final_norm_name(config: ModelConfig) -> str:
    """Return the name of the final norm."""
    return FAMILIES[config.family].final_norm


def final_norm_bias_name(config: ModelConfig) -> str | None:
    """Return the name of the bias of the final norm; None without one."""
    return f"{final_norm_name(config).removesuffix('.weight')}.bias" if config.final_norm.bias else None


def embedding_tables(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the tables with a row for each token: the embedding, and the per-layer embedding if there is one."""
    return (embedding_name(config),) if config.per_layer_embedding is None else (embedding_name(config), PER_LAYER_EMBEDDING)


def looked_up_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the embeddings of which a step reads the rows of its tokens only."""
    is_other = config.tie_word_embeddings or (config.eagle3_input is not None and config.eagle3_input.shares_embedding)
    return embedding_tables(config)[1 if is_other else 0 :]


def merge_names(config: ModelConfig) -> tuple[str, str, str] | None:
    """Return the names of the norm of the embedding, the norm of the hidden state and the linear map in the input of a draft head."""
    if config.eagle3_input is not None:
        return EAGLE3_EMBEDDING_NORM, EAGLE3_HIDDEN_NORM, EAGLE3_PROJECTION
    return None if config.merge_norm is None else (MERGED_EMBEDDING_NORM, MERGED_HIDDEN_NORM, MERGE_PROJECTION)


def shared_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the tensors that a draft head has in common with its model: the embedding, the language model head, or both."""
    if config.eagle3_input is None:
        return (embedding_name(config), HEAD) if config.merge_norm is not None else ()
    shares = {embedding_name(config): config.eagle3_input.shares_embedding, HEAD: config.eagle3_input.shares_head}
    return tuple(name for name, is_shared in shares.items() if is_shared)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, from the embedding to the head; projections are ``[out, in]``.

    A head that is tied to the embedding is not listed, nor is what an EAGLE-3 head has in other files than its own.
    """
    shapes: dict[str, tuple[int, ...]] = {embedding_name(config): (config.vocab_size, config.hidden_size)}
    merged = merge_names(config)
    if merged is not None:
        width = 2 * config.hidden_size if config.eagle3_input is None else config.eagle3_input.states_width
        shapes |= dict.fromkeys(merged[:2], (config.hidden_size,))
        shapes[merged[2]] = (config.hidden_size, width)
    if config.assistant_input is not None:
        shapes[PRE_PROJECTION] = (config.hidden_size, 2 * config.state_size)
        shapes[POST_PROJECTION] = (config.state_size, config.hidden_size)
        if config.assistant_input.clusters is not None:
            shapes[CENTROIDS] = (config.assistant_input.clusters.count, config.hidden_size)
    if config.per_layer_embedding is not None:
        width = config.per_layer_embedding.size * config.num_layers
        shapes[PER_LAYER_EMBEDDING] = config.per_layer_embedding.shape(config.num_layers)
        shapes |= {PER_LAYER_PROJECTION: (width, config.hidden_size), PER_LAYER_NORM: (config.per_layer_embedding.size,)}
    for index in range(config.num_layers):
        shapes |= layer_tensors(config, index)
    names = (final_norm_name(config), final_norm_bias_name(config))
    shapes |= {name: (config.hidden_size,) for name in names if name is not None}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.num_logits, config.hidden_size)
    elsewhere = () if config.eagle3_input is None else shared_tensors(config)
    return {name: shape for name, shape in shapes.items() if name not in elsewhere}
