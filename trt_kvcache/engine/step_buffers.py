"""``StepBuffers``: tokens going into an enqueue and logits coming out of it, allocated once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: The same elements in the memory of the engine and on the host.
_Twins = tuple[DeviceTensor, np.ndarray[Any, Any]]


class StepBuffers:
    """Device tensors for ``input_ids``, ``last_token_ids``, ``kvcache_start_index`` and ``logits``, each with a host twin.

    The host twins are page-locked where the memory is a device. A twin is filled anew only after the enqueue that read it is
    done: callers wait once per step, when they read logits (or ``synchronize``).

    ``max_batch_size``, ``max_width``: Largest enqueue.
    ``index_dtypes``: pair of str. Of ``input_ids`` and ``last_token_ids``: ``"int32"`` or ``"int64"``.
    """

    def __init__(
        self, memory: Memory, *, max_batch_size: int, max_width: int, vocab_size: int, index_dtypes: tuple[str, str], logits_dtype: str
    ) -> None:
        self._memory = memory
        self._allocations: list[Allocation] = []
        stream = memory.create_stream()
        try:
            self.input_ids = self._tensor((max_batch_size * max_width,), index_dtypes[0], stream)
            self.last_token_ids = self._tensor((max_batch_size, 1), index_dtypes[1], stream)
            self.start_index = self._tensor((max_batch_size,), "int32", stream)
            self.logits = self._tensor((max_batch_size, vocab_size), logits_dtype, stream)
            self._host_ids = memory.staging(self.input_ids.shape, index_dtypes[0])
            self._host_last = memory.staging(self.last_token_ids.shape, index_dtypes[1])
            self._host_start = memory.staging(self.start_index.shape, "int32")
            self._host_logits = memory.staging(self.logits.shape, logits_dtype)
            memory.synchronize(stream)
        except BaseException:
            self.close()
            raise
        # Views are made once per shape: a decode step makes none.
        self._ids_views: dict[tuple[int, int], _Twins] = {}
        self._logits_views: dict[int, _Twins] = {}
        self._last: list[int] = []

    def _tensor(self, shape: tuple[int, ...], dtype: str, stream: Any) -> DeviceTensor:
        allocation = self._memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream)
        self._allocations.append(allocation)
        return DeviceTensor(allocation, shape=shape, dtype=dtype)

    def write_one_token_each(self, tokens: Sequence[int], *, stream: Any) -> None:
        """Upload one new token per slot. Does not wait."""
        ids, host_ids = self._ids_of(len(tokens), 1)
        host_ids[:, 0] = tokens
        self._memory.upload(ids, host_ids, stream=stream)
        self._write_last([0] * len(tokens), stream)

    def write_rows(self, rows: Sequence[Sequence[int]], width: int, *, stream: Any) -> None:
        """Upload the new tokens of each slot, right-padded with 0 to ``width``. Does not wait."""
        ids, host_ids = self._ids_of(len(rows), width)
        host_ids[...] = 0
        for place, row in zip(host_ids, rows, strict=True):
            place[: len(row)] = row
        self._memory.upload(ids, host_ids, stream=stream)
        self._write_last([max(len(row) - 1, 0) for row in rows], stream)

    def _write_last(self, last: list[int], stream: Any) -> None:
        if last != self._last:
            self._last = []
            self._host_last[: len(last), 0] = last
            self._memory.upload(self.last_token_ids[: len(last)], self._host_last[: len(last)], stream=stream)
            self._last = last

    def write_start_index(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Upload the lengths of a run of slots that does not start at 0. Does not wait."""
        self._host_start[: len(lengths)] = lengths
        self._memory.upload(self.start_index[: len(lengths)], self._host_start[: len(lengths)], stream=stream)

    def read_logits(self, count: int, *, stream: Any) -> np.ndarray[Any, Any]:
        """Return the logits of the first ``count`` slots of the enqueue, ``[count, vocab]`` in the engine's dtype.

        Waits for ``stream``. The array is overwritten by the next call.
        """
        views = self._logits_views.get(count)
        if views is None:
            views = self._logits_views[count] = (self.logits[:count], self._host_logits[:count])
        self._memory.download(views[1], views[0], stream=stream)
        self._memory.synchronize(stream)
        return views[1]

    def _ids_of(self, count: int, width: int) -> _Twins:
        views = self._ids_views.get((count, width))
        if views is None:
            size = count * width
            views = (self.input_ids[:size].reshape(count, width), self._host_ids[:size].reshape(count, width))
            self._ids_views[count, width] = views
        return views

    def close(self) -> None:
        """Release the tensors. Idempotent."""
        while self._allocations:
            self._allocations.pop().close()
