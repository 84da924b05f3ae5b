"""``WeightsSummary``: how the weights of a checkpoint are stored, and how many bytes they are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightsSummary:
    """How weights are stored.

    Parameters
    ----------
    format : str
        The dtype, or the format of quantized weights with its bits and groups.
    is_quantized : bool
        Whether some weights are quantized.
    nbytes : int
        Bytes of all weights: quantized ones packed, with their scales and zero points; others in the dtype of the model.
    step_nbytes : int
        The same without the embedding, unless the head is the same tensor.

    Examples
    --------
    >>> from trt_kvcache import Checkpoint
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     checkpoint.weights.format, checkpoint.weights.nbytes
    ('float16', 60736)
    """

    format: str
    is_quantized: bool
    nbytes: int
    step_nbytes: int
