"""Falcon-H1: attention and Mamba-2 in each layer, with the same input, and multipliers of inputs, projections and outputs (muP)."""

from dataclasses import replace

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import BAMBA_NAMES, Family
from trt_kvcache.model.families.fields import attention, mamba2, mlp, model, norm, num_layers, pre_norm_layer, rope
from trt_kvcache.model.layer_config import AttentionConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.recurrent_config import Mamba2Config

#: Values of fields of published files, of which transformers computes no others.
_FIXED = {"attn_layer_indices": None, "mamba_use_mlp": True}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    for name, value in _FIXED.items():
        if fields.get(name) not in (None, value):
            raise fields.refusal(name, "null" if value is None else str(value).lower())
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    layer = pre_norm_layer(
        fields,
        _attention(fields),
        mlp(fields, bias=fields.flag("mlp_bias", False), gate_multiplier=gate),
        residual_multiplier=fields.number("attention_out_multiplier"),
        parallel_mixer=_mamba(fields),
        parallel_mixer_multiplier=fields.number("ssm_out_multiplier"),
        mlp_residual_multiplier=down,
    )
    return model(
        fields,
        "falcon_h1",
        [layer] * num_layers(fields),
        embedding_multiplier=fields.number("embedding_multiplier"),
        logits_divisor=1 / fields.number("lm_head_multiplier"),
    )


def _attention(fields: ConfigFields) -> AttentionConfig:
    """Return the attention of all layers. A factor of the keys is a factor of their scores."""
    bias, key, factor = fields.flag("attention_bias", False), fields.number("key_multiplier"), fields.number("attention_in_multiplier")
    mixer = attention(fields, rope=rope(fields), qkv_bias=bias, o_bias=bias, input_multiplier=factor)
    return mixer if key == 1 else replace(mixer, scale=key * mixer.score_scale)


def _mamba(fields: ConfigFields) -> Mamba2Config:
    """Return the Mamba-2 of all layers."""
    has_norm, factors = fields.flag("mamba_rms_norm", False), _multipliers(fields, "ssm_multipliers", 5)
    return mamba2(
        fields,
        width="mamba_d_ssm",
        norm=norm(fields) if has_norm else None,
        gate_first=not (has_norm and fields.flag("mamba_norm_before_gate", True)),
        out_bias=fields.flag("projectors_bias", False),
        input_multiplier=fields.number("ssm_in_multiplier"),
        projection_multipliers=() if set(factors) == {1} else factors,
    )


def _multipliers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """Return the multipliers of a field; ones if it is null or absent."""
    found = fields.numbers(name) if name in fields else (1.0,) * count
    if len(found) != count:
        raise ConfigError(f"{name}: expected {count} numbers, got {short_repr(fields.get(name))}.")
    return found


FAMILY = Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    title="Falcon-H1",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_norm_before_gate": True,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    final_norm="model.final_layernorm.weight",
    names=BAMBA_NAMES,
)
