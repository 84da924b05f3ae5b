"""``LengthState``: lengths on the device, their mirror on the host, and the contents of slots, which are notified of changes."""

import weakref
from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.cache.length_mirror import LengthMirror
from trt_kvcache.cache.slot_contents import SlotContents
from trt_kvcache.errors import ClosedError, ConfigError
from trt_kvcache.kernels import AnyCompactionPlan
from trt_kvcache.kernels.length_kernels import compact_lengths_kernel
from trt_kvcache.memory.base import Memory, check_memory_given
from trt_kvcache.memory.shapes import MAX_BATCH_SIZE, MAX_DIMENSION, align_up, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class LengthState(Uncopyable):
    """The state of :class:`~trt_kvcache.cache.lengths.Lengths`, and the launches that all its changes share."""

    def __init__(self, max_batch_size: int, max_sequence_length: int, *, memory: Memory) -> None:
        self._mirror = LengthMirror(
            int_in_range("max_batch_size", max_batch_size, 1, MAX_BATCH_SIZE, error=ConfigError),
            int_in_range("max_sequence_length", max_sequence_length, 1, MAX_DIMENSION, error=ConfigError),
        )
        check_memory_given(memory)
        self._memory = memory
        stream = memory.create_stream()
        self._allocation = memory.allocate(self.nbytes_for(self._mirror.max_batch_size), zeroed=True, stream=stream)
        try:
            memory.synchronize(stream)
        except BaseException:
            self._allocation.close()
            raise
        self._tensor = DeviceTensor(self._allocation, shape=(self._mirror.max_batch_size,), dtype="int32")
        # Views of the lengths of the first slots, by their number. The active slots are the first ones, so only the mirror is state.
        self._views: dict[int, DeviceTensor] = {}
        # Weak: a SequenceCacheManager that nobody refers to stops following.
        self._contents: list[weakref.ref[SlotContents]] = []

    @staticmethod
    def nbytes_for(max_batch_size: int) -> int:
        """Return the bytes that the lengths of ``max_batch_size`` slots take, padded to a multiple of 256.

        Parameters
        ----------
        max_batch_size : int
            Slots, B.
        """
        return align_up(dense_nbytes((max_batch_size,), "int32"))

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""
        return self._mirror.max_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens that a slot can hold, S."""
        return self._mirror.max_sequence_length

    @property
    def memory(self) -> Memory:
        """The memory of the tensor."""
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""
        return self._allocation.nbytes

    @property
    def tensor(self) -> DeviceTensor:
        """All lengths, int32 ``[B]``, to which ``kvcache_start_index`` is bound. Its address never changes."""
        return self._tensor

    @property
    def active_tensor(self) -> DeviceTensor:
        """The lengths of the active slots, int32 ``[A]``."""
        return self._first(len(self._mirror.upper_bounds))

    @property
    def active_batch_size(self) -> int:
        """Active slots, A. They are slots 0 to A-1."""
        return len(self._mirror.upper_bounds)

    @property
    def upper_bounds(self) -> tuple[int, ...]:
        """For each active slot an upper bound of its length; the length itself where the mirror is exact."""
        return self._mirror.upper_bounds

    @property
    def host(self) -> tuple[int, ...]:
        """The lengths of the active slots, from the mirror.

        Raises
        ------
        LengthsUnknown
            A device tensor was committed, or a device mapping compacted, since the last :meth:`sync_lengths`.
        """
        return self._mirror.lengths

    def of_slot(self, slot: int) -> int:
        """Return the length of one active slot, from the mirror.

        Parameters
        ----------
        slot : int
            An active slot.

        Raises
        ------
        SlotError
            The slot is not active.
        LengthsUnknown
            Only the device knows it.
        """
        return self._mirror.length_of(slot)

    def is_exact(self, slot: int) -> bool:
        """Return True if the mirror has the length of an active slot, and False if it has an upper bound.

        Parameters
        ----------
        slot : int
            An active slot.

        Raises
        ------
        SlotError
            The slot is not active.
        """
        return self._mirror.is_exact(slot)

    @property
    def all_empty(self) -> bool:
        """True if every active slot is known to hold no token. True without active slots."""
        return self._mirror.all_empty

    def attach(self, contents: SlotContents) -> None:
        """Let ``contents`` follow every change of the slots, until :meth:`detach` or until no other reference to it is left.

        Parameters
        ----------
        contents : SlotContents
            Contents of the slots.
        """
        self._contents.append(weakref.ref(contents))

    def detach(self, contents: SlotContents) -> None:
        """Let ``contents`` no longer follow the slots. If it does not follow them, nothing happens.

        Parameters
        ----------
        contents : SlotContents
            Contents of the slots.
        """
        self._contents = [reference for reference in self._contents if reference() not in (None, contents)]

    def contents(self) -> list[SlotContents]:
        """Return the contents that follow these lengths, in the order of :meth:`attach`."""
        return [contents for reference in self._contents if (contents := reference()) is not None]

    @property
    def is_recurrent(self) -> bool:
        """True if the slots hold recurrent states. Then :meth:`~trt_kvcache.cache.lengths.Lengths.rewind` is refused."""
        return any(contents.is_recurrent for contents in self.contents())

    def close(self) -> None:
        """Release the tensor. Closing again does nothing."""
        self._allocation.close()

    def _check_open(self) -> None:
        if self._allocation.closed:
            raise ClosedError("these Lengths are closed.")

    def _first(self, count: int) -> DeviceTensor:
        """Return the lengths of the first slots, int32 ``[count]``."""
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self._tensor[:count]
        return view

    def _announce(self, lengths: Sequence[int], stream: Any) -> None:
        """Tell the contents which slots leave the active batch or enter it, before the mirror changes."""
        if len(lengths) != len(self._mirror.upper_bounds):
            for contents in self.contents():
                contents.resize(lengths, stream=stream)

    def _reset_slots(self, slots: Sequence[int], stream: Any) -> None:
        if slots:
            for contents in self.contents():
                contents.reset_slots(slots, stream=stream)

    def _move(self, plan: AnyCompactionPlan, stream: Any) -> None:
        """Launch the moves of a valid plan. The lengths move last: with a device mapping the other kernels read the old ones."""
        if plan.is_identity or not plan.old_batch:
            return
        for contents in self.contents():
            contents.compact(plan, stream=stream)
        compact_lengths_kernel(self._first(plan.old_batch), plan, stream)
