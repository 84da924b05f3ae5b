"""``DeviceSampler``: sampling on the device for all slots of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import ConfigError, CudaError, KVCacheError, RangeError, ShapeError
from trt_kvcache.generation.sampling import SamplingParams, bad_logits, no_token_left
from trt_kvcache.generation.token_logprobs import TokenLogprobs
from trt_kvcache.kernels import AnyCompactionPlan, SamplingRows, SamplingWorkspace, StateInfos
from trt_kvcache.kernels.sampling_kernels import (
    choose_tokens_kernel,
    count_tokens_kernel,
    set_bias_kernel,
    set_row_kernel,
    token_logprobs_kernel,
)
from trt_kvcache.kernels.sampling_rows import ACTIVE, BAD_LOGITS, BIASED, GREEDY, LOGPROBS, NO_ERROR, PENALISED, ROW_PARAMS, ROW_RESULT
from trt_kvcache.kernels.sampling_workspace import MAX_TOP_LOGPROBS, MAX_VOCAB_SIZE
from trt_kvcache.kernels.state_row_kernels import compact_rows_kernel
from trt_kvcache.kernels.token_choice import choice_params
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Token ids for penalty counts.
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

#: Limit of seeds and counters.
_LARGEST_NUMBER = 2**64 - 1


@dataclass(frozen=True)
class SampledToken:
    """Choice of one slot. Token -1: the slot is inactive, or ``error`` is the error that ``Request.choose`` would raise."""

    token: int
    error: KVCacheError | None = None
    logprobs: TokenLogprobs | None = None


class Positions(NamedTuple):
    """Positions of one request, at which tokens are chosen at once."""

    #: ``ROW_PARAMS`` of the request. No penalties, which count the tokens before a position, and no bias.
    row: Any
    #: Counter of its next token.
    counter: int
    #: Most likely tokens to report at each; None for no log-probabilities.
    logprobs: int | None
    #: Tokens between the next one and each position.
    offsets: Sequence[int]


class SampledTokens:
    """Tokens of one step, in flight to the host: see :meth:`DeviceSampler.download`."""

    def __init__(self, results: Any, logprobs: Any, tops: Sequence[int | None], done: Any) -> None:
        self._results, self._logprobs, self._tops, self._done = results, logprobs, tops, done

    def read(self) -> list[SampledToken]:
        """Wait for this step alone, and return its tokens, one for each slot. Raises CudaError."""
        if self._done is not None:
            try:
                self._done.sync()
            except cuda_core_error() as error:
                raise CudaError(f"the tokens of a step could not be read: {error}") from None
        return [self._token(slot, top, result) for slot, (top, result) in enumerate(zip(self._tops, self._results.tolist(), strict=True))]

    def _token(self, slot: int, top: int | None, result: tuple[int, int, int, float]) -> SampledToken:
        if top is None:
            return SampledToken(-1)
        token, error, place, logit = result
        if error != NO_ERROR:
            return SampledToken(-1, bad_logits(logit, place) if error == BAD_LOGITS else no_token_left(logit))
        if top < 0 or self._logprobs is None:
            return SampledToken(token)
        ids, values = self._logprobs[slot, 1:].reshape(2, -1)[:, :top]
        top_values = values.view(np.float32).tolist()
        chosen = float(self._logprobs[slot, :1].view(np.float32)[0])
        return SampledToken(token, None, TokenLogprobs(chosen, tuple(zip(ids.tolist(), top_values, strict=True))))


class DeviceSampler(Uncopyable):
    """Sampling parameters, penalty counts and bias of all slots in device memory; it chooses the tokens of ``Request.choose``.

    A step is :meth:`sample`, :meth:`download`, then :meth:`SampledTokens.read`, while ``pages - 1`` steps after it may run.
    """

    def __init__(self, memory: Memory, *, max_batch_size: int, vocab_size: int, pages: int = 2, stream: Any) -> None:
        int_in_range("max_batch_size", max_batch_size, 1)
        self._memory, self._vocab_size = memory, vocab_size
        self._workspace = SamplingWorkspace(memory, rows=max_batch_size, vocab_size=vocab_size, edits=False, stream=stream)
        words = 1 + 2 * MAX_TOP_LOGPROBS
        params, results, logprobs = (
            self._allocate((max_batch_size, width), dtype, stream)
            for width, dtype in ((ROW_PARAMS.itemsize, "uint8"), (ROW_RESULT.itemsize, "uint8"), (words, "int32"))
        )
        self._rows = SamplingRows(params, results)
        self._logprobs = logprobs
        self._infos = StateInfos([params], stream=stream)
        self._pages = [
            (memory.staging((max_batch_size, ROW_RESULT.itemsize), "uint8"), memory.staging((max_batch_size, words), "int32"))
            for _ in range(pages)
        ]
        self._page = 0
        self._position_page: Any = None
        # For each slot the number of most likely tokens to report: -1 for none at all, None if it is not active.
        self._tops: list[int | None] = [None] * max_batch_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids that it chooses from."""
        return self._vocab_size

    @property
    def params(self) -> DeviceTensor:
        """``ROW_PARAMS`` of the slots, uint8 ``[B, 64]``, which a kernel may write instead of :meth:`set_positions`."""
        return self._rows.params

    @property
    def results(self) -> DeviceTensor:
        """``ROW_RESULT`` of the last :meth:`sample`, uint8 ``[B, 16]``."""
        return self._rows.results

    @staticmethod
    def check(params: SamplingParams) -> None:
        """Raise ConfigError if a request has ``logits_processors`` (Python functions) or too many ``logprobs`` for the device."""
        if params.logits_processors:
            raise ConfigError("sampling on the device: expected no logits_processors, got some. They are called on the host.")
        if (params.logprobs or 0) > MAX_TOP_LOGPROBS:
            raise ConfigError(f"sampling on the device: expected at most {MAX_TOP_LOGPROBS} logprobs, got {params.logprobs}.")

    @classmethod
    def accepts(cls, params: SamplingParams) -> bool:
        """Return True if :meth:`check` raises nothing."""
        return not params.logits_processors and (params.logprobs or 0) <= MAX_TOP_LOGPROBS

    @property
    def graph_key(self) -> tuple[bool, ...]:
        """Key of a captured :meth:`sample`, besides its arguments: capture again when it has changed."""
        return self._rows.uses is not None, self._rows.bias is not None, self._wants_logprobs

    @property
    def _wants_logprobs(self) -> bool:
        return any(top is not None and top >= 0 for top in self._tops)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        counter: int,
        prompt: Tokens = (),
        generated: Tokens = (),
        stream: Any,
    ) -> None:
        """Begin or continue a request in a slot, stream-ordered. May allocate; after an error nothing has changed.

        ``prompt``: its different tokens; ``generated``: its tokens in any order. ``seed`` and ``counter`` replace the fields of ``params``.
        """
        index = slot_index(slot, len(self._tops))
        self.check(params)
        params.check_vocabulary(self._vocab_size)
        used = [self._token_ids(name, tokens) for name, tokens in (("prompt", prompt), ("generated", generated))]
        row = sampling_row(params, seed, counter)
        flags = int(row["flags"])
        self._make_room(flags, stream)
        if flags & PENALISED:
            assert self._rows.uses is not None
            uses = self._row(self._rows.uses, index)
            self._memory.zero(uses, stream=stream)
            for tokens, in_prompt in zip(used, (True, False), strict=True):
                self._count(uses, tokens, in_prompt, stream)
        if flags & BIASED:
            assert self._rows.bias is not None
            bias = self._row(self._rows.bias, index)
            self._memory.zero(bias, stream=stream)
            ids = self._memory.to_device(np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias)), stream=stream)
            values = self._memory.to_device(np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)), stream=stream)
            set_bias_kernel(bias, ids, values, stream)
        self._set_row(index, row, stream)
        self._tops[index] = -1 if params.logprobs is None else params.logprobs

    def set_positions(self, requests: Sequence[Positions | None], width: int, *, stream: Any) -> None:
        """Have slot ``i * width + p`` choose at position p of request i, stream-ordered; the slots past its positions are idle.

        The tokens of the last positions must have been read: the parameters are in one page of pinned memory.
        """
        if self._position_page is None:
            self._position_page = self._memory.staging((len(self._tops), ROW_PARAMS.itemsize), "uint8")
        page = self._position_page[: len(requests) * width]
        page[...] = 0
        rows = page.view(ROW_PARAMS)[:, 0]
        for first, one in zip(range(0, len(rows), width), requests, strict=True):
            if one is not None:
                of_one = slice(first, first + len(one.offsets))
                rows[of_one] = one.row
                rows["counter"][of_one] = np.uint64(one.counter) + np.array(one.offsets, np.uint64)
        self._memory.upload(self._rows.params[: len(rows)], page, stream=stream)
        self.expect_positions(requests, width)

    def expect_positions(self, requests: Sequence[Positions | None], width: int) -> None:
        """Take the parameters of the slots, as :meth:`set_positions` numbers them, from the device."""
        self._tops = [None] * len(self._tops)
        for first, one in zip(range(0, len(requests) * width, width), requests, strict=True):
            if one is not None:
                self._tops[first : first + len(one.offsets)] = [-1 if one.logprobs is None else one.logprobs] * len(one.offsets)

    def clear_slot(self, slot: int, *, stream: Any) -> None:
        """Make a slot idle until :meth:`set_slot`, stream-ordered."""
        index = slot_index(slot, len(self._tops))
        set_row_kernel(self._rows, index, [0] * (ROW_PARAMS.itemsize // 8), stream)
        self._tops[index] = None

    def compact(self, moves: AnyCompactionPlan, mapping: Sequence[int], *, stream: Any) -> None:
        """Move the kept slots by the plan and the mapping of the cache's compaction, stream-ordered. The other slots become idle."""
        compact_rows_kernel(self._infos, moves, stream)
        tops = list(self._tops)
        kept = {new for new in mapping if new >= 0}
        for old, new in enumerate(mapping):
            if new >= 0:
                self._tops[new] = tops[old]
        for slot in range(len(mapping)):
            if slot not in kept:
                self.clear_slot(slot, stream=stream)

    def sample(self, logits: DeviceTensor, tokens: DeviceTensor, *, stream: Any) -> None:
        """Choose the next token of each active slot from float32 ``logits [B, vocab]``, and count it. Neither waits nor allocates.

        ``tokens`` int32 ``[B]``, such as the next input_ids: 0 for a slot with an error; unchanged for an idle slot.
        """
        batch, rows = len(logits), self._rows
        if batch > len(self._tops) or logits.shape[1:] != (self._vocab_size,):
            raise ShapeError(f"logits: expected [B, {self._vocab_size}] with B up to {len(self._tops)}, got {list(logits.shape)}.")
        if batch != len(self._tops):
            uses, bias = (None if tensor is None else tensor[:batch] for tensor in (rows.uses, rows.bias))
            rows = SamplingRows(rows.params[:batch], rows.results[:batch], uses, bias)
        choose_tokens_kernel(logits, rows, tokens, self._workspace, stream)
        if self._wants_logprobs:
            token_logprobs_kernel(logits, rows, self._logprobs[:batch], self._workspace, stream)

    def download(self, batch: int, *, stream: Any) -> SampledTokens:
        """Copy the tokens of the last :meth:`sample`, which may have been a graph replay, to pinned memory, stream-ordered.

        The result must be read before a later call overwrites its page: the second next one, or that after ``pages``.
        """
        int_in_range("batch", batch, 1, len(self._tops))
        results, logprobs = (page[:batch] for page in self._pages[self._page])
        self._page = (self._page + 1) % len(self._pages)
        self._memory.download(results, self._rows.results[:batch], stream=stream)
        wanted = self._wants_logprobs
        if wanted:
            self._memory.download(logprobs, self._logprobs[:batch], stream=stream)
        done = None if self._memory.is_host else stream.record()
        return SampledTokens(results.view(ROW_RESULT)[:, 0], logprobs if wanted else None, self._tops[:batch], done)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._workspace.close()
        self._infos.close()
        for tensor in (self._rows.params, self._rows.results, self._rows.uses, self._rows.bias, self._logprobs):
            if tensor is not None:
                tensor.allocation.close()

    def _allocate(self, shape: tuple[int, ...], dtype: str, stream: Any) -> DeviceTensor:
        return DeviceTensor(self._memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream), shape=shape, dtype=dtype)

    def _make_room(self, flags: int, stream: Any) -> None:
        """Allocate counts and bias at their first use: ``max_batch_size * vocab_size * 4`` bytes each."""
        rows, shape = self._rows, (len(self._tops), self._vocab_size)
        uses = self._allocate(shape, "int32", stream) if flags & PENALISED and rows.uses is None else rows.uses
        bias = self._allocate(shape, "float32", stream) if flags & BIASED and rows.bias is None else rows.bias
        if uses is not rows.uses or bias is not rows.bias:
            self._workspace.make_room_for_edits(stream=stream)
            infos = StateInfos([tensor for tensor in (rows.params, uses, bias) if tensor is not None], stream=stream)
            self._rows = SamplingRows(rows.params, rows.results, uses, bias)
            self._infos.close()
            self._infos = infos

    def _row(self, tensor: DeviceTensor, slot: int) -> DeviceTensor:
        return tensor[slot : slot + 1].reshape(self._vocab_size)

    def _token_ids(self, name: str, tokens: Tokens) -> npt.NDArray[np.int64]:
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise RangeError(f"{name}: expected token ids from 0 to {self._vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}.")
        return ids

    def _set_row(self, slot: int, row: Any, stream: Any) -> None:
        set_row_kernel(self._rows, slot, row.reshape(1).view(np.int64).tolist(), stream)

    def _count(self, uses: DeviceTensor, tokens: npt.NDArray[np.int64], in_prompt: bool, stream: Any) -> None:
        if tokens.size:
            ids = self._memory.to_device(tokens.astype(np.int32), stream=stream)
            count_tokens_kernel(uses, ids, in_prompt, 1, stream)


def sampling_row(params: SamplingParams, seed: int, counter: int) -> Any:
    """Return the parameters of a request as a ``ROW_PARAMS``."""
    row = np.zeros((), ROW_PARAMS)
    penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    asked = (
        (ACTIVE, True),
        (GREEDY, params.temperature == 0),
        (PENALISED, penalised),
        (BIASED, bool(params.logit_bias)),
        (LOGPROBS, params.logprobs is not None),
    )
    row["flags"] = sum(flag for flag, is_set in asked if is_set)
    row["seed"], row["counter"] = int_in_range("seed", seed, 0, _LARGEST_NUMBER), int_in_range("counter", counter, 0, _LARGEST_NUMBER)
    row["repetition"], row["frequency"], row["presence"] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    if params.temperature:
        numbers = choice_params(params.temperature, params.top_k, params.top_p, params.min_p)
        row["scale"], row["top_p"], row["min_weight"] = numbers.scale, numbers.top_p, numbers.min_weight
        row["top_k"] = min(numbers.top_k, MAX_VOCAB_SIZE)
    return row
