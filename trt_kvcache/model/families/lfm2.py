"""LFM2: gated short convolutions in most layers, attention with norms of q and k in the others."""

from collections.abc import Sequence

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import Mlp
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import FULL, attention, layer_indices, layer_types, model, norm, num_layers, pre_norm_layer, rope
from trt_kvcache.model.layer_config import Mixer, QkNormConfig
from trt_kvcache.model.mlp_config import MlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.recurrent_config import ShortConvConfig

CONV = "conv"


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    return read_hybrid(fields, "lfm2", [MlpConfig(intermediate_size=_intermediate_size(fields))] * num_layers(fields))


def read_hybrid(fields: ConfigFields, family: str, of_layers: Sequence[Mlp]) -> ModelConfig:
    """Return a model of short convolutions and attention. ``of_layers``: the MLP of each layer."""
    norms = norm(fields, field="norm_eps")
    convolution = ShortConvConfig(
        channels=fields.integer("hidden_size"), kernel=fields.integer("conv_L_cache"), bias=fields.flag("conv_bias", False)
    )
    kinds = layer_types(fields, _layers_of_indices(fields), known=(FULL, CONV))
    mixers: dict[str, Mixer] = {CONV: convolution}
    if FULL in kinds:
        mixers[FULL] = attention(fields, rope=rope(fields), qk_norm=QkNormConfig(norm=norms))
    layers = [pre_norm_layer(fields, mixers[kind], one, before=norms) for kind, one in zip(kinds, of_layers, strict=True)]
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    return model(fields, family, layers, final_norm=norms, tied=tied)


def _layers_of_indices(fields: ConfigFields) -> list[str]:
    """Return the layer types of files without ``layer_types``: attention in ``full_attn_idxs``, or in all layers without that field."""
    indices = layer_indices(fields, "full_attn_idxs")
    return [FULL if indices is None or index in indices else CONV for index in range(num_layers(fields))]


def _intermediate_size(fields: ConfigFields) -> int:
    """Return the intermediate size: two thirds of the field, scaled and rounded up, unless the file switches that off."""
    size = fields.integer("block_ff_dim" if "block_ff_dim" in fields else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in fields:
        multiple = fields.integer("block_multiple_of")
        size = int(fields.number("block_ffn_dim_multiplier") * size)
        size = multiple * ((size + multiple - 1) // multiple)
    if not size:
        raise ConfigError("intermediate_size: expected at least 2 with block_auto_adjust_ff_dim, got 1.")
    return size


FAMILY = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    title="LFM2",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    final_norm="model.embedding_norm.weight",
    names={
        **LLAMA_NAMES,
        "input_norm": "operator_norm",
        "o": "self_attn.out_proj",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "conv_in": "conv.in_proj",
        "conv": "conv.conv",
        "conv_out": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    },
)
