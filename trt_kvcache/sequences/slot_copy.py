"""``SlotCopy``: a sequence taken out of its slot, either in the memory of the cache or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.cache.cache import Cache
from trt_kvcache.errors import RangeError
from trt_kvcache.memory.base import Array
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_format import SlotFormat
from trt_kvcache.sequences.slot_transfer import SavedTensors, SlotTransfer, head_rows

#: Where a copy is: in the memory of the cache, or on the host (page-locked for a device).
Place = Literal["cache", "host"]


def check_capture(cache: Cache, slot: int, length: int, *, stream: Any) -> None:
    """Check the arguments of :meth:`SlotCopy.capture`, and raise what it raises but :class:`CapacityError`."""
    held = cache.host_kv_cache_lengths
    index = slot_index(slot, len(held), of="active slots")
    number = int_in_range("tokens", length, 0)
    whole = SlotFormat.of(cache).has_states
    if number > held[index] or (whole and number != held[index]):
        expected = f"exactly as many, as its states are those after all of them, got {number}" if whole else f"no more, got {number}"
        raise RangeError(f"tokens: slot {index} holds {held[index]}; expected {expected}.")
    refuse_capture(cache.memory, "copying a slot", stream)


@dataclass(frozen=True, eq=False)
class SlotCopy:
    """K and V of the first tokens of a slot, and the states after the last of them."""

    slot_format: SlotFormat
    length: int
    contents: tuple[Array, ...] | SavedTensors

    @classmethod
    def capture(cls, cache: Cache, slot: int, length: int, *, place: Place = "cache", stream: Any) -> SlotCopy:
        """Copy a slot."""
        check_capture(cache, slot, length, stream=stream)
        transfer = SlotTransfer(cache)
        if place == "cache":
            return cls(transfer.slot_format, length, transfer.save(slot, length, stream=stream))
        copy = cls(transfer.slot_format, length, transfer.download(slot, length, stream=stream))
        cache.memory.synchronize(stream)
        return copy

    @property
    def place(self) -> Place:
        """Where the copy is."""
        return "cache" if isinstance(self.contents, SavedTensors) else "host"

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The tensors of :meth:`SlotFormat.tensors`, to be read only. The copy must be on the host."""
        assert not isinstance(self.contents, SavedTensors)
        return self.contents

    def restore(self, cache: Cache, slot: int, length: int, *, stream: Any) -> None:
        """Copy the first tokens, and the states, into a slot. Its length stays as it is."""
        transfer = SlotTransfer(cache)
        slot_index(slot, cache.max_batch_size)
        longest = min(self.length, cache.lengths.max_sequence_length)
        int_in_range("tokens to restore", length, self.length if transfer.slot_format.has_states else 0, longest)
        refuse_capture(cache.memory, "restoring a slot", stream)
        if isinstance(self.contents, SavedTensors):
            transfer.instantiate(self.contents, slot, length, stream=stream)
        else:
            transfer.upload(self.contents, slot, length, stream=stream)
            cache.memory.synchronize(stream)

    def to_host(self, cache: Cache, *, stream: Any) -> SlotCopy:
        """Return this copy on the host."""
        if not isinstance(self.contents, SavedTensors):
            return self
        copy = SlotCopy(self.slot_format, self.length, SlotTransfer(cache).host_arrays(self.length))
        for tensor, array in self._pairs(self.contents, copy.arrays):
            cache.memory.download(array, tensor, stream=stream)
        cache.memory.synchronize(stream)
        return copy

    def to_cache(self, cache: Cache, *, stream: Any) -> SlotCopy:
        """Return this copy in the memory of a cache."""
        if isinstance(self.contents, SavedTensors):
            return self
        saved = SlotTransfer(cache).allocate(self.length, stream=stream)
        for tensor, array in self._pairs(saved, self.contents):
            cache.memory.upload(tensor, array, stream=stream)
        cache.memory.synchronize(stream)
        return SlotCopy(self.slot_format, self.length, saved)

    @staticmethod
    def _pairs(saved: SavedTensors, arrays: Sequence[Array]) -> Iterator[tuple[DeviceTensor, Array]]:
        """Yield the parts of what the kernels saved with the host arrays of the same contents, in equal shapes."""
        first_scale = 2 * len(saved.kv)
        first_state = first_scale + 2 * len(saved.scales)
        rows, scales, states = arrays[:first_scale], arrays[first_scale:first_state], arrays[first_state:]
        for index, array in enumerate(rows):
            layer, k_or_v = divmod(index, 2)
            yield saved.kv[layer][k_or_v : k_or_v + 1], array[np.newaxis]
        for index, array in enumerate(scales):  # the saved ones have room for a multiple of 4 tokens, so that only their heads are dense
            layer, k_or_v = divmod(index, 2)
            tensor = saved.scales[layer]
            heads = head_rows(tensor.reshape(1, *tensor.shape, 1), 0, k_or_v, 0, array.shape[1])
            yield from zip(heads, array[..., np.newaxis], strict=True)
        for tensor, array in zip((tensor for tensors in saved.states.values() for tensor in tensors), states, strict=True):
            yield tensor, array[0]
