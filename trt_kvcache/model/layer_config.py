"""Description of one decoder layer: a mixer, an MLP, and the norms around them.

With ``n`` for norms that may be absent, ``m`` for ``residual_multiplier`` and ``x`` for the hidden state::

    x = x + m * n_mixer_output(mixer(n_input(x)))
    x = x + m * n_mlp_output(mlp(n_mlp(x)))

A layer without a mixer, or without an MLP, has only the other line. In a parallel layer the MLP has the input of the mixer::

    x = x + m * n_mixer_output(mixer(n_input(x))) + m * n_mlp_output(mlp(n_input(x)))

A layer may have a second mixer with the same input. In such a layer the second mixer has a factor ``p`` of its own, and the MLP a third one
in place of the ``m`` in its line::

    x = x + p * parallel_mixer(n_input(x)) + m * n_mixer_output(mixer(n_input(x)))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from trt_kvcache._util.checks import int_in_range, one_of, positive_number
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION, MAX_LAYERS
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.per_layer_config import PerLayerInputConfig
from trt_kvcache.model.recurrent_config import RecurrentConfig
from trt_kvcache.model.rope import RopeConfig

#: Span of the RMSNorm of q and k: each head alone, or all heads of a token together.
QK_NORM_SPANS = ("head", "full")


@dataclass(frozen=True, kw_only=True)
class QkNormConfig:
    """RMSNorm of q and k; each has a weight of its own.

    Parameters
    ----------
    norm : NormConfig
        Epsilon and weight of the norm.
    over : {"head", "full"}
        ``"head"``: each head is normalised alone, and all share a weight ``[head_dim]``. ``"full"``: all heads of a token together, with
        a weight ``[heads * head_dim]``.
    after_rope : bool
        True if RoPE is applied before the norm of each head; by default it is applied after it.

    Raises
    ------
    ConfigError
        ``over`` is unknown, or does not go with ``after_rope``.
    """

    norm: NormConfig
    over: str = "head"
    after_rope: bool = False

    def __post_init__(self) -> None:
        one_of("QkNormConfig.over", self.over, QK_NORM_SPANS)
        if self.after_rope and self.over != "head":
            raise ConfigError(f"QkNormConfig.after_rope: expected False with over={self.over!r}, got True.")


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """A factor of q that grows with the position: ``1 + beta * log(1 + floor(position / period))``.

    Parameters
    ----------
    beta : float
        Growth of the factor per unit of the logarithm.
    period : int
        Number of consecutive positions with the same factor.

    Raises
    ------
    ConfigError
        A number is out of range.
    """

    beta: float
    period: int

    def __post_init__(self) -> None:
        positive_number("QueryScaling.beta", self.beta)
        int_in_range("QueryScaling.period", self.period, 1, MAX_DIMENSION, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal attention over a cache of K and V.

    Parameters
    ----------
    num_heads : int
        Query heads; a multiple of ``num_kv_heads``.
    num_kv_heads : int
        Key-value heads.
    head_dim : int
        Elements of a head; even.
    rope : RopeConfig or None
        Rotary position embedding of q and k; None where a layer has none.
    qkv_bias, o_bias : bool
        True if the projections to q, k and v, and the output projection, have a bias.
    qk_norm : QkNormConfig or None
        Norm of q and k.
    scale : float or None
        Factor of the products of q and k; None for ``1 / sqrt(head_dim)``.
    window : int or None
        Tokens that a token attends to, itself included; None for all before it.
    softcap : float or None
        Scores ``x`` become ``softcap * tanh(x / softcap)``.
    query_scaling : QueryScaling or None
        A factor of q that depends on its position.
    output_gate : bool
        True for gated attention: the output of attention, before the output projection, is multiplied by the sigmoid of another
        projection of the hidden state. That projection is as wide as q, and has a bias if q has one.
    input_multiplier : float
        Factor of the hidden state before the projections to q, k, v and the output gate.
    sinks : bool
        True for attention sinks: each query head has a learned logit that joins the softmax of its scores, after scale and softcap, and
        has no value. So the weights of K and V sum to less than 1.
    v_norm_epsilon : float or None
        Each head of v is divided by ``sqrt(mean(v^2) + v_norm_epsilon)``: RMSNorm without a weight. None for v as it is.
    values_are_keys : bool
        True if there is no projection to v: v is the projection to k, before norm and RoPE of k.
    input_size : int or None
        Width of the input of the projections to q, k, v and the output gate; None for that of the residual stream.
    kv_source_layer : int or None
        Index of the earlier layer whose rows of K and V this layer reads (shared K/V): it has no projections to k and v, and stores no
        rows. None for a layer with rows of its own.

    Raises
    ------
    ConfigError
        A number is out of range, or numbers contradict each other.
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNormConfig | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    query_scaling: QueryScaling | None = None
    output_gate: bool = False
    input_multiplier: float = 1.0
    sinks: bool = False
    v_norm_epsilon: float | None = None
    values_are_keys: bool = False
    input_size: int | None = None
    kv_source_layer: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            int_in_range(f"AttentionConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim: expected an even number (RoPE rotates pairs of elements), got {self.head_dim}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_attention_heads: expected a multiple of num_key_value_heads={self.num_kv_heads}, got {self.num_heads}.")
        if self.window is not None:
            int_in_range("AttentionConfig.window", self.window, 1, MAX_DIMENSION, error=ConfigError)
        positive_number("AttentionConfig.input_multiplier", self.input_multiplier)
        for name in ("scale", "softcap", "v_norm_epsilon"):
            if getattr(self, name) is not None:
                positive_number(f"AttentionConfig.{name}", getattr(self, name))
        if self.rope is not None:
            self.rope.check_head_dim(self.head_dim)
        if self.input_size is not None:
            int_in_range("AttentionConfig.input_size", self.input_size, 1, MAX_DIMENSION, error=ConfigError)
        if self.kv_source_layer is not None:
            int_in_range("AttentionConfig.kv_source_layer", self.kv_source_layer, 0, MAX_LAYERS - 1, error=ConfigError)
            of_new_rows = {"v_norm_epsilon": self.v_norm_epsilon is not None, "values_are_keys": self.values_are_keys}
            for name in (name for name, is_set in of_new_rows.items() if is_set):
                raise ConfigError(
                    f"AttentionConfig.{name}: expected none in a layer that reads K and V of another, got {getattr(self, name)}."
                )
            if self.qk_norm is not None and self.qk_norm.after_rope:
                raise ConfigError("QkNormConfig.after_rope: expected False in a layer that reads K and V of another, got True.")

    @property
    def stores_kv(self) -> bool:
        """True if the layer computes K and V of new tokens and stores them in the cache."""
        return self.kv_source_layer is None

    @property
    def group(self) -> int:
        """Query heads for each K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of the products of q and k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that RoPE is applied to: 0 without RoPE."""
        return 0 if self.rope is None else self.rope.rotary_dim(self.head_dim)

    @property
    def rotates_before_norm(self) -> bool:
        """True if RoPE is applied before the norms of q and k."""
        return self.rope is not None and self.qk_norm is not None and self.qk_norm.after_rope

    @property
    def after_norms(self) -> AttentionConfig:
        """The attention of q and k after their norms: without RoPE if that is applied before them."""
        return replace(self, rope=None) if self.rotates_before_norm else self


#: Mixers: the part of a layer that mixes tokens.
Mixer = AttentionConfig | RecurrentConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer.

    Parameters
    ----------
    mixer : AttentionConfig, ShortConvConfig, Mamba2Config, GatedDeltaNetConfig or None
        Token mixer.
    mlp : MlpConfig, RoutedMlpConfig or None
        MLP, after the mixer: a single one, or experts and their router.
    input_norm, mixer_output_norm : NormConfig or None
        Norms of the mixer's input (pre-norm) and output (post-norm).
    mlp_norm, mlp_output_norm : NormConfig or None
        Norms of the MLP's input (pre-norm) and output (post-norm).
    residual_multiplier : float
        Factor of the outputs of mixer and MLP before they are added to the residual stream.
    parallel_mixer : ShortConvConfig, Mamba2Config, GatedDeltaNetConfig or None
        Second mixer, next to attention: it has the same normalised input, and its output is added to the residual stream too.
    parallel_mixer_multiplier : float
        Factor of its output.
    mlp_residual_multiplier : float or None
        Factor of the output of the MLP, where it differs from ``residual_multiplier``.
    parallel : bool
        True if the MLP has the normalised input of the mixer; then there is an ``input_norm`` and no ``mlp_norm``.
    per_layer_input : PerLayerInputConfig or None
        Gate of the layer's elements of the per-layer embedding, after the MLP.
    output_scale : bool
        True if the hidden state is multiplied by a learned number after the layer.

    Raises
    ------
    ConfigError
        A multiplier is not a finite number > 0, the layer has neither a mixer nor an MLP, it is parallel without one of them or with
        other norms, or there is a second mixer without attention and an ``input_norm``, or in a parallel layer.
    """

    mixer: Mixer | None
    mlp: MlpConfig | RoutedMlpConfig | None
    input_norm: NormConfig | None = None
    mixer_output_norm: NormConfig | None = None
    mlp_norm: NormConfig | None = None
    mlp_output_norm: NormConfig | None = None
    residual_multiplier: float = 1.0
    parallel_mixer: RecurrentConfig | None = None
    parallel_mixer_multiplier: float = 1.0
    mlp_residual_multiplier: float | None = None
    parallel: bool = False
    per_layer_input: PerLayerInputConfig | None = None
    output_scale: bool = False

    def __post_init__(self) -> None:
        for name in ("residual_multiplier", "parallel_mixer_multiplier"):
            positive_number(f"LayerConfig.{name}", getattr(self, name))
        if self.mlp_residual_multiplier is not None:
            positive_number("LayerConfig.mlp_residual_multiplier", self.mlp_residual_multiplier)
        if self.mixer is None and self.mlp is None:
            raise ConfigError("LayerConfig: expected a mixer or an MLP, got neither.")
        if self.parallel and (self.mixer is None or self.mlp is None):
            raise ConfigError("LayerConfig.parallel: expected a mixer and an MLP, got one of them.")
        if self.parallel and (self.input_norm is None or self.mlp_norm is not None):
            raise ConfigError("LayerConfig.parallel: expected an input_norm and no mlp_norm, got other norms.")
        if self.parallel_mixer is not None and (not isinstance(self.mixer, AttentionConfig) or self.input_norm is None or self.parallel):
            raise ConfigError("LayerConfig.parallel_mixer: expected attention, an input_norm and no parallel MLP, got another layer.")

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of an attention layer."""
        assert isinstance(self.mixer, AttentionConfig)
        return self.mixer

    @property
    def recurrence(self) -> RecurrentConfig | None:
        """The mixer with states, if there is one: the mixer itself, or the second one next to attention."""
        return self.parallel_mixer if isinstance(self.mixer, AttentionConfig) else self.mixer

    @property
    def mlp_factor(self) -> float:
        """Factor of the output of the MLP before it is added to the residual stream."""
        return self.residual_multiplier if self.mlp_residual_multiplier is None else self.mlp_residual_multiplier
