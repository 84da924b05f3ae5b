"""``SlotCopy`` and ``HostSlotCopy``: a sequence taken out of its slot, in the memory of the cache or on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.errors import RangeError
from trt_kvcache.kernels import KVLayerInfos, instantiate_kv_cache_batched
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.saved_tensors import allocate_tensors
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_format import AnyCache, SlotFormat, SlotPart
from trt_kvcache.sequences.slot_storage import SavedSlot, SlotStorage


def check_capture(cache: AnyCache, slot: int, length: int, *, stream: Any) -> None:
    """Check that the first ``length`` tokens of a slot can be copied: see :meth:`SlotCopy.capture`."""
    held = cache.host_kv_cache_lengths
    index = slot_index(slot, len(held), of="active slots")
    number = int_in_range("tokens", length, 0)
    states = SlotFormat.of(cache).has_states
    if number > held[index] or (states and number != held[index]):
        expected = f"exactly as many, as its states are those after all of them, got {number}" if states else f"no more, got {number}"
        raise RangeError(f"tokens: slot {index} holds {held[index]}; expected {expected}.")
    refuse_capture(cache.memory, "copying a slot", stream)


def check_restore(cache: AnyCache, slot: int, length: int, held: int, *, stream: Any) -> None:
    """Check that ``length`` of the ``held`` tokens of a copy can be restored into a slot: see :meth:`SlotCopy.restore`."""
    slot_index(slot, cache.max_batch_size)
    longest = min(held, cache.lengths.max_sequence_length)
    int_in_range("tokens to restore", length, held if SlotFormat.of(cache).has_states else 0, longest)
    refuse_capture(cache.memory, "restoring a slot", stream)


class SlotCopy:
    """K and V of the first tokens of a slot, and the states after the last of them, in the memory of the cache.

    Wrong arguments, capturing streams and closed objects raise as :mod:`trt_kvcache.errors` says.

    ``length``: Tokens.
    ``tensors``: mapping of SlotPart to sequence of DeviceTensor. One per layer. Their memory goes with the last reference to them.
    """

    def __init__(self, slot_format: SlotFormat, length: int, tensors: Mapping[SlotPart, Sequence[DeviceTensor]]) -> None:
        self.slot_format = slot_format
        self.length = length
        self._tensors = dict(tensors)

    @classmethod
    def capture(cls, cache: AnyCache, slot: int, length: int, *, stream: Any) -> SlotCopy:
        """Copy a slot.

        ``cache``: KVCacheManager, LinearKVCache or HybridCacheManager.
        ``slot``: An active one.
        ``length``: Tokens, at most those that it holds; with recurrent layers exactly those.
        ``stream``: cuda.core.Stream. The copies are ordered on it; the call does not wait.

        Raises LengthsUnknown, CapacityError.
        """
        check_capture(cache, slot, length, stream=stream)
        slot_format = SlotFormat.of(cache)
        return cls(slot_format, length, {part: _capture(cache, part, slot, length, stream) for part in slot_format.parts(length)})

    @classmethod
    def of_host(cls, copy: HostSlotCopy, memory: Memory, *, stream: Any) -> SlotCopy:
        """Copy from the host to the memory of a cache. Raises :class:`CapacityError` where there is no room."""
        layers = len(copy.saved.rows) // 2
        half = len(copy.saved.states) // 2
        arrays = {
            SlotPart.KV_CACHE: [np.stack(copy.saved.rows[2 * layer : 2 * layer + 2]) for layer in range(layers)],
            SlotPart.RECURRENT_STATE: [array[0] for array in copy.saved.states[:half]],
            SlotPart.CONV_STATE: [array[0] for array in copy.saved.states[half:]],
        }
        tensors: dict[SlotPart, Sequence[DeviceTensor]] = {}
        for part, part_format in copy.slot_format.parts(copy.length).items():
            tensors[part] = allocate_tensors(memory, part_format.shapes, part_format.dtype, stream=stream)
            for tensor, array in zip(tensors[part], arrays[part], strict=True):
                memory.upload(tensor, array, stream=stream)
        return cls(copy.slot_format, copy.length, tensors)

    def to_host(self) -> HostSlotCopy:
        """Copy to the host. Waits for the device."""
        pairs = [tensor.numpy() for tensor in self._tensors.get(SlotPart.KV_CACHE, ())]
        parts = (SlotPart.RECURRENT_STATE, SlotPart.CONV_STATE)
        states = [tensor.numpy()[np.newaxis] for part in parts for tensor in self._tensors.get(part, ())]
        return HostSlotCopy.of_arrays(self.slot_format, self.length, [*(rows for pair in pairs for rows in pair), *states])

    def restore(self, cache: AnyCache, slot: int, length: int, *, stream: Any) -> None:
        """Copy the first ``length`` tokens to the front of a slot. Lengths stay as they are.

        ``cache``: Of the memory and the :class:`SlotFormat` of the one that was copied.
        ``slot``: Active or not.
        ``length``: With states exactly that of this copy.
        ``stream``: cuda.core.Stream. The copies are ordered on it; the call neither waits nor allocates.
        """
        check_restore(cache, slot, length, self.length, stream=stream)
        for part, tensors in self._tensors.items():
            _restore(cache, part, tensors, slot, length, stream)


@dataclass(frozen=True, eq=False)
class HostSlotCopy:
    """The same on the host.

    ``slot_format``: Of the cache that it was taken from.
    ``length``: Tokens.
    ``saved``: What is copied, to be read only.
    """

    slot_format: SlotFormat
    length: int
    saved: SavedSlot

    @classmethod
    def of_arrays(cls, slot_format: SlotFormat, length: int, arrays: Sequence[np.ndarray[Any, Any]]) -> HostSlotCopy:
        """Take the arrays of :meth:`SlotFormat.host_tensors`, in its order."""
        rows = 0 if slot_format.kv is None else 2 * slot_format.kv.num_layers
        return cls(slot_format, length, SavedSlot(list(arrays[:rows]), list(arrays[rows:]), sum(array.nbytes for array in arrays)))

    @classmethod
    def capture(cls, cache: AnyCache, slot: int, length: int, *, stream: Any) -> HostSlotCopy:
        """Copy a slot, into page-locked memory for a device: as :meth:`SlotCopy.capture`, but waits."""
        check_capture(cache, slot, length, stream=stream)
        saved = SlotStorage(cache).save(slot, length, stream=stream)
        cache.memory.synchronize(stream)
        return cls(SlotFormat.of(cache), length, saved)

    def restore(self, cache: AnyCache, slot: int, length: int, *, stream: Any) -> None:
        """Copy the first ``length`` tokens to the front of a slot: as :meth:`SlotCopy.restore`, but waits."""
        check_restore(cache, slot, length, self.length, stream=stream)
        part = replace(self.saved, rows=[array[:, :length] for array in self.saved.rows])
        SlotStorage(cache).restore(part, slot, stream=stream)
        cache.memory.synchronize(stream)


def _capture(cache: Any, part: SlotPart, slot: int, length: int, stream: Any) -> Sequence[DeviceTensor]:
    captured: Sequence[DeviceTensor]
    if part is SlotPart.KV_CACHE:
        captured = cache.capture_kv_cache(slot, length, stream=stream)
    elif part is SlotPart.RECURRENT_STATE:
        captured = cache.capture_recurrent_states(slot, stream=stream)
    else:
        captured = cache.capture_conv_states(slot, stream=stream)
    return captured


def _restore(cache: Any, part: SlotPart, tensors: Sequence[DeviceTensor], slot: int, length: int, stream: Any) -> None:
    if part is SlotPart.RECURRENT_STATE:
        cache.restore_recurrent_states(tensors, slot, stream=stream)
    elif part is SlotPart.CONV_STATE:
        cache.restore_conv_states(tensors, slot, stream=stream)
    elif length:
        for group in cache.kv_head_dim_groups:  # restore_kv_cache would copy all the tokens that were captured
            saved = KVLayerInfos([tensors[index] for index in group.attn_layer_indices], stream=stream)
            instantiate_kv_cache_batched(group.layer_infos, saved, slot, length, stream=stream)
