"""``WeightsSummary``: storage format and size of the weights of a checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightsSummary:
    """Storage format and size of weights."""

    format: str  # the dtype, or the quantized format with its bits and groups
    is_quantized: bool
    nbytes: int  # quantized weights with scales and zero points, as stored; others in the dtype of the model
    step_nbytes: int  # bytes that a step reads at most: nbytes without an embedding that is not the head too
    experts_nbytes: int = 0  # of these, the experts, of which a token needs some
