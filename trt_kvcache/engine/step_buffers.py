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
    """Device tensors for the inputs of a step that are not caches, and for ``logits``, each with a host buffer.

    The host buffers are page-locked if the memory is that of a GPU. A host buffer must not be written before the copy that reads it is
    done; callers therefore wait once per step, in :meth:`read_logits`.

    Parameters
    ----------
    memory : Memory
        Where the engine runs.
    max_batch_size, max_width : int
        Slots, and new tokens per slot, of the largest enqueue.
    vocab_size : int
        Width of the logits.
    index_dtypes : tuple of str
        Dtypes of ``input_ids`` and ``last_token_ids``: ``"int32"`` or ``"int64"``.
    logits_dtype : str
        Dtype of the logits.
    max_logits_per_slot : int
        Most new tokens per slot whose logits one enqueue returns.
    has_states : bool
        Whether the engine has states, and so takes the number of new tokens of each slot.

    Attributes
    ----------
    input_ids : DeviceTensor (max_batch_size * max_width,)
    last_token_ids : DeviceTensor (max_batch_size, max_logits_per_slot)
    start_index : DeviceTensor (max_batch_size,) int32
    new_lengths : DeviceTensor (max_batch_size,) int32, or None
        None for an engine without states.
    logits : DeviceTensor (max_batch_size * max_logits_per_slot, vocab_size)

    Raises
    ------
    CapacityError
        The memory could not be allocated.

    Examples
    --------
    >>> from trt_kvcache import HostMemory
    >>> memory = HostMemory()
    >>> buffers = StepBuffers(
    ...     memory, max_batch_size=2, max_width=4, vocab_size=8, index_dtypes=("int32", "int32"), logits_dtype="float32"
    ... )
    >>> buffers.write_rows([[5, 6, 7], [8]], width=3, stream=memory.create_stream())
    >>> buffers.input_ids[:6].numpy().tolist(), buffers.last_token_ids.numpy().tolist()
    ([5, 6, 7, 8, 0, 0], [[2], [0]])
    """

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
            self._host_last = memory.staging(self._last_tokens.shape, index_dtypes[1])
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
        """Upload one new token per slot: the inputs of a decode step.

        Parameters
        ----------
        tokens : sequence of int
            One for each slot of the enqueue.
        stream : cuda.core.Stream
            The copies are ordered on it; the call does not wait.
        """
        ids, host_ids = self._ids_of(len(tokens), 1)
        host_ids[:, 0] = tokens
        self._memory.upload(ids, host_ids, stream=stream)
        self._write_last([0] * len(tokens), stream)

    def write_rows(self, rows: Sequence[Sequence[int]], width: int, *, stream: Any, every_logit: bool = False) -> None:
        """Upload the new tokens of each slot, right-padded with 0.

        Parameters
        ----------
        rows : sequence of sequences of int
            The new tokens of each slot of the enqueue; a row may be empty.
        width : int
            Tokens per slot after padding.
        stream : cuda.core.Stream
            The copies are ordered on it; the call does not wait.
        every_logit : bool
            Whether the logits of all ``width`` tokens are wanted, those of padding included, instead of the last of each slot.
        """
        ids, host_ids = self._ids_of(len(rows), width)
        host_ids[...] = 0
        for padded, row in zip(host_ids, rows, strict=True):
            padded[: len(row)] = row
        self._memory.upload(ids, host_ids, stream=stream)
        self._write_last([*range(width)] * len(rows) if every_logit else [max(len(row) - 1, 0) for row in rows], stream)

    def _write_last(self, last: list[int], stream: Any) -> None:
        """Upload the indices of the tokens whose logits are wanted, slot by slot, unless they are those of the step before."""
        if last != self._last:
            self._last = []
            self._host_last[: len(last)] = last
            self._memory.upload(self._last_tokens[: len(last)], self._host_last[: len(last)], stream=stream)
            self._last = last

    def write_start_index(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Upload the lengths of slots that do not start at slot 0; the others are read where the cache has them.

        Parameters
        ----------
        lengths : sequence of int
            Committed tokens of each slot of the enqueue.
        stream : cuda.core.Stream
            The copy is ordered on it; the call does not wait.
        """
        self._host_start[: len(lengths)] = lengths
        self._memory.upload(self.start_index[: len(lengths)], self._host_start[: len(lengths)], stream=stream)

    def write_new_lengths(self, new_lengths: Sequence[int], *, stream: Any) -> None:
        """Upload the number of new tokens of each slot, unless they are those of the step before.

        Parameters
        ----------
        new_lengths : sequence of int
            For each slot of the enqueue, without padding.
        stream : cuda.core.Stream
            The copy is ordered on it; the call does not wait.
        """
        assert self.new_lengths is not None
        assert self._host_new is not None
        new = list(new_lengths)
        if new != self._new:
            self._new = []
            self._host_new[: len(new)] = new
            self._memory.upload(self.new_lengths[: len(new)], self._host_new[: len(new)], stream=stream)
            self._new = new

    def read_logits(self, count: int, *, stream: Any) -> np.ndarray[Any, Any]:
        """Download logits. Waits for ``stream``.

        Parameters
        ----------
        count : int
            Slots of the enqueue, times the number of tokens per slot whose logits were wanted.
        stream : cuda.core.Stream
            The stream of the enqueue.

        Returns
        -------
        ndarray (count, vocab_size)
            Slot by slot. In the engine's dtype, in a host buffer that the next call overwrites.
        """
        views = self._logits_views.get(count)
        if views is None:
            views = self._logits_views[count] = (self.logits[:count], self._host_logits[:count])
        self._memory.download(views[1], views[0], stream=stream)
        self._memory.synchronize(stream)
        return views[1]

    def device_views(self, count: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return the ids and the logits of an enqueue of one token for each of ``count`` slots, where the engine has them.

        Parameters
        ----------
        count : int
            Slots of the enqueue.

        Returns
        -------
        DeviceTensor (count,)
            Of :attr:`input_ids`.
        DeviceTensor (count, vocab_size)
            Of :attr:`logits`.
        """
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
