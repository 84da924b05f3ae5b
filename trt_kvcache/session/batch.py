"""``Batch``: the sequences in the slots of a session, and the calls that add to them.

A call plans on the host, does its work on the device inside :meth:`Runner.work`, and applies the new slots last.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_sequence, slot_index
from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import CapacityError, RangeError, ShapeError
from trt_kvcache.generation.sampling import NonFiniteLogitsError
from trt_kvcache.generation.token_ids import TokenArray, common_prefix
from trt_kvcache.sequences.prompt_cache import PromptCache, PromptMatch
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.statistics import SessionStatistics, StepCounters
from trt_kvcache.session.step_plan import LogitsWanted, Rows, StepPlan
from trt_kvcache.session.tree_checks import checked_counts, checked_paths

Logits = np.ndarray[Any, Any]

_LOGGER = logging.getLogger("trt_kvcache.session")


class Batch:
    """The active slots of a session, and the calls that add to them. Prompts and tokens were checked by the caller.

    Each call is atomic unless it says otherwise: if it raises or is interrupted, lengths and slots are as before it.
    """

    def __init__(self, runner: Runner, prompt_cache: PromptCache) -> None:
        self._runner = runner
        self._cache = runner.cache
        self._prompt_cache = prompt_cache
        self._counters = StepCounters()
        kv, mamba = runner.cache.kv_config, runner.cache.mamba_config
        self._bytes_per_token = 0 if kv is None else estimate_memory(kv).bytes_per_token
        self._state_bytes = 0 if mamba is None else mamba.slot_nbytes
        #: Tokens a slot can hold, S.
        self.max_sequence_length = runner.cache.lengths.max_sequence_length

    # --- what the slots hold ---

    def __len__(self) -> int:
        """Return the number of active slots, A."""
        return len(self._runner.slots)

    def __getitem__(self, slot: int) -> Slot:
        """Return an active slot."""
        return self._runner.slots[slot]

    @property
    def held(self) -> list[int]:
        """Tokens that each active slot holds."""
        return [slot.length for slot in self._runner.slots]

    @property
    def reused(self) -> list[int]:
        """Tokens at the start of each active slot that were not run for its sequence."""
        return [slot.reused for slot in self._runner.slots]

    def is_full(self, slot: Slot) -> bool:
        """Tell whether a slot can take no further token."""
        return slot.length >= self.max_sequence_length

    @property
    def statistics(self) -> SessionStatistics:
        """Times, tokens and bytes so far."""
        held = () if self._cache.closed else self._cache.lengths.upper_bounds
        live = sum(held) * self._bytes_per_token + len(held) * self._state_bytes
        refusals = tuple(getattr(self._runner.engine, "graph_refusals", ()))  # engines without CUDA graphs have none
        return self._counters.statistics(cache_bytes_live=live, cache_bytes_reserved=self._cache.nbytes, graph_refusals=refusals)

    # --- checks: nothing is changed ---

    def check_prompts(self, prompts: Rows, *, reuse: bool = False, queued: bool = False) -> None:
        """Check that prompts can start new sequences."""
        slots = self._cache.max_batch_size
        if queued and not prompts:
            raise ShapeError("prompts: expected at least one, got none.")
        if queued and len(prompts) > slots:
            self._runner.check_all_batch_sizes()
        elif not 1 <= len(prompts) <= slots:
            raise ShapeError(f"prompts: expected 1 to max_batch_size={slots} of them, got {len(prompts)}.")
        _check_not_empty(prompts)
        self.check_room([0] * len(prompts), prompts)
        if reuse:
            self._check_one_each("prompts", len(prompts))

    def check_turns(self, turns: Rows) -> None:
        """Check that turns can follow the tokens and the pending tokens of the active slots."""
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

    def _check_one_each(self, what: str, count: int) -> tuple[int, ...]:
        """Check that there is one of something for each active slot, and return the lengths."""
        lengths = self._runner.checked_lengths()
        if count != len(lengths):
            raise ShapeError(f"{what}: expected one for each of {len(lengths)} active slots, got {count}.")
        return lengths

    def _after_pending(self, turns: Rows) -> list[list[int]]:
        """Return the tokens to run for each turn: pending tokens go first, and an empty turn runs nothing."""
        return [[*slot.pending, *turn] if turn else [] for slot, turn in zip(self._runner.slots, turns, strict=True)]

    # --- which slots are active ---

    def clear(self) -> None:
        """Make no slot active."""
        self._reset([], [])

    def activate_all(self) -> None:
        """Make all slots active, without tokens."""
        slots = self._cache.max_batch_size
        self._reset([0] * slots, [None] * slots)

    @contextmanager
    def finite(self) -> Iterator[None]:
        """Return a context manager around choices of tokens, inside :meth:`Runner.work`: logits that are not finite end all sequences."""
        try:
            yield
        except NonFiniteLogitsError:
            # Attention that reads stale rows multiplies them by 0: a NaN would reach the next sequence of the slot. Copies may have it too.
            self._prompt_cache.clear()
            self._runner.clear_rows()
            raise

    def added(
        self, slots: Sequence[Slot], prompts: Rows, *, adapters: Sequence[str | None], skip_prompt_cache: Sequence[bool]
    ) -> list[Slot]:
        """Make more slots active after others, each with the prefix of its prompt in the prompt cache. Inside :meth:`Runner.work`."""
        first = len(slots)
        self._cache.set_active_batch_size(first + len(prompts), stream=self._runner.stream)
        after = [*slots, *(Slot([], 0, adapter=adapter) for adapter in adapters)]
        self._runner.use_adapters([slot.adapter for slot in after])
        sought = [slot for slot, skip in enumerate(skip_prompt_cache, start=first) if not skip]
        found = {slot: self._prompt_cache.find(prompts[slot - first], adapter=after[slot].adapter) for slot in sought}
        return self._restored(after, {slot: match for slot, match in found.items() if match is not None})

    def copied(self, slots: Sequence[Slot], source: int, lengths: Mapping[int, int]) -> list[Slot]:
        """Copy the first tokens of a slot to others, which hold fewer of them. With states, all of its tokens. Inside :meth:`Runner.work`.

        Raises :class:`CapacityError` if there is no memory for the copy between the slots; nothing was changed then.
        """
        stream = self._runner.stream
        copy = SlotCopy.capture(self._cache, source, max(lengths.values()), stream=stream)
        if any(slots[slot].length for slot in lengths):
            self._runner.overwrite_states()
        after = list(slots)
        for slot, length in lengths.items():
            copy.restore(self._cache, slot, length, stream=stream)
            after[slot] = slots[slot].restored(slots[source].row[slots[slot].length : length])
            if self._runner.hidden_states is not None:
                self._runner.hidden_states.copy(source, slot, length, stream=stream)
                after[slot] = after[slot]._replace(copied=min(slots[source].copied, length))
        self._commit_restored(slots, after)
        return after

    @nvtx_range("compaction")
    def compact(self, mapping: Sequence[int]) -> None:
        """Drop and move slots by a mapping to their new places, -1 to drop. Inside :meth:`Runner.work`.

        Cannot be undone: rows of a dropped slot may be overwritten.
        """
        kept = sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)
        slots, hidden = self._runner.slots, self._runner.hidden_states
        places = [] if hidden is None else hidden.places
        self._runner.overwrite_states()
        self._cache.compact_batch(mapping, len(mapping), len(kept), stream=self._runner.stream)
        try:
            if hidden is not None:
                hidden.compact(mapping)
            self._runner.use_adapters([slots[slot].adapter for _, slot in kept])
            self._runner.apply([slots[slot] for _, slot in kept])
        except BaseException:
            if hidden is not None and self._runner.slots is slots:  # interrupted: the slots stay, and so do their hidden states
                hidden.places = places
            raise

    # --- sequences ---

    def start(self, prompts: Rows, adapters: Sequence[str | None], *, reuse: bool = False) -> Logits:
        """Start new sequences and run their prompts; return the logits float32 ``[n, vocab]`` at the last token of each.

        Not atomic once the first chunk runs: if a later one fails, the slots hold the tokens of the chunks before it.
        """
        kept = [0] * len(prompts)
        if reuse:
            self._check_one_each("prompts", len(prompts))  # the batch may have changed since the prompts were checked
            kept = [self._kept(*one) for one in zip(prompts, adapters, self._runner.slots, strict=True)]
        matches = {slot: self._prompt_cache.find(*one) for slot, one in enumerate(zip(prompts, adapters, strict=True))}
        found = {slot: match for slot, match in matches.items() if match is not None and match.length > kept[slot]}
        reused = [found[slot].length if slot in found else count for slot, count in enumerate(kept)]
        rows = [prompt[count:] for prompt, count in zip(prompts, reused, strict=True)]
        if self._runner.has_states:
            kept = [0 if slot in found else count for slot, count in enumerate(kept)]
        heads = [row[:-1] if self.caches_prompt_without_last_token else () for row in rows]
        before = StepPlan.of(heads, LogitsWanted.NONE)
        plan = StepPlan.of([row[len(head) :] for row, head in zip(rows, heads, strict=True)])
        chunks_before = self._runner.chunks(reused, before)
        chunks = self._runner.chunks([count + len(head) for count, head in zip(reused, heads, strict=True)], plan)
        for slot, match in found.items():
            _LOGGER.info("slot %d: %d of %d prompt tokens are from the prompt cache", slot, match.length, len(prompts[slot]))
        self._reset(kept, adapters)
        if found:
            with self._runner.work():
                self._runner.apply(self._restored(self._runner.slots, found))
        if self.caches_prompt_without_last_token:
            self._prefill(before, chunks_before)
            self.remember(self._runner.slots)
            return self._prefill(plan, chunks)
        logits = self._prefill(plan, chunks)
        self.remember(self._runner.slots)
        return logits

    def _kept(self, prompt: Sequence[int], adapter: str | None, slot: Slot) -> int:
        """Return the number of tokens that a slot keeps for a prompt: their common prefix, or with states all of them or none.

        Tokens that another adapter has run are not kept.
        """
        if slot.adapter != adapter:
            return 0
        count = common_prefix(prompt[:-1], slot.tokens)
        return 0 if self._runner.has_states and count < slot.length else count

    def append(self, turns: Rows) -> Logits:
        """Run new tokens of the active slots, after their pending ones; return the logits float32 ``[A, vocab]``, NaN for an empty turn."""
        lengths = self._check_one_each("turns", len(turns))
        plan = StepPlan.of(self._after_pending(turns))
        self.check_room(lengths, plan.rows)
        chunks = self._runner.chunks(lengths, plan)
        with self._runner.work():
            slots, logits = self.prefilled(self._runner.slots, plan, chunks)
            self._runner.apply(slots)
        return self._stacked(logits, len(slots))

    def run(self, rows: Rows) -> None:
        """Run new tokens of the active slots, none of which has pending ones. No logits come to the host."""
        plan = StepPlan.of(rows, LogitsWanted.NONE)
        chunks = self._runner.chunks(self._check_one_each("rows", len(rows)), plan)
        with self._runner.work():
            for chunk, parts in _parts_of(plan.rows, chunks):
                self._runner.prefill(chunk, parts)
                self._runner.synchronize()  # the next enqueue overwrites the host's buffers
            self._runner.apply(plan.applied(self._runner.slots))

    @nvtx_range("decode")
    def decode(self, tokens: Sequence[int]) -> Logits:
        """Run one token of every active slot in one enqueue, and return the logits float32 ``[A, vocab]``.

        The next step overwrites them. Nothing per layer, no allocation on the device, one wait.
        """
        started = time.perf_counter()
        plan = StepPlan.decode(tokens)
        self.check_decode(plan)
        with self._runner.work():
            self._runner.enqueue_decode(plan)
            self._runner.commit(1)
            slots = plan.applied(self._runner.slots)
            logits = self._runner.logits(len(tokens))
            self._runner.apply(slots)
        self.count_step(len(tokens), time.perf_counter() - started)
        return logits

    def check_decode(self, plan: StepPlan) -> None:
        """Check that one token of each slot of a plan can be run. A full slot that takes no part makes room for its idle row."""
        lengths = self._check_one_each("tokens", len(plan.rows))
        if max(lengths, default=0) >= self.max_sequence_length:
            self.check_room(lengths, plan.rows)
            self.make_room_for_idle_rows(plan)

    def make_room_for_idle_rows(self, plan: StepPlan) -> None:
        """Apply :meth:`with_room_for_idle_rows`: a step that fails afterwards may have overwritten the last row of a full slot."""
        if any(self.is_full(slot) and not row for slot, row in zip(self._runner.slots, plan.rows, strict=True)):
            with self._runner.work():
                self._runner.apply(self.with_room_for_idle_rows(self._runner.slots, plan))

    def with_room_for_idle_rows(self, slots: Sequence[Slot], plan: StepPlan) -> Sequence[Slot]:
        """Give the last token of full idle slots back to their pending ones. States cannot go back by one token: all are given back.

        Inside :meth:`Runner.work`.
        """
        last = 0 if self._runner.has_states else self.max_sequence_length - 1
        after = list(slots)
        for index, (slot, row) in enumerate(zip(slots, plan.rows, strict=True)):
            if self.is_full(slot) and not row:
                self._rewind(index, last, held=slot.length)
                after[index] = slot.shortened(last, (*slot.row[last : slot.length], *slot.pending))
        return after

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all prompts so far."""
        return self._counters.prefill_tokens

    def count_step(self, num_tokens: int, seconds: float) -> None:
        """Count a decode step in the statistics."""
        self._counters.decode_steps += 1
        self._counters.decode_tokens += num_tokens
        self._counters.decode_seconds += seconds

    def count_draft(self, proposed: int, accepted: int) -> None:
        """Count a draft in the statistics."""
        self._counters.drafts += 1
        self._counters.draft_tokens += proposed
        self._counters.accepted_tokens += accepted

    def _prefill(self, plan: StepPlan, chunks: Sequence[Chunk]) -> Logits:
        """Run a plan in chunks. Each chunk is atomic, the call as a whole is not."""
        with self._runner.work():
            slots, logits = self.prefilled(self._runner.slots, plan, chunks, apply=self._runner.apply)
        return self._stacked(logits, len(slots))

    def _stacked(self, logits: Mapping[int, Logits], count: int) -> Logits:
        """Return ``[count, vocab]``, NaN for slots without logits."""
        found = np.full((count, self._runner.plan.vocab_size), np.nan, np.float32)
        for slot, row in logits.items():
            found[slot] = row
        return found

    @nvtx_range("prefill")
    def prefilled(
        self,
        slots: Sequence[Slot],
        plan: StepPlan,
        chunks: Iterable[Chunk],
        *,
        receive: Callable[[int, Logits], object] = lambda slot, logits: None,
        apply: Callable[[Sequence[Slot]], object] = lambda slots: None,
    ) -> tuple[list[Slot], dict[int, Logits]]:
        """Run a plan in chunks, and return the slots afterwards and the wanted logits ``[vocab]`` after each row, by slot.

        Inside :meth:`Runner.work`. ``receive(slot, logits)`` gets the logits of slots that want all, ``apply(slots)`` the slots, by chunk.
        """
        started = time.perf_counter()
        after = list(slots)
        every_logit = plan.wants_all
        logits: dict[int, Logits] = {}
        for chunk, parts in _parts_of(plan.rows, chunks):
            chunk_logits = self._run_chunk(chunk, parts, every_logit=every_logit)
            for slot, part, found in zip(range(chunk.first, chunk.end), parts, chunk_logits, strict=True):
                if not part:
                    continue
                after[slot] = after[slot].extended(part)
                if plan.logits[slot] is LogitsWanted.ALL:
                    receive(slot, found[: len(part)])
                ends = after[slot].length == slots[slot].length + len(plan.rows[slot])
                if ends and plan.logits[slot] is not LogitsWanted.NONE:
                    logits[slot] = (found[len(part) - 1] if every_logit else found).copy()  # the next enqueue overwrites them
            apply(after)
            self._counters.prefill_tokens += sum(chunk.takes)
        self._counters.prefill_seconds += time.perf_counter() - started
        return after, logits

    def start_every_logit(self, prompts: Rows, adapter: str | None) -> Iterator[tuple[int, Logits]]:
        """Start new sequences, run their prompts, and yield slot and logits ``[k, vocab]`` of its next k tokens.

        The next chunk overwrites the logits. The prompt cache, which has none, is not read.
        """
        chunks = self._runner.chunks([0] * len(prompts), StepPlan.of(prompts, LogitsWanted.ALL))
        self._reset([0] * len(prompts), [adapter] * len(prompts))
        for chunk, parts in _parts_of(prompts, chunks):
            started = time.perf_counter()
            after = list(self._runner.slots)
            with self._runner.work():
                logits = self._run_chunk(chunk, parts, every_logit=True)
                for slot, part in enumerate(parts, start=chunk.first):
                    if part:
                        after[slot] = after[slot].extended(part)
                self._runner.apply(after)
            self._counters.prefill_tokens += sum(chunk.takes)
            self._counters.prefill_seconds += time.perf_counter() - started
            for slot, part, found in zip(range(chunk.first, chunk.end), parts, logits, strict=True):
                if part:
                    yield slot, found[: len(part)]

    @nvtx_range("verify")
    def verify(self, rows: Rows, parents: Rows | None = None) -> Logits:
        """Run tokens of the active slots past their lengths, and return the logits ``[A, m, vocab]``, NaN after the end of shorter rows.

        One enqueue; several where a slot has no room for the padding of its row, which split no tree. ``parents`` is -1 for a root.
        """
        started = time.perf_counter()
        lengths = self._check_one_each("tokens", len(rows))
        self.check_room(lengths, rows)
        # The plan outlives this call, and the caller's lists may change.
        tree = None if parents is None else [tuple(row) for row in parents]
        plan = StepPlan.of([tuple(row) for row in rows], LogitsWanted.ALL, tree)
        chunks = self._runner.chunks(lengths, plan)
        if self._runner.has_states and len(chunks) > 1:
            raise CapacityError(
                f"verify: a slot has no room for the padding of {max(map(len, rows))} tokens, and states cannot be set back after a part "
                "of them. Use shorter rows. Nothing was changed."
            )
        if tree is not None and any(
            0 < take < len(row) for chunk in chunks for take, row in zip(chunk.takes, rows[chunk.first :], strict=False)
        ):
            raise CapacityError(
                f"verify: a slot has no room for the padding of {max(map(len, rows))} tokens, and a tree runs in one enqueue. "
                "Use smaller trees. Nothing was changed."
            )
        found = np.empty((len(rows), max(map(len, rows)), self._runner.plan.vocab_size), np.float32)
        for slot, row in enumerate(rows):
            found[slot, len(row) :] = np.nan
        done = [0] * len(rows)
        with self._runner.work():  # of several enqueues all but the last are committed, and the lengths set back at the end
            for chunk, parts in _parts_of(plan.rows, chunks):
                of_parts = None if tree is None else [tree[slot] if part else () for slot, part in enumerate(parts, start=chunk.first)]
                run = self._runner.run if chunk is chunks[-1] else self._runner.prefill
                run(chunk, parts, every_logit=True, parents=of_parts)
                logits = self._runner.every_logit(chunk)
                for slot, part, of_slot in zip(range(chunk.first, chunk.end), parts, logits, strict=True):
                    found[slot, done[slot] : done[slot] + len(part)] = of_slot[: len(part)]
                    done[slot] += len(part)
            if len(chunks) > 1:
                self._cache.reset_for_new_sequences(lengths, stream=self._runner.stream)
        self._runner.uncommitted = plan
        self._counters.decode_steps += 1
        self._counters.decode_seconds += time.perf_counter() - started
        return found

    def accept(self, counts: Sequence[int]) -> None:
        """Commit the first tokens of each row of the last :meth:`verify`, and drop the others."""
        self._accept("counts", counts, checked_counts)

    def accept_paths(self, paths: Rows) -> None:
        """Commit a path from the root of each tree of the last :meth:`verify`, and drop the other tokens."""
        self._accept("paths", paths, checked_paths)

    def _accept(self, what: str, given: Sequence[Any], check: Callable[[Sequence[Any], StepPlan], Rows]) -> None:
        verified = self._runner.uncommitted
        if not isinstance(verified, StepPlan):
            raise RangeError("accept: expected a verify before it, and no other change of the sequences since. Call verify again.")
        self._check_one_each(what, len(as_sequence(what, given)))
        paths = check(given, verified)
        with self._runner.work():
            self.commit_paths(verified, self.held, paths)
            self._runner.apply(verified.accepted(paths).applied(self._runner.slots))
        self._counters.decode_tokens += sum(map(len, paths))

    def commit_paths(self, ran: StepPlan, held: Sequence[int], paths: Rows) -> None:
        """Commit the tokens at ``paths`` of each row of the last enqueue, after tokens that the slots hold. Inside :meth:`Runner.work`.

        States after a part of a row are not known: the accepted tokens of all rows run again.
        """
        is_partial = any(0 < len(path) < len(row) for row, path in zip(ran.rows, paths, strict=True))
        if not (self._runner.has_states and is_partial):
            self._runner.commit_paths(held, paths)
            return
        accepted = ran.accepted(paths)
        for chunk, parts in _parts_of(accepted.rows, self._runner.chunks(held, accepted)):
            self._runner.prefill(chunk, parts)
            self._runner.synchronize()  # the next enqueue overwrites the host's buffers

    def rewind(self, slot: int, length: int) -> None:
        """Shorten a slot to its first ``length`` tokens and drop its pending ones."""
        self._runner.checked_lengths()
        after = list(self._runner.slots)
        slot = slot_index(slot, len(after), of="active slots")
        with self._runner.work():
            self._rewind(slot, length, held=after[slot].length)
            after[slot] = after[slot].shortened(length)
            self._runner.apply(after)

    def shorten(self, lengths: Sequence[int]) -> None:
        """Shorten all active slots, of a model without states, in one launch, and drop their pending tokens."""
        self._runner.checked_lengths()
        if list(lengths) != self.held:
            with self._runner.work():
                self._cache.reset_for_new_sequences(lengths, stream=self._runner.stream)
                self._runner.apply([slot.shortened(length) for slot, length in zip(self._runner.slots, lengths, strict=True)])

    def load(self, snapshots: Sequence[Snapshot], adapters: Sequence[str | None]) -> None:
        """Start new sequences, one from each snapshot. The snapshots were checked to fit."""
        stream, loaded = self._runner.stream, [_slot_of(*one) for one in zip(snapshots, adapters, strict=True)]
        self._reset([0] * len(snapshots), adapters)
        with self._runner.work():
            for slot, snapshot in enumerate(snapshots):
                snapshot.contents.restore(self._cache, slot, len(snapshot.tokens), stream=stream)
            self._cache.commit_sequence_length([len(snapshot.tokens) for snapshot in snapshots], stream=stream)
            self._runner.apply(loaded)

    def resume(
        self,
        snapshots: Sequence[Snapshot],
        adapters: Sequence[str | None],
        kept: Sequence[int],
        plan: StepPlan,
        chunks: Sequence[Chunk],
    ) -> Logits:
        """Start new sequences from snapshots, keep ``kept`` tokens of each, and run the tokens of the plan after them."""
        self.load(snapshots, adapters)
        for slot, length in enumerate(kept):
            if length < self._runner.slots[slot].length:
                self.rewind(slot, length)
        with self._runner.work():
            slots, logits = self.prefilled(self._runner.slots, plan, chunks)
            self._runner.apply(slots)
        return self._stacked(logits, len(slots))

    # --- prefix caching ---

    @property
    def caches_prompt_without_last_token(self) -> bool:
        """True if prompts are copied into the prompt cache before their last token is run.

        States can be used for exactly the tokens that they are after, and the last token of a prompt is always run.
        """
        return self._runner.has_states and self._prompt_cache.max_bytes > 0

    def divergence_point(self, tokens: TokenArray, adapter: str | None) -> int:
        """Return the length of the longest common prefix with a cached prompt: states at it can serve a third prompt. 0 without states."""
        if not self.caches_prompt_without_last_token:
            return 0
        entries = (entry for entry in self._prompt_cache.entries if entry.adapter == adapter)
        return max((common_prefix(tokens, entry.tokens) for entry in entries), default=0)

    def remember(self, slots: Sequence[Slot], chosen: Iterable[int] | None = None) -> None:
        """Copy slots, as the cache holds them now, into the prompt cache if it is on."""
        if self._prompt_cache.max_bytes:
            for slot in range(len(slots)) if chosen is None else chosen:
                if slots[slot].length:
                    self._prompt_cache.insert(slots[slot].tokens, slot, adapter=slots[slot].adapter, stream=self._runner.stream)

    # --- parts of the above ---

    def _reset(self, kept: Sequence[int], adapters: Sequence[str | None]) -> None:
        """Start ``len(kept)`` new sequences that keep the first tokens of what their slots hold."""
        slots = self._runner.slots
        with self._runner.work():
            self._runner.overwrite_states()
            self._cache.reset_for_new_sequences(kept, stream=self._runner.stream)
            self._runner.use_adapters(adapters)
            self._runner.apply(
                [
                    _first_tokens(slots[slot], count) if count else Slot([], 0, adapter=adapter)
                    for slot, (count, adapter) in enumerate(zip(kept, adapters, strict=True))
                ]
            )
        self._counters.reused_tokens += sum(kept)

    def _restored(self, slots: Sequence[Slot], matches: Mapping[int, PromptMatch]) -> list[Slot]:
        """Copy cached prefixes into slots, which may hold a shorter part of them. Inside :meth:`Runner.work`."""
        after = list(slots)
        for slot, match in matches.items():
            self._prompt_cache.restore(match, slot, stream=self._runner.stream)
            after[slot] = slots[slot].restored(match.entry.tokens[slots[slot].length : match.length].tolist())
        if matches:
            self._commit_restored(slots, after)
        return after

    def _commit_restored(self, before: Sequence[Slot], after: Sequence[Slot]) -> None:
        """Count tokens that were copied into slots."""
        increments = [new.length - old.length for old, new in zip(before, after, strict=True)]
        self._cache.commit_sequence_length(increments, stream=self._runner.stream)
        self._counters.reused_tokens += sum(increments)

    def _run_chunk(self, chunk: Chunk, parts: Rows, *, every_logit: bool) -> Logits:
        self._runner.prefill(chunk, parts, every_logit=every_logit)
        return self._runner.every_logit(chunk) if every_logit else self._runner.logits(chunk.count)

    def _rewind(self, slot: int, length: int, *, held: int) -> None:
        if self._runner.has_states and not length:
            self._runner.overwrite_states()
            self._cache.clear_slot(slot, stream=self._runner.stream)
        elif not (self._runner.has_states and length == held):
            self._cache.rewind(slot, length, stream=self._runner.stream)


def _parts_of(rows: Rows, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, list[Sequence[int]]]]:
    """Yield each chunk with the tokens that it takes of the rows of its slots."""
    done = [0] * len(rows)
    for chunk in chunks:
        slots = range(chunk.first, chunk.end)
        yield chunk, [rows[slot][done[slot] : done[slot] + take] for slot, take in zip(slots, chunk.takes, strict=True)]
        for slot, take in zip(slots, chunk.takes, strict=True):
            done[slot] += take


def _first_tokens(slot: Slot, count: int) -> Slot:
    """Return the slot of a new sequence that begins with the first tokens of another one."""
    return Slot(slot.tokens[:count], count, reused=count, copied=min(slot.copied, count), adapter=slot.adapter)


def _slot_of(snapshot: Snapshot, adapter: str | None) -> Slot:
    """Return a slot that holds what is in a snapshot."""
    sampler = None if snapshot.sampler is None else (snapshot.sampler.seed, snapshot.sampler.counter)
    generated = 0 if snapshot.sampler is None else snapshot.sampler.generated
    tokens = list(snapshot.tokens)
    return Slot(tokens, len(tokens), snapshot.pending, len(tokens), sampler, generated, len(tokens), adapter)


def _check_not_empty(prompts: Rows) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ShapeError(f"prompts[{index}]: expected at least one token, got none.")
