"""Names and shapes of the tensors of a checkpoint, as Hugging Face transformers names them."""

from trt_kvcache.model.families.family import EMBEDDING, FINAL_NORM
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import layer_tensors

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "embedding_name", "final_norm_name", "tensor_shapes"]

HEAD = "lm_head.weight"


def embedding_name(config: ModelConfig) -> str:
    """Return the name of the embedding."""
    return FAMILIES[config.family].embedding


def final_norm_name(config: ModelConfig) -> str:
    """Return the name of the final norm."""
    return FAMILIES[config.family].final_norm


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, from the embedding to the head; projections are ``[out, in]``.

    A head that is tied to the embedding is not listed.
    """
    shapes: dict[str, tuple[int, ...]] = {embedding_name(config): (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes |= layer_tensors(config, index)
    shapes[final_norm_name(config)] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
