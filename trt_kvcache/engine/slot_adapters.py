"""``SlotAdapters``: the adapter of each slot of an enqueue, which an engine reads beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class SlotAdapters:
    """int32 ``[B]``: number of the adapter of each slot of the next enqueue, 0 for none, at an address that never changes."""

    def __init__(self, memory: Memory, adapters: AdapterSet, *, max_slots: int, dtype: str) -> None:
        #: Names of the adapters, in the order of their numbers from 1 on.
        self.names = adapters.names
        #: Hashes of their updates, by name.
        self.fingerprints = adapters.fingerprints
        #: Bytes of their updates in the engine's dtype.
        self.updates_nbytes = adapters.nbytes(dtype)
        self._numbers: dict[str | None, int] = {None: 0, **{name: number for number, name in enumerate(adapters.names, start=1)}}
        self._memory = memory
        self._staging = memory.staging((max_slots,), "int32")
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes((max_slots,), "int32"), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self.table = DeviceTensor(self._allocation, shape=(max_slots,), dtype="int32")
        self._written: tuple[str | None, ...] = ()
        #: True if a slot of the next enqueue has an adapter.
        self.in_use = False

    def write(self, names: Sequence[str | None], *, stream: Any) -> None:
        """Set the adapters of the slots of the next enqueue, stream-ordered. The last write must be done, as for ``StepBuffers``."""
        given = tuple(names)
        if given == self._written:
            return
        self._written, self.in_use = (), any(given)
        count = len(given)
        self._staging[:count] = [self._numbers[name] for name in given]
        self._memory.upload(self.table[:count], self._staging[:count], stream=stream)
        self._written = given

    def close(self) -> None:
        """Release the numbers. Idempotent."""
        self._allocation.close()
