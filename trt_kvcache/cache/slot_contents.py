"""``SlotContents``: the protocol of per-slot data that is notified of changes of the lengths."""

from collections.abc import Sequence
from typing import Any, Protocol

from trt_kvcache.kernels import AnyCompactionPlan


class SlotContents(Protocol):
    """K and V, recurrent states, or any bookkeeping by slot. ``Lengths.attach`` lets it follow the slots of a cache.

    Calls are ordered on ``stream``. Only ``resize`` may wait, or refuse. The arguments were checked.
    """

    @property
    def is_recurrent(self) -> bool:
        """True if the contents depend on a whole sequence: they cannot be shortened, and must start from zero."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move slots. The lengths on the device are still the old ones.

        Parameters
        ----------
        plan : CompactionPlan or DeviceCompactionPlan
            The moves of slots.
        stream : cuda.core.Stream or GraphBuilder
            The moves are ordered on it.
        """

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Prepare for slots that leave the active batch or enter it. ``Lengths`` still has the old active batch size.

        Parameters
        ----------
        lengths : sequence of int
            Tokens that each slot of the new active batch holds. New slots of length 0 are reset after this call.
        stream : cuda.core.Stream
            The copies are ordered on it.

        Raises
        ------
        CapacityError
            A sequence that waits in a slot that enters has no other place. Nothing was changed.
        """

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Prepare slots for a sequence that has no token yet.

        Parameters
        ----------
        slots : sequence of int
            Slots, in ascending order.
        stream : cuda.core.Stream
            The writes are ordered on it.
        """
