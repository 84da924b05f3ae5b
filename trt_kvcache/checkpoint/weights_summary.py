"""``WeightsSummary``: how the weights of a checkpoint are stored, and how many bytes they are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightsSummary:
    """How weights are stored."""

    format: str
    is_quantized: bool
    nbytes: int
    step_nbytes: int
