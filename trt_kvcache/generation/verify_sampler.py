"""``VerifySampler``: choose a token at each position of verified drafts on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.generation.device_sampler import DeviceSampler, Positions, SampledToken, SampledTokens
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class SampledPositions:
    """Choices at the positions of requests, in flight to the host."""

    def __init__(self, sampled: SampledTokens, requests: Sequence[Positions | None], width: int) -> None:
        self._sampled, self._requests, self._width = sampled, requests, width

    def read(self) -> list[Sequence[SampledToken]]:
        """Wait for them alone, and return those of each request."""
        found, starts = self._sampled.read(), range(0, len(self._requests) * self._width, self._width)
        return [() if one is None else found[first : first + len(one.offsets)] for first, one in zip(starts, self._requests, strict=True)]


class VerifySampler(Uncopyable):
    """A :class:`DeviceSampler` whose slots are positions: each has the random number of its position, so all are chosen at once.

    Penalties count the tokens before a position, so requests that have any are not for it.
    """

    def __init__(self, memory: Memory, *, max_rows: int, vocab_size: int, stream: Any) -> None:
        self.max_rows = max_rows
        self._sampler = DeviceSampler(memory, max_batch_size=max_rows, vocab_size=vocab_size, stream=stream)
        allocation = memory.allocate(dense_nbytes((max_rows,), "int32"), stream=stream)
        self._tokens = DeviceTensor(allocation, shape=(max_rows,), dtype="int32")  # the results have them too

    @property
    def params(self) -> DeviceTensor:
        """``ROW_PARAMS`` of the rows, for :meth:`choose_from_device`."""
        return self._sampler.params

    @property
    def results(self) -> DeviceTensor:
        """``ROW_RESULT`` of the rows, on the device."""
        return self._sampler.results

    def choose(self, logits: DeviceTensor, requests: Sequence[Positions | None], width: int, *, stream: Any) -> SampledPositions:
        """Choose at the positions of each request, from float32 ``logits [requests * width, vocab]``. Does not wait."""
        self._sampler.set_positions(requests, width, stream=stream)
        return self._choose(logits, requests, width, stream)

    def choose_from_device(
        self, logits: DeviceTensor, requests: Sequence[Positions | None], width: int, *, stream: Any
    ) -> SampledPositions:
        """Choose as :meth:`choose` does, with rows and counters that a kernel has written into :attr:`params`."""
        self._sampler.expect_positions(requests, width)
        return self._choose(logits, requests, width, stream)

    def _choose(self, logits: DeviceTensor, requests: Sequence[Positions | None], width: int, stream: Any) -> SampledPositions:
        self._sampler.sample(logits, self._tokens[: len(logits)], stream=stream)
        return SampledPositions(self._sampler.download(len(logits), stream=stream), requests, width)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._sampler.close()
        self._tokens.allocation.close()
