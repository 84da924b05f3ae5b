"""Names and shapes of the tensors that a checkpoint must have, as Hugging Face transformers names them."""

from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import layer_parts

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a model, from the embedding to the head.

    Parameters
    ----------
    config : ModelConfig
        The model.

    Returns
    -------
    dict of str to tuple of int
        Projections have the shape ``[out, in]``. A head that is tied to the embedding is not listed.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        for part in layer_parts(config, index).values():  # the last part of a tensor is its end
            shapes[part.tensor] = (part.rows.stop, *part.shape[1:])
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
