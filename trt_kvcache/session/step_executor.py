"""``StepExecutor``: one enqueue over a contiguous range of slots, then the commit of what it wrote, on one stream."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.engine.bindings import BindingPlan
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.chunks import Chunk, plan_chunks


class StepExecutor:
    """Feeds tokens to an engine and commits their lengths.

    Parameters
    ----------
    engine : Engine
        Stays its owner's to close.
    cache : KVCacheManager or LinearKVCache
        In the engine's memory and layout. Stays its owner's to close.
    names : TensorNames
        What the engine calls its tensors.

    Raises
    ------
    BindingError, LayoutError, PlaceError
        Engine and cache do not fit: see :class:`~trt_kvcache.engine.bindings.BindingPlan`.

    Notes
    -----
    Per step, on one stream: the enqueue reads the lengths, then the commit adds to them. A decode step neither allocates device memory
    nor waits, and does nothing per layer. If a step raises, what it wrote lies behind the committed lengths; the caller restores the
    lengths.
    """

    def __init__(self, engine: Engine, cache: KVCacheBase, *, names: TensorNames = DEFAULT_NAMES) -> None:
        self.engine = engine
        self.cache = cache
        self.plan = BindingPlan(engine, cache, names=names)
        self.stream = cache.memory.create_stream()
        #: Enqueues so far, failed ones included: whoever finds another number knows that rows behind the lengths may have been overwritten.
        self.enqueues = 0
        self._buffers = StepBuffers(
            cache.memory,
            max_batch_size=cache.kv_config.max_batch_size,
            max_width=self.plan.max_width,
            vocab_size=self.plan.vocab_size,
            index_dtypes=(self.plan.input_ids.dtype, self.plan.last_token_ids.dtype),
            logits_dtype=self.plan.logits.dtype,
            max_logits_per_slot=self.plan.max_logits_per_slot,
        )

    def plan_prefill(self, lengths: Sequence[int], counts: Sequence[int], *, every_logit: bool = False) -> list[Chunk]:
        """Cut new tokens into enqueues that the engine accepts.

        Parameters
        ----------
        lengths, counts : sequence of int (A,)
            Tokens that each slot holds, and new ones; ``length + count <= S``.
        every_logit : bool
            Whether the logits of all new tokens are wanted, instead of the last one of each slot.

        Returns
        -------
        list of Chunk
            To be run in this order.

        Raises
        ------
        LayoutError
            A slot cannot be reached by an aligned view.
        BindingError
            No optimisation profile covers one of the enqueues.
        """
        chunks = plan_chunks(
            lengths,
            counts,
            max_width=self.plan.max_logits_per_slot if every_logit else self.plan.max_width,
            max_sequence_length=self.cache.kv_config.max_sequence_length,
            can_start_at=self.plan.can_start_at,
        )
        for chunk in chunks:
            self.plan.profile_for(chunk.count, chunk.width, chunk.width if every_logit else 1)
        return chunks

    def check_all_batch_sizes(self) -> None:
        """Check that the engine accepts every number of slots, for a decode step and for the widest prefill.

        Raises
        ------
        BindingError
            No optimisation profile covers one of them.
        """
        for count in range(1, self.cache.max_batch_size + 1):
            for width in (1, self.plan.max_width):
                self.plan.profile_for(count, width)

    def enqueue_one_each(self, tokens: Sequence[int]) -> None:
        """Enqueue one token for every active slot; nothing is committed. Does not wait.

        Parameters
        ----------
        tokens : sequence of int (A,)
            One for each active slot.
        """
        self._buffers.write_one_token_each(tokens, stream=self.stream)
        self.enqueue_next(len(tokens))

    def enqueue_next(self, count: int) -> None:
        """Enqueue the tokens that are in :meth:`device_views`, one for every active slot; nothing is committed. Does not wait.

        Parameters
        ----------
        count : int
            Active slots; as many as in the last :meth:`enqueue_one_each`.
        """
        self.plan.prepare(0, count, 1, self._buffers)
        self._enqueue()

    def device_views(self, count: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return what an enqueue of one token for each of so many slots reads and writes on the device.

        Parameters
        ----------
        count : int
            Active slots.

        Returns
        -------
        DeviceTensor ``[count]``
            The tokens: what :meth:`enqueue_next` runs.
        DeviceTensor ``[count, vocab]``
            The logits.
        """
        return self._buffers.device_views(count)

    def _enqueue(self) -> None:
        self.enqueues += 1
        self.engine.enqueue(self.stream)

    def run(self, chunk: Chunk, rows: Sequence[Sequence[int]], *, every_logit: bool) -> None:
        """Enqueue the new tokens of a contiguous range of slots; nothing is committed. Does not wait.

        Parameters
        ----------
        chunk : Chunk
            Which slots, and how many tokens of each.
        rows : sequence of sequence of int (chunk.count,)
            The new tokens of each slot of the run, as many as ``chunk.takes`` says. They are padded here.
        every_logit : bool
            Whether the logits of all new tokens are wanted, instead of the last one of each slot.
        """
        if chunk.first:
            self._buffers.write_start_index(self.cache.host_kv_cache_lengths[chunk.first : chunk.end], stream=self.stream)
        self._buffers.write_rows(rows, chunk.width, stream=self.stream, every_logit=every_logit)
        self.plan.prepare(chunk.first, chunk.count, chunk.width, self._buffers, logits=chunk.width if every_logit else 1)
        self._enqueue()

    def prefill(self, chunk: Chunk, rows: Sequence[Sequence[int]], *, every_logit: bool = False) -> None:
        """Enqueue the new tokens of a contiguous range of slots and commit. Does not wait.

        Parameters
        ----------
        chunk : Chunk
            As for :meth:`run`.
        rows : sequence of sequence of int (chunk.count,)
            As for :meth:`run`.
        every_logit : bool
            As for :meth:`run`.
        """
        self.run(chunk, rows, every_logit=every_logit)
        after = self.cache.active_batch_size - chunk.end
        self.cache.commit_sequence_length([0] * chunk.first + [*chunk.takes] + [0] * after, stream=self.stream)

    def logits(self, count: int) -> np.ndarray[Any, Any]:
        """Wait for the last enqueue and return its logits.

        Parameters
        ----------
        count : int
            Slots of that enqueue.

        Returns
        -------
        ndarray float32 ``[count, vocab]``
            On the host. The next call overwrites it.
        """
        logits = self._buffers.read_logits(count, stream=self.stream)
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)

    def every_logit(self, chunk: Chunk) -> np.ndarray[Any, Any]:
        """Wait for the last enqueue, which was to return all logits, and return them.

        Parameters
        ----------
        chunk : Chunk
            What that enqueue has run.

        Returns
        -------
        ndarray float32 ``[chunk.count, chunk.width, vocab]``
            On the host, those of padding too. The next call overwrites it.
        """
        return self.logits(chunk.count * chunk.width).reshape(chunk.count, chunk.width, -1)

    def synchronize(self) -> None:
        """Wait until everything that was enqueued is done."""
        self.cache.memory.synchronize(self.stream)

    def close(self) -> None:
        """Release the buffers. Idempotent."""
        self._buffers.close()
