"""What a decoder looks like, read from the ``config.json`` of a Hugging Face folder.

Whatever is not supported is refused by name: nothing is ever run as something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache._util.checks import one_of
from trt_kvcache.checkpoint.config_fields import ConfigFields
from trt_kvcache.checkpoint.rope import ROPE_KINDS, RopeConfig
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import ConfigError

SUPPORTED = (
    f"Supported: Llama, Qwen2 and Qwen3 causal language models, full attention, SiLU, RoPE {', '.join(ROPE_KINDS)}, "
    f"weights in {', '.join(MODEL_DTYPES)}."
)


@dataclass(frozen=True)
class Family:
    """What transformers takes for granted about one model family, where ``config.json`` is silent."""

    name: str
    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", 2048, bos_token_id=1, eos_token_ids=(2,)),
        Family("qwen2", "Qwen2ForCausalLM", 32768, num_kv_heads=32),
        Family("qwen3", "Qwen3ForCausalLM", 32768, num_kv_heads=32, head_dim=128),
    )
}

# Fields that change what a model computes and that no supported model has switched on.
_REFUSED_FIELDS = {
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "auto_map": "code of its own",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder-only model.

    Raises ConfigError: a field is out of range, or fields disagree.

    Parameters
    ----------
    family
        ``"llama"``, ``"qwen2"`` or ``"qwen3"``.
    vocab_size, hidden_size, intermediate_size, num_layers, num_attention_heads, num_kv_heads, head_dim
        ``num_attention_heads`` is a multiple of ``num_kv_heads``; ``head_dim`` is even and need not be
        ``hidden_size / num_attention_heads``.
    max_position_embeddings
        Positions that the model was made for, in tokens.
    tie_word_embeddings
        The head is the embedding: there is no ``lm_head.weight``.
    qkv_bias, o_bias, mlp_bias
        Which projections have a bias.
    qk_norm
        RMSNorm over each head of q and k, before RoPE.
    dtype
        Of the stored weights: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    eos_token_ids : tuple of int
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        one_of("ModelConfig.family", self.family, FAMILIES)
        one_of("ModelConfig.dtype", self.dtype, MODEL_DTYPES)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number (RoPE turns pairs of elements), got {self.head_dim}.")
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads: expected a multiple of num_key_value_heads={self.num_kv_heads}, got {self.num_attention_heads}."
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
        """Read a ``config.json``, in the spelling of transformers 5 or an older one.

        Raises ConfigError: the model is not supported, or the file is not complete. The message names the field.

        Parameters
        ----------
        data : mapping
            The parsed file. Defaults of absent fields are those of transformers.
        default_dtype
            For files that name no dtype.
        """
        fields = ConfigFields(data)
        family = _family(fields)
        _refuse_unsupported(fields, family)
        heads = fields.integer("num_attention_heads")
        max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
        attention_bias = family.name != "qwen2" and fields.flag("attention_bias", False)
        return cls(
            family=family.name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_kv_heads=_num_kv_heads(data, family, heads),
            head_dim=_head_dim(data, family, heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_dict(data, max_position_embeddings=max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=family.name == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.name == "llama" and fields.flag("mlp_bias", False),
            qk_norm=family.name == "qwen3",
            dtype=_dtype(fields, default_dtype),
            bos_token_id=_bos_token_id(data, family),
            eos_token_ids=fields.token_ids("eos_token_id") if "eos_token_id" in data else family.eos_token_ids,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the model as a ``config.json`` in the spelling of transformers 5; ``from_dict`` reads it back."""
        result: dict[str, Any] = {
            "model_type": self.family,
            "architectures": [FAMILIES[self.family].architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope.to_dict(),
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
        }
        if self.family != "qwen2":
            result["attention_bias"] = self.o_bias
        if self.family == "llama":
            result["mlp_bias"] = self.mlp_bias
        return result


def _family(fields: ConfigFields) -> Family:
    """Choose the family by ``model_type``, else by ``architectures``; both must agree where both are there."""
    model_type = fields.get("model_type")
    architectures = fields.get("architectures") or []
    if model_type is None:
        for family in FAMILIES.values():
            if family.architecture in architectures:
                return family
        raise ConfigError(f"architectures: {architectures!r} is not supported, and there is no model_type. {SUPPORTED}")
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type: {model_type!r} is not supported. {SUPPORTED}")
    family = FAMILIES[model_type]
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"architectures: expected {family.architecture} for model_type {model_type!r}, got {architectures!r}. {SUPPORTED}"
        )
    return family


def _refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    for name, meaning in _REFUSED_FIELDS.items():
        if fields.get(name):
            raise ConfigError(f"{name}: a model with {meaning} is not supported, got {fields.get(name)!r}. {SUPPORTED}")
    if fields.get("hidden_act") not in (None, "silu"):
        raise ConfigError(f"hidden_act: {fields.get('hidden_act')!r} is not supported. {SUPPORTED}")
    # Qwen names a window that is off unless use_sliding_window; another family that names one means it.
    windowed = fields.flag("use_sliding_window", family.name == "llama")
    if windowed and fields.get("sliding_window"):
        raise ConfigError(f"sliding_window: a window of {fields.get('sliding_window')!r} tokens is not supported. {SUPPORTED}")
    layer_types = fields.get("layer_types") or []
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other:
        raise ConfigError(f"layer_types: {', '.join(other)} is not supported. {SUPPORTED}")


def _num_kv_heads(data: Mapping[str, Any], family: Family, heads: int) -> int:
    """Return the field; ``null`` means one per attention head, absence what the family has."""
    absent = None if "num_key_value_heads" in data else family.num_kv_heads
    return ConfigFields(data).integer("num_key_value_heads", absent or heads)


def _head_dim(data: Mapping[str, Any], family: Family, heads: int) -> int:
    """Return the field; ``null`` means hidden_size / num_attention_heads, absence what the family has."""
    fields = ConfigFields(data)
    if "head_dim" in fields:
        return fields.integer("head_dim")
    if "head_dim" not in data and family.head_dim is not None:
        return family.head_dim
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        raise ConfigError(f"hidden_size: expected a multiple of num_attention_heads={heads} where head_dim is absent, got {hidden}.")
    return hidden // heads


def _dtype(fields: ConfigFields, default: str | None) -> str:
    given = {fields.get(name) for name in ("dtype", "torch_dtype") if name in fields}
    if len(given) > 1:
        raise ConfigError(f"dtype and torch_dtype: expected one value, got {fields.get('dtype')!r} and {fields.get('torch_dtype')!r}.")
    dtype = given.pop() if given else default
    if dtype not in MODEL_DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not supported. {SUPPORTED}")
    return str(dtype)


def _bos_token_id(data: Mapping[str, Any], family: Family) -> int | None:
    if "bos_token_id" not in data:
        return family.bos_token_id
    ids = ConfigFields(data).token_ids("bos_token_id")
    if len(ids) > 1:
        raise ConfigFields(data).refusal("bos_token_id", "one token id")
    return ids[0] if ids else None
