"""``SequenceFollower``: keeps the sequences of a cache right while its owner changes the active batch and compacts it."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.kernels import AnyCompactionPlan
from trt_kvcache.sequences.sequence_swapper import SequenceSwapper
from trt_kvcache.sequences.sequence_table import SequenceTable


class SequenceFollower:
    """Follows the lengths of a cache, as every :class:`~trt_kvcache.cache.slot_contents.SlotContents` does."""

    is_recurrent = False

    def __init__(self, table: SequenceTable, swapper: SequenceSwapper) -> None:
        self._table = table
        self._swapper = swapper

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Move the sequences that wait in slots that enter out of them, and follow the change."""
        self._swapper.make_way(lengths, stream=stream)
        self._table.resize(lengths, stream=stream)

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: the cache's lengths count for sequences in active slots."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Follow the moves of a compaction."""
        self._table.compact(plan)
