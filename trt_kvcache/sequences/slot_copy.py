"""``SlotCopy``: the contents of a slot, copied within the memory of the cache or to the host, and back into a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.kv_layers import SavedRows, head_rows
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import RangeError
from trt_kvcache.memory.base import Array, Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_format import SlotFormat

#: Location of a copy: the memory of the cache, or the host (page-locked for a device).
Place = Literal["cache", "host"]


class SavedSlot(NamedTuple):
    """Contents of a slot, in the memory of the cache."""

    #: None without attention layers.
    rows: SavedRows | None
    #: ``[num_heads, head_dim, state_size]`` and ``[conv_dim, conv_kernel]`` of each recurrent layer.
    states: Mapping[StateKind, list[DeviceTensor]]


@dataclass(frozen=True, eq=False)
class SlotCopy:
    """K and V of the first tokens of a slot, and the states after the last of them. Bytes are copied as they are, whatever the dtype."""

    # Within the memory of the cache, kernels copy all layers of a head dim, or all states of a kind, in one launch. To and from the host,
    # each head and each state is one direct copy, which needs neither a kernel nor memory on the device: so a full device can swap out.

    slot_format: SlotFormat
    #: Tokens.
    length: int
    #: On the host the tensors of :meth:`SlotFormat.tensors`, to be read only.
    contents: tuple[Array, ...] | SavedSlot

    @classmethod
    def capture(cls, cache: Cache, slot: int, length: int, *, place: Place = "cache", stream: Any) -> SlotCopy:
        """Copy the first tokens of an active slot, after :func:`check_capture`. With ``place="host"`` the call waits."""
        check_capture(cache, slot, length, stream=stream)
        if place == "cache":
            kv, states = cache.kv_layers, cache.states
            rows = None if kv is None else kv.capture(slot, length, stream=stream)
            saved = {} if states is None else {kind: states.capture(kind, slot, stream=stream) for kind in states.kinds}
            return cls(SlotFormat.of(cache), length, SavedSlot(rows, saved))
        copy = cls.download(cache, slot, length, stream=stream)
        cache.memory.synchronize(stream)
        return copy

    @classmethod
    def download(cls, cache: Cache, slot: int, length: int, *, stream: Any) -> SlotCopy:
        """Copy any slot to the host, unchecked. The copy is complete once ``stream`` was waited for."""
        slot_format = SlotFormat.of(cache)
        copy = cls(slot_format, length, host_arrays(slot_format, length, cache.memory))
        rows, states = copy._rows_and_states
        if cache.kv_layers is not None:
            cache.kv_layers.download(rows, slot, stream=stream)
        if cache.states is not None:
            cache.states.download(states, slot, stream=stream)
        return copy

    @property
    def place(self) -> Place:
        """Location of the copy."""
        return "cache" if isinstance(self.contents, SavedSlot) else "host"

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The tensors of :meth:`SlotFormat.tensors`, to be read only. The copy must be on the host."""
        assert not isinstance(self.contents, SavedSlot)
        return self.contents

    @property
    def _rows_and_states(self) -> tuple[Sequence[Array], Sequence[Array]]:
        """Return the arrays on the host: K, V and scales by token, then states."""
        first_state = len(self.arrays) - self.slot_format.num_states
        return self.arrays[:first_state], self.arrays[first_state:]

    def restore(self, cache: Cache, slot: int, length: int, *, stream: Any) -> None:
        """Copy the first tokens, and the states, into any slot. Its length stays as it is. From the host the call waits."""
        slot_index(slot, cache.max_batch_size)
        longest = min(self.length, cache.lengths.max_sequence_length)
        int_in_range("tokens to restore", length, self.length if self.slot_format.has_states else 0, longest)
        refuse_capture(cache.memory, "restoring a slot", stream)
        if not isinstance(self.contents, SavedSlot):
            self.upload(cache, slot, length, stream=stream)
            cache.memory.synchronize(stream)
            return
        if cache.kv_layers is not None and self.contents.rows is not None:
            cache.kv_layers.restore(self.contents.rows, slot, length, stream=stream)
        if cache.states is not None:
            for kind, saved in self.contents.states.items():
                cache.states.restore(kind, saved, slot, stream=stream)

    def upload(self, cache: Cache, slot: int, length: int, *, both_buffers: bool = False, stream: Any) -> None:
        """Copy the first tokens, and the states, from the host into any slot, unchecked. The copy must stay until the stream is done."""
        # both_buffers: the next states are written too, for a slot that no enqueue writes.
        rows, states = self._rows_and_states
        if cache.kv_layers is not None:
            cache.kv_layers.upload([array[:, :length] for array in rows], slot, 0, stream=stream)
        if cache.states is not None:
            cache.states.upload(states, slot, both_buffers=both_buffers, stream=stream)

    def to_host(self, cache: Cache, *, stream: Any) -> SlotCopy:
        """Return this copy on the host. If it is not there yet, the call waits."""
        if not isinstance(self.contents, SavedSlot):
            return self
        copy = SlotCopy(self.slot_format, self.length, host_arrays(self.slot_format, self.length, cache.memory))
        for tensor, array in copy._pairs(self.contents):
            cache.memory.download(array, tensor, stream=stream)
        cache.memory.synchronize(stream)
        return copy

    def to_cache(self, cache: Cache, *, stream: Any) -> SlotCopy:
        """Return this copy in the memory of a cache of its format. If it is not there yet, the call waits."""
        if isinstance(self.contents, SavedSlot):
            return self
        kv, states = cache.kv_layers, cache.states
        rows = None if kv is None else kv.allocate_saved(self.length, stream=stream)
        saved = {} if states is None else {kind: states.allocate_saved(kind, stream=stream) for kind in states.kinds}
        contents = SavedSlot(rows, saved)
        for tensor, array in self._pairs(contents):
            cache.memory.upload(tensor, array, stream=stream)
        cache.memory.synchronize(stream)
        return SlotCopy(self.slot_format, self.length, contents)

    def _pairs(self, saved: SavedSlot) -> Iterator[tuple[DeviceTensor, Array]]:
        """Yield the parts of tensors in the memory of a cache with the parts of this copy on the host, in equal shapes."""
        rows, states = self._rows_and_states
        num_sides = 2 * (0 if self.slot_format.kv is None else self.slot_format.kv.num_layers)
        for index, array in enumerate(rows):
            layer, side = divmod(index, 2)
            assert saved.rows is not None  # there are attention layers
            tensor = saved.rows.tensors[layer]
            if index < num_sides:
                yield tensor[side : side + 1], array[np.newaxis]
            else:  # saved scales have room for a multiple of 4 tokens, so only the scales of one head are contiguous
                heads = head_rows(tensor.reshape(1, *tensor.shape, 1), 0, side, 0, array.shape[1])
                yield from zip(heads, array[..., np.newaxis], strict=True)
        yield from zip((tensor for tensors in saved.states.values() for tensor in tensors), (array[0] for array in states), strict=True)


def check_capture(cache: Cache, slot: int, length: int, *, stream: Any) -> None:
    """Check the arguments of :meth:`SlotCopy.capture`: only :class:`CapacityError` remains possible."""
    held = cache.host_kv_cache_lengths
    index = slot_index(slot, len(held), of="active slots")
    number = int_in_range("tokens", length, 0)
    whole = cache.states is not None
    if number > held[index] or (whole and number != held[index]):
        expected = f"exactly {held[index]}, as its states depend on all of them, got {number}" if whole else f"no more, got {number}"
        raise RangeError(f"tokens: slot {index} holds {held[index]}; expected {expected}.")
    refuse_capture(cache.memory, "copying a slot", stream)


def host_arrays(slot_format: SlotFormat, length: int, memory: Memory) -> tuple[Array, ...]:
    """Allocate the tensors of :meth:`SlotFormat.tensors` on the host, contiguous in one array; page-locked for a device."""
    tensors = slot_format.tensors(length).values()
    sizes = [dense_nbytes(shape, dtype) for shape, dtype in tensors]
    buffer = memory.staging((sum(sizes),), "uint8")
    arrays, end = [], 0
    for (shape, dtype), size in zip(tensors, sizes, strict=True):
        start, end = end, end + size
        arrays.append(buffer[start:end].view(numpy_dtype(dtype)).reshape(shape))
    return tuple(arrays)
