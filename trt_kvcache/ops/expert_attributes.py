"""``ExpertAttributes``: router and experts of a layer as the attributes of an operation, which are plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.expert_kernels import GATED_EPILOGUES, MAX_EXPERT_PAIRS, PLAIN_EPILOGUES, Epilogue
from trt_kvcache.kernels.linear_kernels import INPUT_GRANULE
from trt_kvcache.kernels.router_kernels import MAX_EXPERTS
from trt_kvcache.model import ClampedSwiGLU, MlpConfig, RoutedMlpConfig, RouterConfig
from trt_kvcache.model.mlp_config import ACTIVATIONS, SCORES
from trt_kvcache.ops.packed_format import PackedFormat

#: Activations by the number of the attribute; the last one has numbers of its own.
_ACTIVATIONS = (*ACTIVATIONS, ClampedSwiGLU.kind)

#: Prefixes of the attributes of packed matrices: into the experts, and out of them.
UP, DOWN = "up", "down"


@dataclass(frozen=True, kw_only=True)
class ExpertAttributes:
    """Router and experts of a layer. Flags are 0 or 1."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    scores: int = 0  # index in SCORES
    renormalise: int = 0
    sum_epsilon: float = 0.0
    factor: float = 1.0
    router_bias: int = 0
    choice_bias: int = 0
    expert_scale: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    activation: int = 0  # index in ACTIVATIONS, or the next number for clamped SwiGLU, with alpha and limit
    alpha: float = 0.0
    limit: float = 0.0
    gated: int = 1
    bias: int = 0

    def __post_init__(self) -> None:
        last = {"scores": len(SCORES) - 1, "activation": len(_ACTIVATIONS) - 1}
        for name in ("scores", "renormalise", "router_bias", "choice_bias", "expert_scale", "activation", "gated", "bias"):
            int_in_range(f"experts, {name}", getattr(self, name), 0, last.get(name, 1), error=ConfigError)
        _ = self.router, self.expert  # checks of the rest

    @classmethod
    def of(cls, config: RoutedMlpConfig) -> ExpertAttributes:
        """Return the attributes of a routed MLP, without what is around its experts."""
        router, expert = config.router, config.expert
        clamped = expert.activation if isinstance(expert.activation, ClampedSwiGLU) else None
        return cls(
            num_experts=router.num_experts,
            experts_per_token=router.experts_per_token,
            intermediate_size=expert.intermediate_size,
            scores=SCORES.index(router.scores),
            renormalise=int(router.renormalise),
            sum_epsilon=router.sum_epsilon,
            factor=router.factor,
            router_bias=int(router.bias),
            choice_bias=int(router.choice_bias),
            expert_scale=int(router.expert_scale),
            num_groups=router.num_groups,
            groups_per_token=router.groups_per_token,
            activation=_ACTIVATIONS.index(ClampedSwiGLU.kind if isinstance(expert.activation, ClampedSwiGLU) else expert.activation),
            alpha=clamped.alpha if clamped else 0.0,
            limit=clamped.limit if clamped else 0.0,
            gated=int(expert.gated),
            bias=int(expert.bias),
        )

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, int | float]) -> ExpertAttributes:
        """Read the attributes of an operation; those of packed weights are ``PackedFormat``."""
        known = {one.name for one in fields(cls)}
        packed = {f"{prefix}_{one.name}" for prefix in (UP, DOWN) for one in fields(PackedFormat)}
        unknown = [name for name in attributes if name not in known | packed]
        missing = [name for name in ("num_experts", "experts_per_token", "intermediate_size") if name not in attributes]
        if unknown or missing:
            wrong = f"{unknown[0]!r}, which is none of them" if unknown else f"no {missing[0]}"
            raise ConfigError(f"experts: expected attributes {', '.join(sorted(known))}, got {wrong}.")
        return cls(**{name: value for name, value in attributes.items() if name in known})  # type: ignore[arg-type]

    def attributes(self) -> dict[str, int | float]:
        """Return the attributes by name."""
        return asdict(self)

    @property
    def router(self) -> RouterConfig:
        """The router."""
        return RouterConfig(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            scores=SCORES[self.scores],
            renormalise=bool(self.renormalise),
            sum_epsilon=self.sum_epsilon,
            factor=self.factor,
            bias=bool(self.router_bias),
            choice_bias=bool(self.choice_bias),
            expert_scale=bool(self.expert_scale),
            num_groups=self.num_groups,
            groups_per_token=self.groups_per_token,
        )

    @property
    def expert(self) -> MlpConfig:
        """An expert."""
        is_clamped = self.activation == len(ACTIVATIONS)
        activation = ClampedSwiGLU(alpha=self.alpha, limit=self.limit) if is_clamped else ACTIVATIONS[self.activation]
        return MlpConfig(intermediate_size=self.intermediate_size, activation=activation, gated=bool(self.gated), bias=bool(self.bias))

    @property
    def epilogue(self) -> Epilogue:
        """The activation as an epilogue of the kernels."""
        return _epilogue(self.expert)


def _epilogue(expert: MlpConfig) -> Epilogue:
    if isinstance(expert.activation, ClampedSwiGLU):
        return expert.activation
    return f"{expert.activation}_mul" if expert.gated else expert.activation


def why_not_in_kernels(config: RoutedMlpConfig, hidden_size: int, dtype: str) -> str | None:
    """Return why the kernels of router and experts cannot compute a routed MLP, or None."""
    router, expert = config.router, config.expert
    if dtype not in ELEMENT_TYPES:
        return f"dtype: expected {' or '.join(ELEMENT_TYPES)} for experts, got {dtype}"
    for name, value, most in (
        ("num_experts", router.num_experts, MAX_EXPERTS),
        ("experts_per_token", router.experts_per_token, MAX_EXPERT_PAIRS),
    ):
        if value > most:
            return f"router.{name}: expected at most {most}, got {value}"
    known = GATED_EPILOGUES if expert.gated else PLAIN_EPILOGUES
    if not isinstance(expert.activation, ClampedSwiGLU) and _epilogue(expert) not in known:
        return f"expert.activation: expected {' or '.join(known)}, got {_epilogue(expert)}"
    width = hidden_size if config.latent_size is None else config.latent_size
    for name, size in (("hidden_size", hidden_size), ("latent_size", width), ("intermediate_size", expert.intermediate_size)):
        if size % INPUT_GRANULE:
            return f"{name}: expected a multiple of {INPUT_GRANULE} with experts, got {size}"
    return None
