"""``SamplingRows``: per-row sampling parameters and results, in arrays on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor

#: Bits of ``flags``. ``plugins/sampling/rows.cuh`` has the same numbers and fields.
ACTIVE, GREEDY, PENALISED, BIASED, LOGPROBS = 1, 2, 4, 8, 16

#: Parameters of one row.
ROW_PARAMS = np.dtype(
    [
        ("flags", np.int64),
        ("seed", np.uint64),
        ("counter", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.uint64),
        ("min_weight", np.uint64),
        ("scale", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ]
)

#: Values of ``error``: the logits of the model are not finite; bias and penalties left no finite logit.
NO_ERROR, BAD_LOGITS, NOTHING_LEFT = 0, 1, 2

#: Result of one row. With an error, ``place`` and ``logit`` are the index and the value of the largest logit.
ROW_RESULT = np.dtype([("token", np.int32), ("error", np.int32), ("place", np.int32), ("logit", np.float32)])

#: In ``uses``: the token is in the prompt.
IN_PROMPT = 1 << 31


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Device arrays with one row for each slot.

    Parameters
    ----------
    params : DeviceTensor (B, 64) uint8
        ``ROW_PARAMS``. Each token advances ``counter``.
    results : DeviceTensor (B, 16) uint8
        ``ROW_RESULT``. Overwritten for active rows.
    uses : DeviceTensor (B, vocab) int32, optional
        Number of times that each token was generated; the highest bit, ``IN_PROMPT``, is set for tokens of the prompt. Needed for rows
        with the flag ``PENALISED``; the chosen token is counted.
    bias : DeviceTensor (B, vocab) float32, optional
        Added to the logits of rows with the flag ``BIASED``.
    """

    params: DeviceTensor
    results: DeviceTensor
    uses: DeviceTensor | None = None
    bias: DeviceTensor | None = None

    @property
    def memory(self) -> Memory:
        """Memory of all arrays."""
        return self.params.memory
