"""``StepPositions``: positions of the new tokens of a step, and the trees that they form."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor


class SlotTree(NamedTuple):
    """Tree of the new tokens of one slot."""

    depths: npt.NDArray[np.int64]  # [s]
    sees: npt.NDArray[np.bool_]  # [s, s]: token i attends to new token j


class StepPositions:
    """Positions of the new tokens, which :meth:`update` computes in each step. ``start`` is a view: its values change with the lengths."""

    def __init__(self, start: npt.NDArray[np.int32], width: int) -> None:
        self._start, self._tokens = start, np.arange(width)
        #: ``[A, s]``.
        self.positions = np.zeros((len(start), width), np.int64)
        #: int64 ``[A, s]``: the ancestors of each token and itself, as bits; None in a step of chains.
        self.ancestors: DeviceTensor | None = None
        self._depths: npt.NDArray[np.int64] = self._tokens
        self._sees: npt.NDArray[np.bool_] | None = None

    def update(self, ancestors: DeviceTensor | None) -> None:
        """Compute the positions of a step."""
        self.ancestors = ancestors
        if ancestors is None:
            self._sees, self._depths = None, self._tokens
        else:
            memory = ancestors.memory
            assert isinstance(memory, HostMemory)
            self._sees = (memory.array(ancestors)[:, :, None] >> self._tokens & 1).astype(bool)
            self._depths = self._sees.sum(axis=-1) - 1
        self.positions = self._start[:, None] + self._depths

    def tree(self, slot: int) -> SlotTree | None:
        """Return the tree of a slot; None for a chain."""
        return None if self._sees is None else SlotTree(self._depths[slot], self._sees[slot])
