"""``DraftSampler``: choose the tokens of drafts on the device, one position of all drafts after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import CudaError
from trt_kvcache.generation.device_sampler import DeviceSampler, Positions
from trt_kvcache.kernels.sampling_rows import NO_ERROR, ROW_RESULT
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class SampledDrafts:
    """Tokens of drafts, in flight to the host."""

    def __init__(self, results: Any, done: Any) -> None:
        self._results, self._done = results, done

    def read(self, slot: int, count: int) -> list[int]:
        """Wait for the drafts, and return the first tokens of one, up to its first error. Raises CudaError."""
        if self._done is not None:
            try:
                self._done.sync()
            except cuda_core_error() as error:
                raise CudaError(f"the tokens of a draft could not be read: {error}") from None
        found = self._results[:count, slot]
        errors = (found["error"] != NO_ERROR).nonzero()[0]
        return [int(token) for token in found["token"][: errors[0] if errors.size else count]]


class DraftSampler(Uncopyable):
    """A :class:`DeviceSampler` that keeps the tokens of up to ``max_tokens`` positions on the device.

    A draft is :meth:`begin` or :meth:`continue_on_device`, :meth:`sample` for each position, then :meth:`download`.
    """

    # There are two pages, so a download overwrites the result of the one before the last.

    def __init__(self, memory: Memory, *, max_batch_size: int, vocab_size: int, max_tokens: int, stream: Any) -> None:
        self._memory, self._slots = memory, max_batch_size
        self._sampler = DeviceSampler(memory, max_batch_size=max_batch_size, vocab_size=vocab_size, stream=stream)
        shape = (max_tokens * max_batch_size, ROW_RESULT.itemsize)
        self._allocation = memory.allocate(dense_nbytes(shape, "uint8"), zeroed=True, stream=stream)
        self._rows = DeviceTensor(self._allocation, shape=shape, dtype="uint8")
        #: ``ROW_RESULT`` of each position and slot, uint8 ``[max_tokens, B, 16]``.
        self.table = self._rows.reshape(max_tokens, *self._sampler.results.shape)
        self._pages = [memory.staging(self.table.shape, "uint8") for _ in range(2)]
        self._position = 0

    @property
    def params(self) -> DeviceTensor:
        """``ROW_PARAMS`` of the slots, for :meth:`continue_on_device`."""
        return self._sampler.params

    def begin(self, requests: Sequence[Positions | None], *, stream: Any) -> None:
        """Begin drafts of the first slots, at one position each. No log-probabilities are computed."""
        self._sampler.set_positions([None if one is None else one._replace(logprobs=None) for one in requests], 1, stream=stream)
        self._position = 0

    def continue_on_device(self) -> None:
        """Begin drafts of the same slots again, whose parameters a kernel has written into :attr:`params`."""
        self._position = 0

    def sample(self, logits: DeviceTensor, tokens: DeviceTensor, *, stream: Any) -> None:
        """Choose the next token of each draft, as :meth:`DeviceSampler.sample` does, and keep it. The next call has the next position."""
        self._sampler.sample(logits, tokens, stream=stream)
        count = len(logits)
        self._memory.copy_rows(self._rows, self._sampler.results, [(self._position * self._slots, 0, count)], stream=stream)
        self._position += 1

    def download(self, *, stream: Any) -> SampledDrafts:
        """Copy the tokens so far to pinned memory, stream-ordered."""
        page, self._pages = self._pages[0][: self._position], self._pages[::-1]
        self._memory.download(page, self.table[: self._position], stream=stream)
        done = None if self._memory.is_host else stream.record()
        return SampledDrafts(page.view(ROW_RESULT)[:, :, 0], done)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._sampler.close()
        self._allocation.close()
