"""``SlotContents``: what the slots hold beside their lengths, and what follows when those change."""

from collections.abc import Sequence
from typing import Any, Protocol

from trt_kvcache.kernels import AnyCompactionPlan


class SlotContents(Protocol):
    """K and V, or recurrent states. A :class:`~trt_kvcache.cache.lengths.Lengths` tells all that are attached to it.

    Calls are ordered on ``stream`` and neither wait nor allocate.
    """

    @property
    def is_recurrent(self) -> bool:
        """Whether it sums up a sequence, so that it cannot be cut back to an earlier token and must start from zero."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move slots. The lengths on the device are still the old ones."""

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Slots leave or enter the active batch: as many as there are ``lengths`` will be active, and the new ones hold so many tokens.

        :class:`~trt_kvcache.cache.lengths.Lengths` has the old ones still. New ones of length 0 start anew after this.
        """

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Make slots what they are for a sequence without a token."""
