"""``NormConfig``: RMSNorm or LayerNorm anywhere in a model."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache._util.checks import positive_number
from trt_kvcache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm: ``x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)``, the quotient in float32; or LayerNorm.

    Parameters
    ----------
    epsilon : float
        Added to the mean square.
    weight_offset : float
        1 where a stored weight of 0 means a factor of 1 (Gemma). The sum is computed in float32 and not rounded.
    rounds_before_weight : bool
        True if the quotient is rounded to the dtype of the model before it is multiplied by the weight. If False, the product is rounded.
    centered : bool
        True for LayerNorm, which first subtracts the mean from ``x``. It rounds once, at the end, and its weight has no offset.
    bias : bool
        True if LayerNorm adds a bias after it has multiplied by the weight.

    Raises
    ------
    ConfigError
        A number is out of range, or fields contradict each other.
    """

    epsilon: float
    weight_offset: float = 0.0
    rounds_before_weight: bool = True
    centered: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        positive_number("NormConfig.epsilon", self.epsilon)
        if self.weight_offset not in (0.0, 1.0):
            raise ConfigError(f"NormConfig.weight_offset: expected 0 or 1, got {self.weight_offset}.")
        if self.centered and self.weight_offset:
            raise ConfigError(f"NormConfig.weight_offset: expected 0 with centered, got {self.weight_offset}.")
        if self.centered and self.rounds_before_weight:
            raise ConfigError("NormConfig.rounds_before_weight: expected False with centered, got True.")
        if self.bias and not self.centered:
            raise ConfigError("NormConfig.bias: expected False without centered, got True.")
