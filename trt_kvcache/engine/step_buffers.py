"""``StepBuffers``: the inputs of an enqueue that are not caches, and its logits, allocated once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: The same elements on the device and in the host buffer that they are copied from or to.
_DeviceAndHost = tuple[DeviceTensor, np.ndarray[Any, Any]]


class StepBuffers:
    """Device tensors for ``logits`` and the inputs that are not caches, each with a host buffer, pinned for a GPU.

    A host buffer must not be written before its copy is done: callers wait once per step, in :meth:`read_logits`.
    """

    # Indices of wanted logits have three buffers: for a step, a step ahead, which writes them before that wait, and another one in its
    # place if it is dropped.

    def __init__(
        self,
        memory: Memory,
        *,
        max_batch_size: int,
        max_width: int,
        vocab_size: int,
        index_dtypes: tuple[str, str],
        logits_dtype: str,
        max_logits_per_slot: int = 1,
        has_states: bool = False,
    ) -> None:
        self._memory = memory
        self._allocations: list[Allocation] = []
        stream = memory.create_stream()
        try:
            self.input_ids = self._tensor((max_batch_size * max_width,), index_dtypes[0], stream)
            self.last_token_ids = self._tensor((max_batch_size, max_logits_per_slot), index_dtypes[1], stream)
            self.start_index = self._tensor((max_batch_size,), "int32", stream)
            self.new_lengths = self._tensor((max_batch_size,), "int32", stream) if has_states else None
            self.logits = self._tensor((max_batch_size * max_logits_per_slot, vocab_size), logits_dtype, stream)
            self._host_ids = memory.staging(self.input_ids.shape, index_dtypes[0])
            self._last_tokens = self.last_token_ids.reshape(max_batch_size * max_logits_per_slot)
            self._host_last = [memory.staging(self._last_tokens.shape, index_dtypes[1]) for _ in range(3)]
            self._host_first = memory.staging((max_batch_size,), index_dtypes[1])  # zeros, always
            self._host_start = memory.staging(self.start_index.shape, "int32")
            self._host_new = memory.staging((max_batch_size,), "int32") if has_states else None
            self._host_logits = memory.staging(self.logits.shape, logits_dtype)
            memory.synchronize(stream)
        except BaseException:
            self.close()
            raise
        # Views are made once per shape: a decode step makes none.
        self._ids_views: dict[tuple[int, int], _DeviceAndHost] = {}
        self._logits_views: dict[int, _DeviceAndHost] = {}
        self._device_views: dict[int, tuple[DeviceTensor, DeviceTensor]] = {}
        self._last: list[int] = []
        self._new: list[int] = []

    def _tensor(self, shape: tuple[int, ...], dtype: str, stream: Any) -> DeviceTensor:
        allocation = self._memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream)
        self._allocations.append(allocation)
        return DeviceTensor(allocation, shape=shape, dtype=dtype)

    def write_one_token_each(self, tokens: Sequence[int], *, stream: Any) -> None:
        """Upload one new token per slot: the inputs of a decode step. Stream-ordered."""
        ids, host_ids = self._ids_of(len(tokens), 1)
        host_ids[:, 0] = tokens
        self._memory.upload(ids, host_ids, stream=stream)
        self.want_first_logits(len(tokens), stream=stream)

    def want_first_logits(self, count: int, *, stream: Any) -> None:
        """Want the logits of one token in each slot. No wait is needed since the last enqueue: nothing is written on the host."""
        wanted = [0] * count
        if self._last != wanted:
            self._last = []
            self._memory.upload(self._last_tokens[:count], self._host_first[:count], stream=stream)
            self._last = wanted

    def write_rows(self, rows: Sequence[Sequence[int]], width: int, *, stream: Any, every_logit: bool = False) -> None:
        """Upload the new tokens of each slot, right-padded with 0; a row may be empty. Stream-ordered.

        With ``every_logit``, the logits of all ``width`` tokens are wanted, those of padding too, not only of the last token.
        """
        ids, host_ids = self._ids_of(len(rows), width)
        host_ids[...] = 0
        for padded, row in zip(host_ids, rows, strict=True):
            padded[: len(row)] = row
        self._memory.upload(ids, host_ids, stream=stream)
        if every_logit:
            self.want_every_logit(len(rows), width, stream=stream)
        else:
            self._write_last([max(len(row) - 1, 0) for row in rows], stream)

    def want_every_logit(self, count: int, width: int, *, stream: Any) -> None:
        """Want the logits of all ``width`` tokens in each slot. Stream-ordered."""
        self._write_last([*range(width)] * count, stream)

    def _write_last(self, last: list[int], stream: Any) -> None:
        """Upload the indices of the tokens whose logits are wanted, slot by slot, unless they equal those of the last step."""
        if last != self._last:
            self._last = []
            self._host_last.append(self._host_last.pop(0))
            page = self._host_last[-1][: len(last)]
            page[...] = last
            self._memory.upload(self._last_tokens[: len(last)], page, stream=stream)
            self._last = last

    def last_from_device(self, count: int) -> DeviceTensor:
        """Return the indices ``[count]`` of the tokens whose logits are wanted, one in each slot, for a kernel that writes them."""
        self._last = []
        return self._last_tokens[:count]

    def write_start_index(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Upload the lengths of slots that do not start at slot 0; otherwise the engine reads the lengths of the cache."""
        self._host_start[: len(lengths)] = lengths
        self._memory.upload(self.start_index[: len(lengths)], self._host_start[: len(lengths)], stream=stream)

    def write_new_lengths(self, new_lengths: Sequence[int], *, stream: Any) -> None:
        """Upload the number of new tokens of each slot, unless they equal those of the last step."""
        assert self.new_lengths is not None
        assert self._host_new is not None
        new = list(new_lengths)
        if new != self._new:
            self._new = []
            self._host_new[: len(new)] = new
            self._memory.upload(self.new_lengths[: len(new)], self._host_new[: len(new)], stream=stream)
            self._new = new

    def read_logits(self, count: int, *, stream: Any) -> np.ndarray[Any, Any]:
        """Download ``count`` rows of logits into a host buffer that the next call overwrites. Waits for ``stream``."""
        views = self._logits_views.get(count)
        if views is None:
            views = self._logits_views[count] = (self.logits[:count], self._host_logits[:count])
        self._memory.download(views[1], views[0], stream=stream)
        self._memory.synchronize(stream)
        return views[1]

    def device_views(self, count: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return the ids ``[count]`` and the logits ``[count, vocab]`` of a decode step on the device."""
        views = self._device_views.get(count)
        if views is None:
            views = self._device_views[count] = (self.input_ids[:count], self.logits[:count])
        return views

    def _ids_of(self, count: int, width: int) -> _DeviceAndHost:
        views = self._ids_views.get((count, width))
        if views is None:
            size = count * width
            views = (self.input_ids[:size].reshape(count, width), self._host_ids[:size].reshape(count, width))
            self._ids_views[count, width] = views
        return views

    def close(self) -> None:
        """Release the device tensors. Idempotent."""
        while self._allocations:
            self._allocations.pop().close()
