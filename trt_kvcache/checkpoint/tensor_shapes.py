"""Names and shapes of the tensors that a checkpoint must have, as Hugging Face transformers names them."""

from trt_kvcache.checkpoint.model_config import ModelConfig

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
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes.update({prefix + name: shape for name, shape in _layer_shapes(config).items()})
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, out_width, in_width, bias in (
        ("self_attn.q_proj", q_width, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, config.o_bias),
        ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (out_width, in_width)
        if bias:
            shapes[f"{name}.bias"] = (out_width,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes
