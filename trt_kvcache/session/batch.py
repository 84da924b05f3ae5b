"""``Batch``: the active slots of a session. What they hold and what the cache says change together or not at all."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import CapacityError, RangeError, ShapeError
from trt_kvcache.generation.sampling import SamplerPosition
from trt_kvcache.generation.token_ids import TokenArray, common_prefix
from trt_kvcache.sequences.prompt_cache import PromptCache, PromptMatch
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.slot_state import SlotSavepoint, SlotState
from trt_kvcache.session.statistics import SessionStatistics, StepCounters
from trt_kvcache.session.step_executor import StepExecutor

#: Token ids per slot, or per prompt.
Rows = Sequence[Sequence[int]]

Logits = np.ndarray[Any, Any]

_LOGGER = logging.getLogger("trt_kvcache.session")


class BatchSavepoint(NamedTuple):
    """What a :class:`Batch` needs to return to an earlier state."""

    slots: list[SlotState]
    states: list[SlotSavepoint]
    lengths: tuple[int, ...]
    state_changes: int


class _Verified(NamedTuple):
    """What the last :meth:`Batch.verify` has run: the rows of its slots, and ``changes`` then."""

    changes: int
    rows: list[tuple[int, ...]]


class Batch:
    """The active slots of a session, and the steps that add to them."""

    def __init__(self, steps: StepExecutor, prompt_cache: PromptCache) -> None:
        self._steps = steps
        self._cache = steps.cache
        self._prompt_cache = prompt_cache
        self._slots: list[SlotState] = []
        self._counters = StepCounters()
        kv, mamba = steps.cache.kv_config, steps.cache.mamba_config
        self._bytes_per_token = 0 if kv is None else estimate_memory(kv).bytes_per_token
        self._state_bytes = 0 if mamba is None else mamba.slot_nbytes
        #: Tokens a slot can hold, S.
        self.max_sequence_length = steps.cache.lengths.max_sequence_length
        #: Grows with every change of what the cache holds, so that an iterator notices that another call came between.
        self.changes = 0
        self._verified: _Verified | None = None

    # --- what the slots hold ---

    def __len__(self) -> int:
        """Return the number of active slots, A."""
        return len(self._slots)

    def __getitem__(self, slot: int) -> SlotState:
        """Return what an active slot holds."""
        return self._slots[slot]

    @property
    def slots(self) -> list[SlotState]:
        """What each active slot holds."""
        return list(self._slots)

    @property
    def held(self) -> list[int]:
        """Tokens that each active slot holds."""
        return [len(slot.tokens) for slot in self._slots]

    @property
    def reused(self) -> list[int]:
        """Tokens at the start of each active slot that were not run for its sequence."""
        return [slot.reused for slot in self._slots]

    def is_full(self, slot: int) -> bool:
        """Tell whether a slot can take no further token."""
        return len(self._slots[slot].tokens) >= self.max_sequence_length

    @property
    def statistics(self) -> SessionStatistics:
        """Times, tokens and bytes so far."""
        held = () if self._cache.closed else self._cache.lengths.upper_bounds
        live = sum(held) * self._bytes_per_token + len(held) * self._state_bytes
        return self._counters.statistics(cache_bytes_live=live, cache_bytes_reserved=self._cache.nbytes)

    # --- checks: nothing is changed ---

    def checked_lengths(self) -> tuple[int, ...]:
        """Return the lengths of the cache."""
        lengths = self._cache.host_kv_cache_lengths
        known = tuple(self.held)
        if known != lengths:
            raise RangeError(
                f"cache lengths: expected {known}, the tokens that this session has run, got {lengths}. "
                "Change them through the session (rewind, append), or start new sequences with prefill."
            )
        return lengths

    def check_prompts(self, prompts: Rows, *, reuse: bool = False, queued: bool = False) -> None:
        """Check that prompts can start new sequences."""
        slots = self._cache.max_batch_size
        if queued and not prompts:
            raise ShapeError("prompts: expected at least one, got none.")
        if queued and len(prompts) > slots:
            self._steps.check_all_batch_sizes()
        elif not 1 <= len(prompts) <= slots:
            raise ShapeError(f"prompts: expected 1 to max_batch_size={slots} of them, got {len(prompts)}.")
        _check_not_empty(prompts)
        self.check_room([0] * len(prompts), prompts)
        if reuse:
            self._check_one_each("prompts", len(prompts))

    def check_turns(self, turns: Rows) -> None:
        """Check that turns can follow what the active slots hold and what is pending."""
        lengths = self._check_one_each("prompts", len(turns))
        _check_not_empty(turns)
        self.check_room(lengths, self._after_pending(turns))

    def check_room(self, lengths: Sequence[int], rows: Rows) -> None:
        """Check that new tokens fit into slots of these lengths, or raise :class:`CapacityError`."""
        limit = self.max_sequence_length
        for slot, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            if length + len(row) > limit:
                adds = f"slot {slot} holds {length} tokens; adding {len(row)}" if length else f"prompt {slot} has {len(row)} tokens; that"
                raise CapacityError(f"{adds} exceeds max_sequence_length={limit}. Nothing was changed.")

    def plan_prefill(self, lengths: Sequence[int], rows: Rows, *, every_logit: bool = False) -> list[Chunk]:
        """Cut new tokens into enqueues: see :meth:`StepExecutor.plan_prefill`."""
        return self._steps.plan_prefill(lengths, [len(row) for row in rows], every_logit=every_logit)

    def _check_one_each(self, what: str, count: int) -> tuple[int, ...]:
        """Check that there is one of something for each active slot, and return the lengths."""
        lengths = self.checked_lengths()
        if count != len(lengths):
            raise ShapeError(f"{what}: expected one for each of {len(lengths)} active slots, got {count}.")
        return lengths

    def _after_pending(self, turns: Rows) -> list[list[int]]:
        """Return what must be run for each turn: pending tokens go first, and an empty turn runs nothing."""
        return [[*slot.pending, *turn] if turn else [] for slot, turn in zip(self._slots, turns, strict=True)]

    # --- savepoints ---

    def savepoint(self) -> BatchSavepoint:
        """Return the state now, for one :meth:`rollback`."""
        return self._savepoint_at(self._cache.host_kv_cache_lengths)

    def rollback(self, savepoint: BatchSavepoint) -> None:
        """Return to the state at ``savepoint``: the lengths of the cache and the slots. Nothing is run again."""
        has_states = self._steps.restore_states(savepoint.state_changes) or not any(savepoint.lengths)
        lengths = savepoint.lengths if has_states else ()
        self._slots = savepoint.slots[: len(lengths)]
        for slot, state, length in zip(self._slots, savepoint.states, lengths, strict=False):
            slot.rollback(state, length)
        if not self._cache.closed:
            self._cache.reset_for_new_sequences(lengths, stream=self._steps.stream)

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that rolls back if its block raises or is interrupted."""
        return self._rollback_to(self._savepoint_at(self.checked_lengths()))

    def _savepoint_at(self, lengths: tuple[int, ...]) -> BatchSavepoint:
        """Return the state now; ``lengths`` are those of the cache, so that they are read once."""
        return BatchSavepoint(list(self._slots), [slot.savepoint() for slot in self._slots], lengths, self._steps.state_changes)

    @contextmanager
    def _rollback_to(self, savepoint: BatchSavepoint) -> Iterator[None]:
        self.changes += 1
        try:
            yield
        except BaseException:
            self.rollback(savepoint)
            raise

    # --- which slots are active ---

    def clear(self) -> None:
        """Make no slot active."""
        self._reset([])

    def add(self, prompts: Rows, samplers: Sequence[SamplerPosition], *, anew: Sequence[bool] | None = None) -> None:
        """Make more slots active behind the others, each with what the prompt cache has of its prompt."""
        first = len(self._slots)
        sought = [()] * first + [() if new else row for row, new in zip(prompts, anew or repeat(False), strict=False)]
        with self.transaction():
            self._cache.set_active_batch_size(first + len(prompts), stream=self._steps.stream)
            self._slots += [SlotState([], sampler=sampler) for sampler in samplers]
            self._restore({slot: match for slot, row in enumerate(sought) if row and (match := self._prompt_cache.find(row))})

    def copy_tokens(self, source: int, lengths: Mapping[int, int]) -> None:
        """Copy the first tokens of a slot to others, over what these hold. Nothing is run."""
        stream, tokens = self._steps.stream, self._slots[source].tokens
        copy = SlotCopy.capture(self._cache, source, max(lengths.values()), stream=stream)
        increments = [0] * len(self._slots)
        with self.transaction():
            if any(self._slots[slot].tokens for slot in lengths):
                self._steps.note_state_change()
            for slot, length in lengths.items():
                increments[slot] = length - len(self._slots[slot].tokens)
                copy.restore(self._cache, slot, length, stream=stream)
            self._cache.commit_sequence_length(increments, stream=stream)
            for slot, length in lengths.items():
                self._slots[slot].restore(tokens[length - increments[slot] : length])
            self._counters.reused_tokens += sum(increments)

    @nvtx_range("compaction")
    def compact(self, mapping: Sequence[int]) -> None:
        """Drop and move slots. The moves cannot be rolled back: a dropped slot may have been overwritten."""
        kept = sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)
        with self.transaction():
            self._steps.note_state_change()
            self._cache.compact_batch(mapping, len(mapping), len(kept), stream=self._steps.stream)
            self._slots = [self._slots[slot] for _, slot in kept]

    # --- sequences ---

    def start(self, prompts: Rows, *, reuse: bool = False) -> Logits:
        """Start new sequences and run their prompts."""
        kept = [0] * len(prompts)
        if reuse:
            self._check_one_each("prompts", len(prompts))  # the batch may have changed since the prompts were checked
            kept = [self._kept(prompt, slot.tokens) for prompt, slot in zip(prompts, self._slots, strict=True)]
        found = {slot: match for slot, row in enumerate(prompts) if (match := self._prompt_cache.find(row)) and match.length > kept[slot]}
        reused = [found[slot].length if slot in found else count for slot, count in enumerate(kept)]
        rows = [prompt[count:] for prompt, count in zip(prompts, reused, strict=True)]
        if self._steps.has_states:
            kept = [0 if slot in found else count for slot, count in enumerate(kept)]
        before = [row[:-1] if self.remembers_before_last else () for row in rows]
        rows = [row[len(part) :] for row, part in zip(rows, before, strict=True)]
        chunks_before = self.plan_prefill(reused, before)
        chunks = self.plan_prefill([count + len(part) for count, part in zip(reused, before, strict=True)], rows)
        for slot, match in found.items():
            _LOGGER.info("slot %d: %d of %d prompt tokens are from the prompt cache", slot, match.length, len(prompts[slot]))
        self._reset(kept)
        if found:
            with self.transaction():
                self._restore(found)
        if self.remembers_before_last:
            self.prefill(before, chunks_before)
            self.remember(range(len(prompts)))
            return self.prefill(rows, chunks)
        logits = self.prefill(rows, chunks)
        self.remember(range(len(prompts)))
        return logits

    def _kept(self, prompt: Sequence[int], held: Sequence[int]) -> int:
        """Return how many tokens of a prompt a slot keeps of what it holds: states are those after all of them."""
        count = common_prefix(prompt[:-1], held)
        return 0 if self._steps.has_states and count < len(held) else count

    def append(self, turns: Rows) -> Logits:
        """Run new tokens of the active slots, after their pending ones."""
        lengths = self._check_one_each("turns", len(turns))
        rows = self._after_pending(turns)
        self.check_room(lengths, rows)
        chunks = self.plan_prefill(lengths, rows)
        with self._rollback_to(self._savepoint_at(lengths)):
            return self.prefill(rows, chunks)

    @nvtx_range("decode")
    def decode(self, tokens: Sequence[int], going: Sequence[bool] | None = None) -> Logits:
        """Run one token of every active slot in one enqueue."""
        started = time.perf_counter()
        with self.decode_transaction(tokens, going):
            self.enqueue(tokens, going)
            self.commit(tokens, going)
            logits = self._steps.logits(len(tokens))
            self.count_step(going, started)
        return logits

    def decode_transaction(self, tokens: Sequence[int], going: Sequence[bool] | None) -> AbstractContextManager[None]:
        """Check that one token of every active slot can be run, and return a :meth:`transaction` in which to do so."""
        lengths = self._check_one_each("tokens", len(tokens))
        if max(lengths, default=0) >= self.max_sequence_length:
            going = going or [True] * len(tokens)
            self.check_room(lengths, [tokens[:1] if goes else () for goes in going])
            lengths = self._make_room_for_idle_rows(going)
        return self._rollback_to(self._savepoint_at(lengths))

    def enqueue(self, tokens: Sequence[int], going: Sequence[bool] | None) -> None:
        """Enqueue one token of every active slot. Its rows lie behind the lengths until :meth:`commit`. Inside a transaction."""
        self._steps.enqueue_one_each(tokens, going)

    def commit(self, tokens: Sequence[int], going: Sequence[bool] | None) -> None:
        """Count what the last enqueue has written, or will write, of the slots that take part. Inside a transaction."""
        self._steps.commit(1 if going is None else [int(goes) for goes in going])
        for slot, token, goes in zip(self._slots, tokens, going or repeat(True), strict=False):
            if goes:
                slot.extend((token,))

    def count_step(self, going: Sequence[bool] | None, started: float) -> None:
        """Count a decode step in the statistics."""
        self._counters.decode_steps += 1
        self._counters.decode_tokens += len(self._slots) if going is None else sum(going)
        self._counters.decode_seconds += time.perf_counter() - started

    @nvtx_range("prefill")
    def prefill(self, rows: Rows, chunks: Sequence[Chunk], *, receive: Callable[[int, Logits], object] | None = None) -> Logits:
        """Run new tokens in chunks. Each chunk is atomic, the call as a whole is not."""
        started = time.perf_counter()
        logits = np.full((len(rows), self._steps.plan.vocab_size), np.nan, np.float32)
        done = [0] * len(rows)
        for chunk in chunks:
            slots = range(chunk.first, chunk.end)
            parts = [rows[slot][done[slot] : done[slot] + take] for slot, take in zip(slots, chunk.takes, strict=True)]
            chunk_logits = self._prefill_chunk(chunk, parts, every_logit=receive is not None)
            for place, (slot, take) in enumerate(zip(slots, chunk.takes, strict=True)):
                done[slot] += take
                if take and receive is not None:
                    receive(slot, chunk_logits[place][:take])
                if take and done[slot] == len(rows[slot]):
                    logits[slot] = chunk_logits[place] if receive is None else chunk_logits[place][take - 1]
        self._counters.prefill_seconds += time.perf_counter() - started
        return logits

    def start_every_logit(self, prompts: Rows) -> Iterator[tuple[int, Logits]]:
        """Start new sequences, run their prompts, and yield the logits of all their tokens, chunk by chunk."""
        chunks = self._steps.plan_prefill([0] * len(prompts), [len(row) for row in prompts], every_logit=True)
        self._reset([0] * len(prompts))
        for chunk, parts in _parts_of(prompts, chunks):
            started = time.perf_counter()
            logits = self._prefill_chunk(chunk, parts, every_logit=True)
            self._counters.prefill_seconds += time.perf_counter() - started
            for slot, part, found in zip(range(chunk.first, chunk.end), parts, logits, strict=True):
                if part:
                    yield slot, found[: len(part)]

    @nvtx_range("verify")
    def verify(self, rows: Rows) -> Logits:
        """Run tokens of the active slots and return the logits of all of them. The slots do not hold them before :meth:`accept`."""
        started = time.perf_counter()
        lengths = self._check_one_each("tokens", len(rows))
        self.check_room(lengths, rows)
        chunks = self._steps.plan_prefill(lengths, [len(row) for row in rows], every_logit=True)
        if self._steps.has_states and len(chunks) > 1:
            raise CapacityError(
                f"verify: a slot has no room for the padding of {max(map(len, rows))} tokens, and states cannot be set back after a part "
                "of them. Use shorter rows. Nothing was changed."
            )
        self._verified = None
        found = np.full((len(rows), max(map(len, rows)), self._steps.plan.vocab_size), np.nan, np.float32)
        done = [0] * len(rows)
        try:
            for chunk, parts in _parts_of(rows, chunks):
                (self._steps.run if chunk is chunks[-1] else self._steps.prefill)(chunk, parts, every_logit=True)
                logits = self._steps.every_logit(chunk)
                for slot, part, of_slot in zip(range(chunk.first, chunk.end), parts, logits, strict=True):
                    found[slot, done[slot] : done[slot] + len(part)] = of_slot[: len(part)]
                    done[slot] += len(part)
        finally:
            if len(chunks) > 1 and not self._cache.closed:
                self._cache.reset_for_new_sequences(lengths, stream=self._steps.stream)
        self._verified = _Verified(self.changes, [tuple(row) for row in rows])
        self._counters.decode_steps += 1
        self._counters.decode_seconds += time.perf_counter() - started
        return found

    def accept(self, counts: Sequence[int]) -> None:
        """Commit the first tokens that the last :meth:`verify` has run, and drop the others."""
        verified = self._verified
        if verified is None or verified.changes != self.changes:
            raise RangeError("accept: expected a verify before it, and no other change of the sequences since. Call verify again.")
        self._check_one_each("counts", len(counts))
        taken = [
            int_in_range(f"counts[{slot}]", count, 0, len(row)) for slot, (count, row) in enumerate(zip(counts, verified.rows, strict=True))
        ]
        kept = [row[:count] for row, count in zip(verified.rows, taken, strict=True)]
        is_partial = any(0 < count < len(row) for row, count in zip(verified.rows, taken, strict=True))
        chunks = self.plan_prefill(self.held, kept) if self._steps.has_states and is_partial else []
        with self.transaction():
            for chunk, parts in _parts_of(kept, chunks):
                self._steps.prefill(chunk, parts)
            if not chunks:
                self._steps.commit(taken)
            for state, row in zip(self._slots, kept, strict=True):
                if row:
                    state.extend(row)
            self._counters.decode_tokens += sum(taken)

    def rewind(self, slot: int, length: int) -> None:
        """Shorten a slot to its first ``length`` tokens and drop its pending ones."""
        with self.transaction():
            self._rewind(slot, length)

    def load(self, snapshots: Sequence[Snapshot]) -> None:
        """Start new sequences, one from each snapshot. The snapshots were checked to fit."""
        stream = self._steps.stream
        self._reset([0] * len(snapshots))
        with self.transaction():
            for slot, snapshot in enumerate(snapshots):
                snapshot.contents.restore(self._cache, slot, len(snapshot.tokens), stream=stream)
            self._cache.commit_sequence_length([len(snapshot.tokens) for snapshot in snapshots], stream=stream)
            self._slots = [_slot_of(snapshot) for snapshot in snapshots]

    def resume(self, snapshots: Sequence[Snapshot], kept: Sequence[int], rows: Rows, chunks: Sequence[Chunk]) -> Logits:
        """Start new sequences from snapshots, keep so many tokens of each, and run those that follow."""
        self.load(snapshots)
        for slot, length in enumerate(kept):
            if length < len(self._slots[slot].tokens):
                self.rewind(slot, length)
        with self.transaction():
            return self.prefill(rows, chunks)

    # --- what is known of a slot's request: the cache does not change ---

    def assign_sampler(self, slot: int, sampler: SamplerPosition) -> None:
        """Record which sampler chooses the tokens of a slot."""
        self._slots[slot].sampler = sampler

    def record_token(self, slot: int, token: int, sampler: SamplerPosition | None, *, generated: int = 0) -> None:
        """Record the token that was chosen for a slot as pending, where its sampler is now, and how many its request has generated.

        Tokens may be pending in front of it: those that a full slot has given back while its request waited.
        """
        state = self._slots[slot]
        state.pending = (*state.pending, token)
        state.sampler = sampler
        state.generated = generated

    @property
    def remembers_before_last(self) -> bool:
        """Whether prompts are copied into the prompt cache without their last token, before it is run.

        States can be used for exactly the tokens that they are after, and the last token of a prompt is always run.
        """
        return self._steps.has_states and self._prompt_cache.max_bytes > 0

    def parting(self, tokens: TokenArray) -> int:
        """Return the length of the longest common prefix with a cached prompt, where states at it can serve a third prompt."""
        if not self.remembers_before_last:
            return 0
        return max((common_prefix(tokens, entry.tokens) for entry in self._prompt_cache.entries), default=0)

    def remember(self, slots: Iterable[int]) -> None:
        """Copy what slots hold into the prompt cache, if it is on."""
        if self._prompt_cache.max_bytes:
            for slot in slots:
                if not self._slots[slot].tokens:
                    continue
                self._prompt_cache.insert(self._slots[slot].tokens, slot, stream=self._steps.stream)

    # --- parts of the above ---

    def _reset(self, kept: Sequence[int]) -> None:
        """Start ``len(kept)`` new sequences that keep the first tokens of what their slots hold."""
        with self._rollback_to(self.savepoint()):
            self._steps.note_state_change()
            self._cache.reset_for_new_sequences(kept, stream=self._steps.stream)
            self._slots = [SlotState(self._slots[slot].tokens[:count] if count else [], reused=count) for slot, count in enumerate(kept)]
            self._counters.reused_tokens += sum(kept)

    def _restore(self, matches: dict[int, PromptMatch]) -> None:
        """Copy what the prompt cache has into slots, over the tokens of it that they may hold. Inside a transaction."""
        if not matches:
            return
        increments = [0] * len(self._slots)
        for slot, match in matches.items():
            increments[slot] = match.length - len(self._slots[slot].tokens)
            self._prompt_cache.restore(match, slot, stream=self._steps.stream)
        self._cache.commit_sequence_length(increments, stream=self._steps.stream)
        for slot, match in matches.items():
            state = self._slots[slot]
            state.restore(match.entry.tokens[len(state.tokens) : match.length].tolist())
        self._counters.reused_tokens += sum(increments)

    def _prefill_chunk(self, chunk: Chunk, parts: Rows, *, every_logit: bool = False) -> Logits:
        with self.transaction():
            self._steps.prefill(chunk, parts, every_logit=every_logit)
            for slot, part in enumerate(parts, start=chunk.first):
                if part:
                    self._slots[slot].extend(part)
            logits = self._steps.every_logit(chunk) if every_logit else self._steps.logits(chunk.count)
            self._counters.prefill_tokens += sum(chunk.takes)
        return logits

    def _make_room_for_idle_rows(self, going: Sequence[bool]) -> tuple[int, ...]:
        """Give the last token of full idle slots back to their pending ones, and return the lengths then.

        States cannot go back by one token: all tokens are given back.
        """
        last = 0 if self._steps.has_states else self.max_sequence_length - 1
        with self.transaction():
            for slot, goes in enumerate(going):
                if not goes and self.is_full(slot):
                    state = self._slots[slot]
                    self._rewind(slot, last, pending=(*state.tokens[last:], *state.pending))
        return self.checked_lengths()

    def _rewind(self, slot: int, length: int, *, pending: Sequence[int] = ()) -> None:
        if self._steps.has_states and not length:
            self._steps.note_state_change()
            self._cache.clear_slot(slot, stream=self._steps.stream)
        elif not (self._steps.has_states and length == len(self._slots[slot].tokens)):
            self._cache.rewind(slot, length, stream=self._steps.stream)
        self._slots[slot].shorten(length, pending)


def _parts_of(rows: Rows, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, list[Sequence[int]]]]:
    """Yield each chunk with the tokens that it takes of the rows of its slots."""
    done = [0] * len(rows)
    for chunk in chunks:
        slots = range(chunk.first, chunk.end)
        yield chunk, [rows[slot][done[slot] : done[slot] + take] for slot, take in zip(slots, chunk.takes, strict=True)]
        for slot, take in zip(slots, chunk.takes, strict=True):
            done[slot] += take


def _slot_of(snapshot: Snapshot) -> SlotState:
    """Return a slot that holds what is in a snapshot."""
    sampler = None if snapshot.sampler is None else (snapshot.sampler.seed, snapshot.sampler.counter)
    generated = 0 if snapshot.sampler is None else snapshot.sampler.generated
    return SlotState(list(snapshot.tokens), pending=snapshot.pending, reused=len(snapshot.tokens), sampler=sampler, generated=generated)


def _check_not_empty(prompts: Rows) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ShapeError(f"prompts[{index}]: expected at least one token, got none.")
