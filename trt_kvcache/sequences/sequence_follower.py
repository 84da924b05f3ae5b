"""``SequenceFollower``: keeps the sequences of a cache right while its owner changes the active batch and compacts it."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.kernels import AnyCompactionPlan
from trt_kvcache.sequences.sequence_swapper import SequenceSwapper
from trt_kvcache.sequences.sequence_table import SequenceTable


class SequenceFollower:
    """Follows the lengths of a cache, as every :class:`~trt_kvcache.cache.slot_contents.SlotContents` does.

    Parameters
    ----------
    table : SequenceTable
        The sequences.
    swapper : SequenceSwapper
        Of the same table.
    """

    is_recurrent = False

    def __init__(self, table: SequenceTable, swapper: SequenceSwapper) -> None:
        self._table = table
        self._swapper = swapper

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Move the sequences that wait in slots that enter out of them, and follow the change.

        Parameters
        ----------
        lengths : sequence of int
            Of the slots that will be active.
        stream : cuda.core.Stream
            Copies are ordered on it, and waited for; there are none unless a sequence with tokens waits in such a slot.

        Raises
        ------
        CapacityError
            A sequence cannot leave its slot. Nothing was changed.
        """
        self._swapper.make_way(lengths, stream=stream)
        self._table.resize(lengths, stream=stream)

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: the cache's lengths count for sequences in active slots.

        Parameters
        ----------
        slots : sequence of int
            Active slots that become empty.
        stream : cuda.core.Stream
            Not used.
        """

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Follow the moves of a compaction.

        Parameters
        ----------
        plan : CompactionPlan or DeviceCompactionPlan
            The moves.
        stream : cuda.core.Stream
            Not used.
        """
        self._table.compact(plan)
