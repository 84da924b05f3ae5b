"""Description of the MLP of a decoder layer: a single one, or experts and the router that chooses some of them for each token.

With ``chosen`` for the experts of a token and ``w`` for their weights, a routed MLP is::

    sum(w[e] * expert[e](x) for e in chosen) + sigmoid(shared_gate(x)) * shared(x)

The second term exists only if there is a shared expert, its sigmoid only if that has a gate. Latent experts take a projection of ``x`` to
another width in its place, and their sum is projected back. With ``branch_norm``, whose norms are ``n``, only the router has ``x`` itself::

    n_experts_output(sum(w[e] * expert[e](n_experts(x)) for e in chosen)) + n_shared_output(shared(n_shared(x)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from trt_kvcache._util.checks import int_in_range, one_of, positive_number
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.norm_config import NormConfig

#: Activations of MLPs: ``x * sigmoid(x)``, GELU in its tanh approximation, and ``max(x, 0) ** 2``.
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")

#: Functions of the router's logits: over all experts, or of each expert alone.
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """An activation of gate ``g`` and up ``u`` together: ``g * sigmoid(alpha * g) * (u + 1)``, after both are clamped.

    Parameters
    ----------
    alpha : float
        Factor of the gate inside the sigmoid.
    limit : float
        Largest value of the gate, which has no smallest one; largest magnitude of up.

    Raises
    ------
    ConfigError
        A number is not finite or not > 0.
    """

    kind: ClassVar[str] = "clamped_swiglu"

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            positive_number(f"ClampedSwiGLU.{name}", getattr(self, name))


#: The activation of an MLP: a name in :data:`ACTIVATIONS`, or of gate and up together.
Activation: TypeAlias = str | ClampedSwiGLU


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """``down(activation(m * gate(x)) * up(x))`` with ``m`` for ``gate_multiplier``, or without a gate ``down(activation(up(x)))``.

    Parameters
    ----------
    intermediate_size : int
        Width inside.
    activation : {"silu", "gelu_tanh", "relu2"} or ClampedSwiGLU
        Activation of the gate; without a gate, of ``up(x)``. Clamped SwiGLU takes the place of ``activation(gate(x)) * up(x)``.
    bias : bool
        True if the projections have biases.
    gated : bool
        True if there is a gate.
    gate_multiplier : float
        Factor of the gate before its activation; 1 without a gate, and with clamped SwiGLU.

    Raises
    ------
    ConfigError
        A value is out of range, or the activation or the multiplier needs a gate and there is none.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    gate_multiplier: float = 1.0

    def __post_init__(self) -> None:
        int_in_range("MlpConfig.intermediate_size", self.intermediate_size, 1, MAX_DIMENSION, error=ConfigError)
        positive_number("MlpConfig.gate_multiplier", self.gate_multiplier)
        if self.gate_multiplier != 1 and (not self.gated or isinstance(self.activation, ClampedSwiGLU)):
            raise ConfigError(f"MlpConfig.gate_multiplier: expected 1 without a gate and with clamped SwiGLU, got {self.gate_multiplier}.")
        if not isinstance(self.activation, ClampedSwiGLU):
            one_of("MlpConfig.activation", self.activation, ACTIVATIONS)
        elif not self.gated:
            raise ConfigError("MlpConfig.gated: expected True with clamped SwiGLU, got False.")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Choice of the experts of a token: those with the highest scores, which are also their weights.

    Parameters
    ----------
    num_experts : int
        Experts.
    experts_per_token : int
        Experts that are chosen for each token (top-k).
    scores : {"softmax", "sigmoid"}
        Function of the router's logits, in float32.
    renormalise : bool
        True if the scores of the chosen experts are divided by their sum.
    sum_epsilon : float
        Addend of that sum.
    factor : float
        Factor of the weights, after that division.
    bias : bool
        True if the projection to the logits has a bias.
    choice_bias : bool
        True if experts are chosen by score plus a bias of each expert; the weights are the scores without it.
    num_groups, groups_per_token : int
        Experts are divided into groups of equal size. The groups with the highest sums of their two highest scores are chosen first, and
        then experts of these groups only.
    norm_epsilon : float or None
        The input ``x`` of ``n`` elements is replaced by ``scale * x / sqrt(n * (mean(x^2) + norm_epsilon))``, with a learned scale of each
        element. None for the input as it is.
    expert_scale : bool
        True if the weights are multiplied by a learned number of each expert, after ``factor``.

    Raises
    ------
    ConfigError
        A value is out of range, or values contradict each other.
    """

    num_experts: int
    experts_per_token: int
    scores: str = "softmax"
    renormalise: bool = False
    sum_epsilon: float = 0.0
    factor: float = 1.0
    bias: bool = False
    choice_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    norm_epsilon: float | None = None
    expert_scale: bool = False

    def __post_init__(self) -> None:
        int_in_range("RouterConfig.num_experts", self.num_experts, 1, MAX_DIMENSION, error=ConfigError)
        int_in_range("RouterConfig.experts_per_token", self.experts_per_token, 1, self.num_experts, error=ConfigError)
        one_of("RouterConfig.scores", self.scores, SCORES)
        if self.sum_epsilon != 0:
            positive_number("RouterConfig.sum_epsilon", self.sum_epsilon)
        positive_number("RouterConfig.factor", self.factor)
        if self.norm_epsilon is not None:
            positive_number("RouterConfig.norm_epsilon", self.norm_epsilon)
        int_in_range("RouterConfig.num_groups", self.num_groups, 1, self.num_experts, error=ConfigError)
        int_in_range("RouterConfig.groups_per_token", self.groups_per_token, 1, self.num_groups, error=ConfigError)
        if self.num_groups == 1:
            return
        if self.num_experts % self.num_groups or self.group_size == 1:
            raise ConfigError(
                f"RouterConfig.num_groups: expected groups of 2 or more of {self.num_experts} experts, got {self.num_groups}."
            )
        if self.experts_per_token > self.groups_per_token * self.group_size:
            raise ConfigError(
                f"RouterConfig.experts_per_token: expected at most the {self.groups_per_token * self.group_size} experts of "
                f"groups_per_token={self.groups_per_token}, got {self.experts_per_token}."
            )

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


@dataclass(frozen=True, kw_only=True)
class RoutedMlpConfig:
    """Experts, the router that chooses some of them for each token, and a shared expert.

    Parameters
    ----------
    router : RouterConfig
        Choice of the experts.
    expert : MlpConfig
        Each expert.
    shared : MlpConfig or None
        Another expert, of all tokens.
    latent_size : int or None
        Width of the input and output of the experts (not of the shared one); None for the width of the hidden state, without projections.
    latent_bias : bool
        True if the projections to that width and back have biases.
    shared_gate : bool
        True if the shared expert's output is multiplied by the sigmoid of a projection of the MLP's input to one number.
    branch_norm : NormConfig or None
        Norms of the input of the experts, of their weighted sum, and of the input and the output of the shared expert. Each has a weight
        of its own. None without them.

    Raises
    ------
    ConfigError
        A size is out of range, there is a gate or a ``branch_norm`` without a shared expert or a bias without a latent size, or an expert
        has a ``gate_multiplier``.
    """

    kind: ClassVar[str] = "routed"

    router: RouterConfig
    expert: MlpConfig
    shared: MlpConfig | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    latent_bias: bool = False
    branch_norm: NormConfig | None = None

    def __post_init__(self) -> None:
        if self.latent_size is not None:
            int_in_range("RoutedMlpConfig.latent_size", self.latent_size, 1, MAX_DIMENSION, error=ConfigError)
        elif self.latent_bias:
            raise ConfigError("RoutedMlpConfig.latent_bias: expected False without a latent size, got True.")
        if any(mlp is not None and mlp.gate_multiplier != 1 for mlp in (self.expert, self.shared)):
            raise ConfigError("RoutedMlpConfig.expert: expected experts with a gate_multiplier of 1, got another.")
        if self.shared_gate and self.shared is None:
            raise ConfigError("RoutedMlpConfig.shared_gate: expected False without a shared expert, got True.")
        if self.branch_norm is not None and self.shared is None:
            raise ConfigError("RoutedMlpConfig.branch_norm: expected None without a shared expert, got norms.")
