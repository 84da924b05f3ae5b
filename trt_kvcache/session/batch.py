"""``ActiveSequences``: the tokens of the active slots, which change together with the cache or not at all."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import RangeError
from trt_kvcache.sequences.prompt_cache import PromptCache, PromptMatch
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.statistics import SessionStatistics
from trt_kvcache.session.step_executor import StepExecutor


class ActiveSequences:
    """What each active slot holds, and the steps that add to it.

    If a step raises or is interrupted, lengths and tokens are as before it. Arguments were checked by the caller.

    ``prompt_cache``: Over the same cache.
    """

    def __init__(self, steps: StepExecutor, prompt_cache: PromptCache) -> None:
        self._steps = steps
        self._prompt_cache = prompt_cache
        self._cache = steps.cache
        self._bytes_per_token = estimate_memory(steps.cache.kv_config).bytes_per_token
        self._prefill_seconds = self._decode_seconds = 0.0
        self._prefill_tokens = self._reused_tokens = self._decode_steps = self._decode_tokens = 0
        #: Tokens in the cache, per slot.
        self.cached: list[list[int]] = []
        #: Tokens at the start of each slot that were there already when its sequence began.
        self.reused: list[int] = []
        #: Seed and counter of each slot's sampler; None where tokens were not chosen here.
        self.samplers: list[tuple[int, int] | None] = []
        #: Tokens that were generated but are not in the cache yet, per slot.
        self.pending: list[list[int]] = []
        #: Grows with every change, so that an iterator knows when it was overtaken.
        self.changes = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in the cache, per slot, as the cache says."""
        return self._cache.host_kv_cache_lengths

    @property
    def max_sequence_length(self) -> int:
        """Tokens a slot can hold, S."""
        return self._cache.kv_config.max_sequence_length

    def check_lengths(self) -> None:
        """Raise :class:`RangeError` if the lengths of the cache were changed by somebody else."""
        known = tuple(map(len, self.cached))
        if known != self.lengths:
            raise RangeError(
                f"cache lengths: expected {known}, the tokens that this session has run, got {self.lengths}. "
                "Change them through the session (rewind, append), or start anew with prefill."
            )

    def is_full(self, slot: int) -> bool:
        """Tell whether a slot can take no further token."""
        return len(self.cached[slot]) >= self.max_sequence_length

    @property
    def statistics(self) -> SessionStatistics:
        """Times, tokens and bytes so far."""
        return SessionStatistics(
            prefill_seconds=self._prefill_seconds,
            prefill_tokens=self._prefill_tokens,
            reused_tokens=self._reused_tokens,
            decode_seconds=self._decode_seconds,
            decode_steps=self._decode_steps,
            decode_tokens=self._decode_tokens,
            cache_bytes_live=0 if self._cache.closed else sum(self._cache.lengths.upper_bounds) * self._bytes_per_token,
            cache_bytes_reserved=self._cache.nbytes,
        )

    def start(self, reused: Sequence[int]) -> None:
        """Begin new sequences that keep the first ``reused`` tokens of what their slots hold."""
        with self.all_or_nothing():
            held = self.cached
            self._cache.reset_for_new_sequences(reused, stream=self._steps.stream)
            self.cached = [held[slot][:count] if count else [] for slot, count in enumerate(reused)]
            self.pending = [[] for _ in reused]
            self.reused = list(reused)
            self.samplers = [None] * len(reused)
            self._reused_tokens += sum(reused)

    def find(self, tokens: Sequence[int]) -> PromptMatch | None:
        """Return what the prompt cache has of a prompt."""
        return self._prompt_cache.find(tokens)

    def restore(self, matches: Mapping[int, PromptMatch]) -> None:
        """Copy what was found into active slots, by slot, over the tokens of it that they may hold."""
        if not matches:
            return
        with self.all_or_nothing():
            increments = [0] * len(self.cached)
            for slot, match in matches.items():
                increments[slot] = match.length - len(self.cached[slot])
                self._prompt_cache.restore(match, slot, stream=self._steps.stream)
            self._cache.commit_sequence_length(increments, stream=self._steps.stream)
            for slot, match in matches.items():
                self.cached[slot] += match.entry.tokens[len(self.cached[slot]) : match.length].tolist()
                self.reused[slot] = match.length
            self._reused_tokens += sum(increments)

    def remember(self, slots: Iterable[int]) -> None:
        """Give what slots hold to the prompt cache."""
        if self._prompt_cache.max_bytes:
            for slot in slots:
                self._prompt_cache.insert(self.cached[slot], slot, stream=self._steps.stream)

    def load(self, snapshots: Sequence[Snapshot]) -> None:
        """Begin new sequences, one from each snapshot. They were checked to fit."""
        self.start([0] * len(snapshots))
        with self.all_or_nothing():
            for slot, snapshot in enumerate(snapshots):
                snapshot.contents.restore(self._cache, slot, len(snapshot.tokens), stream=self._steps.stream)
            self._cache.commit_sequence_length([len(snapshot.tokens) for snapshot in snapshots], stream=self._steps.stream)
            self.cached = [list(snapshot.tokens) for snapshot in snapshots]
            self.pending = [list(snapshot.pending) for snapshot in snapshots]
            self.reused = [len(snapshot.tokens) for snapshot in snapshots]
            self.samplers = [None if one.sampler is None else (one.sampler.seed, one.sampler.counter) for one in snapshots]

    def add(self, count: int) -> None:
        """Make ``count`` more slots active, behind the others and empty."""
        with self.all_or_nothing():
            self._cache.set_active_batch_size(len(self.cached) + count, stream=self._steps.stream)
            self.cached += [[] for _ in range(count)]
            self.pending += [[] for _ in range(count)]
            self.reused += [0] * count
            self.samplers += [None] * count

    def compact(self, mapping: Sequence[int]) -> None:
        """Drop and move slots: to the new slot of each, or -1. A dropped slot that another moves to cannot be brought back."""
        kept = sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)
        with self.all_or_nothing():
            self._cache.compact_batch(mapping, len(mapping), len(kept), stream=self._steps.stream)
            self.cached = [self.cached[slot] for _, slot in kept]
            self.pending = [self.pending[slot] for _, slot in kept]
            self.reused = [self.reused[slot] for _, slot in kept]
            self.samplers = [self.samplers[slot] for _, slot in kept]

    def rewind(self, slot: int, length: int) -> None:
        """Shorten a slot to ``length`` tokens and drop its pending ones."""
        with self.all_or_nothing():
            self._rewind(slot, length, pending=[])

    def prefill(self, rows: Sequence[Sequence[int]], chunks: Sequence[Chunk]) -> np.ndarray[Any, Any]:
        """Enqueue new tokens in chunks, each a step of its own.

        ``rows``: sequence of sequences of int (A,). All that the chunks take, per slot.
        ``chunks``: sequence of Chunk.

        Returns
        -------
        ndarray float32 ``[A, vocab]``
            Of each slot from the chunk in which its tokens end; NaN for a slot without.
        """
        started = time.perf_counter()
        logits = np.full((len(rows), self._steps.plan.vocab_size), np.nan, np.float32)
        done = [0] * len(rows)
        for chunk in chunks:
            slots = range(chunk.first, chunk.end)
            parts = [rows[slot][done[slot] : done[slot] + take] for slot, take in zip(slots, chunk.takes, strict=True)]
            chunk_logits = self._prefill_chunk(chunk, parts)
            for place, (slot, take) in enumerate(zip(slots, chunk.takes, strict=True)):
                done[slot] += take
                if take and done[slot] == len(rows[slot]):
                    logits[slot] = chunk_logits[place]
        self._prefill_seconds += time.perf_counter() - started
        return logits

    def append(self, rows: Sequence[Sequence[int]], chunks: Sequence[Chunk]) -> np.ndarray[Any, Any]:
        """Do the same as :meth:`prefill`, undone as a whole if a chunk fails."""
        with self.all_or_nothing():
            return self.prefill(rows, chunks)

    def decode(self, tokens: Sequence[int], going: Sequence[bool] | None = None) -> np.ndarray[Any, Any]:
        """Run one step and return its logits, float32 ``[A, vocab]``, which the next step overwrites.

        ``tokens``: sequence of int (A,).
        ``going``: sequence of bool (A,), optional. Which slots do not ride along; all if left out.
        """
        started = time.perf_counter()
        with self.all_or_nothing():
            if going is None:
                self._steps.decode(tokens)
                for held, token in zip(self.cached, tokens, strict=True):
                    held.append(token)
                self.pending = [[] for _ in tokens]
            else:
                self._make_room_for_riders(going)
                self._steps.decode(tokens, [int(goes) for goes in going])
                for slot in itertools.compress(range(len(tokens)), going):
                    self.cached[slot].append(tokens[slot])
                    self.pending[slot] = []
            logits = self._steps.logits(len(tokens))
            self._decode_steps += 1
            self._decode_tokens += len(tokens) if going is None else sum(going)
            self._decode_seconds += time.perf_counter() - started
        return logits

    def _prefill_chunk(self, chunk: Chunk, parts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        with self.all_or_nothing():
            self._steps.prefill(chunk, parts)
            for slot, part in enumerate(parts, start=chunk.first):
                if part:
                    self.cached[slot] += part
                    self.pending[slot] = []
            logits = self._steps.logits(chunk.count)
            self._prefill_tokens += sum(chunk.takes)
        return logits

    def _make_room_for_riders(self, going: Sequence[bool]) -> None:
        """Take the last token of a full sequence that has ended out of the cache, so that an enqueue may write a row there."""
        last = self.max_sequence_length - 1
        for slot, goes in enumerate(going):
            if not goes and self.is_full(slot):
                self._rewind(slot, last, pending=self.cached[slot][last:] + self.pending[slot])

    def _rewind(self, slot: int, length: int, *, pending: list[int]) -> None:
        self._cache.rewind(slot, length, stream=self._steps.stream)
        self.cached[slot] = self.cached[slot][:length]
        self.pending[slot] = pending

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Put lengths and tokens back if the block raises. Inside it, tokens are only ever added to the lists that are there."""
        lengths, cached, pending = self.lengths, list(self.cached), list(self.pending)
        reused, samplers = list(self.reused), list(self.samplers)
        self.changes += 1
        try:
            yield
        except BaseException:
            self.cached, self.pending, self.reused, self.samplers = cached, pending, reused, samplers
            for held, length in zip(cached, lengths, strict=True):
                del held[length:]
            if not self._cache.closed:
                self._cache.reset_for_new_sequences(lengths, stream=self._steps.stream)
            raise
