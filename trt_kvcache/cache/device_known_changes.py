"""``DeviceKnownChanges``: changes of lengths by values that only the device knows, and by CUDA graphs that are replayed."""

import os
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.length_state import LengthState
from trt_kvcache.errors import MappingError, RangeError, ShapeError
from trt_kvcache.kernels import CompactionPlan, increment_length_tensor
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor

#: With the value 1, device mappings of compactions are read back and checked, which waits for the device.
DEBUG_VARIABLE = "TRT_KVCACHE_DEBUG"


class DeviceKnownChanges(LengthState):
    """Changes by a device tensor, or by a CUDA graph: afterwards the mirror is an upper bound. Sessions never use these."""

    def replayed(self, increment: int, *, exact: bool = True) -> None:
        """Update the mirror before a captured commit is replayed. Nothing is launched here.

        Parameters
        ----------
        increment : int
            The captured number, or the ``max_increment`` of a captured device tensor.
        exact : bool
            False for a device tensor: the mirror becomes an upper bound.

        Raises
        ------
        CapacityError
            A slot would exceed S tokens: do not replay.
        RangeError
            ``increment`` is negative.
        """
        self._check_open()
        number = int_in_range("increment", increment, 0)
        self._mirror = self._mirror.after_commit([number] * self.active_batch_size, exact=exact)

    def replayed_compaction(self, old_batch: int, new_batch: int) -> None:
        """Update the mirror before a captured compaction is replayed. Nothing is launched here.

        Parameters
        ----------
        old_batch, new_batch : int
            As captured.

        Raises
        ------
        MappingError
            ``old_batch`` is not the active batch size: do not replay.
        RangeError
            ``new_batch`` is larger, or negative.
        """
        self._check_open()
        self._mirror.check_old_batch(old_batch)
        self._mirror = self._mirror.after_device_compaction(new_batch)

    def sync_lengths(self, *, stream: Any) -> None:
        """Read the lengths from the device into the mirror, which is exact afterwards. Waits for ``stream``.

        Parameters
        ----------
        stream : cuda.core.Stream
            The stream to wait for.

        Raises
        ------
        LengthsUnknown
            The device holds a length that is not from 0 to S, because a committed tensor exceeded its ``max_increment``.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        refuse_capture(self._memory, "sync_lengths", stream, because="it waits for the device")
        self._memory.synchronize(stream)
        self._mirror = self._mirror.after_sync(self._memory.read(self.active_tensor).tolist())

    def _commit_tensor(self, increments: DeviceTensor, max_increment: int | None, stream: Any) -> None:
        if max_increment is None:
            raise RangeError("max_increment: expected with a device tensor, whose values the host does not know.")
        limit = int_in_range("max_increment", max_increment, 0)
        active = self.active_batch_size
        if increments.shape != (active,):
            raise ShapeError(f"increment: expected shape ({active},), one per active slot, got {increments.shape}.")
        after = self._mirror if self._memory.is_capturing(stream) else self._mirror.after_commit((limit,) * active, exact=False)
        increment_length_tensor(self.active_tensor, increments, stream=stream)  # checks dtype and memory
        self._mirror = after

    def _compact_by_device_mapping(self, mapping: DeviceTensor, old: int, new: int, stream: Any) -> None:
        plan = CompactionPlan.from_device(mapping, old, new, self.active_tensor)
        if self._memory.is_capturing(stream):
            self._move(plan, stream)
            return
        if os.environ.get(DEBUG_VARIABLE) == "1":
            self._check_device_mapping(mapping, new, stream)
        self._move(plan, stream)
        after = self._mirror.after_device_compaction(new)
        self._announce((0,) * new, stream)
        self._mirror = after

    def _check_device_mapping(self, mapping: DeviceTensor, new_batch: int, stream: Any) -> None:
        """Read a device mapping and raise :class:`MappingError` if it is not valid, or changes the order of slots."""
        self._memory.synchronize(stream)
        slots = self._memory.read(mapping)
        CompactionPlan.from_host(slots, len(slots), new_batch, self._mirror.upper_bounds)
        kept = [int(slot) for slot in slots if slot >= 0]
        if kept != sorted(kept):
            raise MappingError(f"batch_mapping: a mapping on the device must keep the order of the slots, got {slots.tolist()}.")
