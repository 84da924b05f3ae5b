"""Names and shapes of the tensors of a checkpoint, as Hugging Face transformers names them."""

from trt_kvcache.model.families.family import (
    EMBEDDING,
    FINAL_NORM,
    MERGE_PROJECTION,
    MERGED_EMBEDDING_NORM,
    MERGED_HIDDEN_NORM,
    PER_LAYER_EMBEDDING,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
)
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import layer_tensors

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "PER_LAYER_EMBEDDING",
    "PER_LAYER_NORM",
    "PER_LAYER_PROJECTION",
    "embedding_name",
    "final_norm_bias_name",
    "final_norm_name",
    "looked_up_tensors",
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


def looked_up_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the embeddings of which a step reads the rows of its tokens only."""
    per_layer = () if config.per_layer_embedding is None else (PER_LAYER_EMBEDDING,)
    return per_layer if config.tie_word_embeddings else (embedding_name(config), *per_layer)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, from the embedding to the head; projections are ``[out, in]``.

    A head that is tied to the embedding is not listed.
    """
    shapes: dict[str, tuple[int, ...]] = {embedding_name(config): (config.vocab_size, config.hidden_size)}
    if config.merge_norm is not None:
        shapes |= dict.fromkeys((MERGED_EMBEDDING_NORM, MERGED_HIDDEN_NORM), (config.hidden_size,))
        shapes[MERGE_PROJECTION] = (config.hidden_size, 2 * config.hidden_size)
    if config.per_layer_embedding is not None:
        width = config.per_layer_embedding.size * config.num_layers
        shapes[PER_LAYER_EMBEDDING] = (config.per_layer_embedding.vocab_size, width)
        shapes |= {PER_LAYER_PROJECTION: (width, config.hidden_size), PER_LAYER_NORM: (config.per_layer_embedding.size,)}
    for index in range(config.num_layers):
        shapes |= layer_tensors(config, index)
    names = (final_norm_name(config), final_norm_bias_name(config))
    shapes |= {name: (config.hidden_size,) for name in names if name is not None}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
