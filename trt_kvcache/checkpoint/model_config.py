"""``ModelConfig``: the architecture of a decoder-only model, read from the ``config.json`` of a Hugging Face folder.

Anything that is not supported is an error that names the field: a model is never run as if it were a different one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache._util.checks import one_of
from trt_kvcache._util.shown import shown
from trt_kvcache.checkpoint.config_fields import ConfigFields
from trt_kvcache.checkpoint.rope import ROPE_KINDS, RopeConfig
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_LAYERS

SUPPORTED = (
    f"Supported: Llama, Qwen2 and Qwen3 causal language models, full attention, SiLU, RoPE {', '.join(ROPE_KINDS)}, "
    f"weights in {', '.join(MODEL_DTYPES)}."
)


@dataclass(frozen=True)
class Family:
    """Defaults of one model family in transformers, for fields that a ``config.json`` leaves out.

    Parameters
    ----------
    name : str
        The ``model_type`` of transformers.
    architecture : str
        The class name that ``architectures`` lists.
    max_position_embeddings : int
        Context length in tokens.
    num_kv_heads : int or None
        None: as many as attention heads.
    head_dim : int or None
        None: ``hidden_size / num_attention_heads``.
    bos_token_id : int or None
        None: no token begins a sequence.
    eos_token_ids : tuple of int
        Tokens that end a sequence.
    """

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

# Fields that change what a model computes. No supported model uses them.
_REFUSED_FIELDS = {
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "auto_map": "custom code (trust_remote_code)",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
}


# Defaults of Qwen: the window in tokens, and how many layers from the first one on do without it.
_QWEN_WINDOW, _QWEN_WINDOW_LAYERS = 4096, 28


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one decoder-only model.

    Parameters
    ----------
    family : {"llama", "qwen2", "qwen3"}
        The ``model_type`` of transformers.
    vocab_size : int
        Rows of the embedding.
    hidden_size : int
        Width of the residual stream.
    intermediate_size : int
        Width inside the MLP.
    num_layers : int
        Number of decoder layers.
    num_attention_heads : int
        Query heads of each layer; a multiple of ``num_kv_heads``.
    num_kv_heads : int
        Key-value heads of each layer.
    head_dim : int
        Elements of a head; even. It may differ from ``hidden_size / num_attention_heads``.
    rms_norm_eps : float
        Added to the mean square in RMSNorm.
    rope : RopeConfig
        Rotary position embedding of q and k.
    max_position_embeddings : int
        Context length that the model was trained for, in tokens.
    tie_word_embeddings : bool
        Whether the embedding is also the weight of the head; there is no ``lm_head.weight`` then.
    qkv_bias, o_bias, mlp_bias : bool
        Whether these projections have a bias.
    qk_norm : bool
        Whether RMSNorm is applied to each head of q and k before RoPE.
    dtype : {"float16", "bfloat16", "float32"}
        Dtype of the stored weights.
    bos_token_id : int or None
        Token that begins a sequence.
    eos_token_ids : tuple of int
        Tokens that end a sequence.

    Raises
    ------
    ConfigError
        A field is out of range, or fields contradict each other.

    Examples
    --------
    >>> import json
    >>> from pathlib import Path
    >>> from trt_kvcache import ModelConfig
    >>> config = ModelConfig.from_dict(json.loads(Path("examples/tiny-llama/config.json").read_text()))
    >>> config.num_layers, config.num_kv_heads, config.head_dim, config.dtype
    (2, 2, 16, 'float16')
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
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"num_hidden_layers: expected at most {MAX_LAYERS}, got {self.num_layers}.")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number (RoPE rotates pairs of elements), got {self.head_dim}.")
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads: expected a multiple of num_key_value_heads={self.num_kv_heads}, got {self.num_attention_heads}."
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
        """Read a ``config.json`` as transformers 5 or an earlier version writes it.

        Parameters
        ----------
        data : mapping of str to object
            The parsed file. Absent fields have the defaults of transformers.
        default_dtype : {"float16", "bfloat16", "float32"}, optional
            The dtype for a file that does not name one. Without a default such a file is an error.

        Returns
        -------
        ModelConfig
            The model.

        Raises
        ------
        ConfigError
            The model is not supported, or the file is incomplete. The message names the field.

        Warns
        -----
        UserWarning
            A Llama model names a sliding window. Llama has none, so it is ignored, as in transformers.
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
        """Return the contents of a ``config.json`` as transformers 5 writes it.

        Returns
        -------
        dict
            Values that JSON can hold. :meth:`from_dict` reads it back to an equal model.
        """
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
    """Choose the family by ``model_type``, or by ``architectures`` if there is no ``model_type``. If both are present, they must agree."""
    model_type = fields.get("model_type")
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise fields.refusal("architectures", "a list of names")
    if model_type is None:
        for family in FAMILIES.values():
            if family.architecture in architectures:
                return family
        raise ConfigError(f"architectures: {shown(architectures)} is not supported, and there is no model_type. {SUPPORTED}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type: {shown(model_type)} is not supported. {SUPPORTED}")
    family = FAMILIES[model_type]
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"architectures: expected {family.architecture} for model_type {model_type!r}, got {shown(architectures)}. {SUPPORTED}"
        )
    return family


def _refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    for name, meaning in _REFUSED_FIELDS.items():
        if fields.get(name):
            raise ConfigError(f"{name}: a model with {meaning} is not supported, got {shown(fields.get(name))}. {SUPPORTED}")
    if fields.get("hidden_act") not in (None, "silu"):
        raise ConfigError(f"hidden_act: {shown(fields.get('hidden_act'))} is not supported. {SUPPORTED}")
    _check_window(fields, family)
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise fields.refusal("layer_types", "a list of names")
    other = [kind for kind in layer_types if kind != "full_attention"]
    if other:
        raise ConfigError(f"layer_types: {other[0] if isinstance(other[0], str) else shown(other[0])} is not supported. {SUPPORTED}")


def _check_window(fields: ConfigFields, family: Family) -> None:
    """Refuse a sliding window, as far as a family of transformers has one."""
    if not fields.flag("use_sliding_window", family.name == "llama"):
        return
    if family.name == "llama":  # attention of Llama has no window, whatever the field says
        window = fields.get("sliding_window")
        if isinstance(window, int) and 0 < window < fields.integer("max_position_embeddings", family.max_position_embeddings):
            warn_caller(f"sliding_window: Llama has no sliding window; the one of {window} tokens is ignored.", UserWarning)
        return
    sliding = fields.count("max_window_layers", _QWEN_WINDOW_LAYERS) < fields.integer("num_hidden_layers")
    if fields.null("sliding_window") or not sliding or fields.get("layer_types"):  # layer_types says which layers have a window
        return
    raise ConfigError(f"sliding_window: a window of {fields.get('sliding_window') or _QWEN_WINDOW} tokens is not supported. {SUPPORTED}")


def _num_kv_heads(data: Mapping[str, Any], family: Family, heads: int) -> int:
    """Return the field. If it is ``null``, each attention head has its own; if it is absent, the default of the family applies."""
    absent = None if "num_key_value_heads" in data else family.num_kv_heads
    return ConfigFields(data).integer("num_key_value_heads", absent or heads)


def _head_dim(data: Mapping[str, Any], family: Family, heads: int) -> int:
    """Return the field. If it is ``null``, it is hidden_size / num_attention_heads; if it is absent, the default of the family applies."""
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
    given = [fields.get(name) for name in ("dtype", "torch_dtype") if name in fields]
    if len(given) > 1 and given[0] != given[1]:
        raise ConfigError(f"dtype and torch_dtype: expected one value, got {shown(given[0])} and {shown(given[1])}.")
    dtype = given[0] if given else default
    if dtype not in MODEL_DTYPES:
        raise ConfigError(f"dtype: {shown(dtype)} is not supported. {SUPPORTED}")
    return str(dtype)


def _bos_token_id(data: Mapping[str, Any], family: Family) -> int | None:
    if "bos_token_id" not in data:
        return family.bos_token_id
    ids = ConfigFields(data).token_ids("bos_token_id")
    if len(ids) > 1:
        raise ConfigFields(data).refusal("bos_token_id", "one token id")
    return ids[0] if ids else None
