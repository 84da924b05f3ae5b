"""``VerifySampler``: choose a token at each position of verified drafts on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.generation.device_sampler import DeviceSampler, Positions, SampledToken
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class VerifySampler(Uncopyable):
    """A :class:`DeviceSampler` whose slots are positions: each has the random number of its position, so all are chosen at once.

    Penalties count the tokens before a position, so requests that have any are not for it.
    """

    def __init__(self, memory: Memory, *, max_rows: int, vocab_size: int, stream: Any) -> None:
        self.max_rows = max_rows
        self._sampler = DeviceSampler(memory, max_batch_size=max_rows, vocab_size=vocab_size, stream=stream)
        allocation = memory.allocate(dense_nbytes((max_rows,), "int32"), stream=stream)
        self._tokens = DeviceTensor(allocation, shape=(max_rows,), dtype="int32")  # the results have them too

    def choose(
        self, logits: DeviceTensor, requests: Sequence[Positions | None], width: int, *, stream: Any
    ) -> list[Sequence[SampledToken]]:
        """Return the choices at the positions of each request, from float32 ``logits [requests * width, vocab]``. Waits for them."""
        self._sampler.set_positions(requests, width, stream=stream)
        self._sampler.sample(logits, self._tokens[: len(logits)], stream=stream)
        found = self._sampler.download(len(logits), stream=stream).read()
        starts = range(0, len(logits), width)
        return [() if one is None else found[first : first + len(one.offsets)] for first, one in zip(starts, requests, strict=True)]

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._sampler.close()
        self._tokens.allocation.close()
