"""``ModelDrafter``: drafts of a small model with the tokenizer of the large one, from a cache and an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.generation.request import Request
from trt_kvcache.generation.token_ids import common_prefix
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.runner import Runner

if TYPE_CHECKING:
    from trt_kvcache.session.open_model import SessionParts


class ModelDrafter:
    """Generates drafts with a small model. It owns the parts of a session, with a slot for each slot of the large model.

    It samples with the random numbers of each request, so that both models often choose the same token.
    """

    def __init__(self, parts: SessionParts, *, vocab_size: int) -> None:
        if parts.cache.states is not None:
            raise ConfigError(
                "draft: expected a model without recurrent states, which cannot go back to the accepted tokens, got one with."
            )
        self._parts = parts
        self._vocab_size = vocab_size
        self._runner = Runner(parts.engine, parts.cache, names=parts.names)
        self._batch = Batch(self._runner, PromptCache(parts.cache))
        self._batch.activate_all()
        # Slot of each request, and the number of tokens of the request in that slot. Tokens after them are an earlier draft.
        self._places: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[list[int]]:
        """Generate a draft for each sequence: first append the tokens that its slot lacks, then generate one token of all at a time."""
        limits = self._limits(sequences)
        drafted = [index for index, count in enumerate(limits) if count > 0]
        slots = dict(zip(drafted, self._slots_of([sequences[index].request for index in drafted]), strict=True))
        drafts: list[list[int]] = [[] for _ in sequences]
        if not drafted:
            return drafts
        logits = self._append({slot: self._new_tokens(sequences[index], slot) for index, slot in slots.items()})
        while slots:
            rows = {}
            for index, slot in slots.items():
                token = self._choose(sequences[index].request, logits[slot], len(drafts[index]))
                if token is not None:
                    drafts[index].append(token)
                    if len(drafts[index]) < limits[index]:
                        rows[slot] = [token]
            slots = {index: slot for index, slot in slots.items() if slot in rows}
            if slots:
                logits = self._append_drafted(rows)
        return drafts

    def _limits(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        """Return the most tokens of each draft; 0 or less for none."""
        limit = self._batch.max_sequence_length
        return [min(one.limit, limit - one.num_tokens) for one in sequences]

    def _slots_of(self, requests: Sequence[Request]) -> list[int]:
        """Return the slots of requests. A new request gets a free slot, else the slot of a request that has no draft in this step."""
        known = {request: self._places[request][0] for request in requests if request in self._places}
        taken = {slot for slot, _ in self._places.values()}
        slots = range(self._parts.cache.max_batch_size)
        free = iter(sorted((slot for slot in slots if slot not in known.values()), key=taken.__contains__))
        return [known[request] if request in known else next(free) for request in requests]

    def _new_tokens(self, sequence: DraftedSequence, slot: int) -> list[int]:
        """Rewind a slot to its common prefix with a sequence, and return the other tokens of the sequence: at least the last one."""
        held = self._batch[slot]
        count = min(self._known(sequence, slot), sequence.num_tokens)
        tokens = sequence.tokens_from(count)
        count += common_prefix(tokens, held.row[count : held.length])
        count = min(count, sequence.num_tokens - 1)
        self._take_slot(sequence, slot, count, sequence.num_tokens)
        return sequence.tokens_from(count)

    def _known(self, sequence: DraftedSequence, slot: int) -> int:
        """Return the number of tokens that a slot holds of a sequence, an earlier draft not counted."""
        _, given = self._places.get(sequence.request, (slot, 0))
        return min(given, self._batch[slot].length)

    def _take_slot(self, sequence: DraftedSequence, slot: int, count: int, total: int) -> None:
        """Rewind a slot to the first ``count`` tokens of a sequence, which will have ``total``, and take it from other requests."""
        for request in [other for other, (its, _) in self._places.items() if its == slot]:
            del self._places[request]
        if count < self._batch[slot].length:
            self._batch.rewind(slot, count)
        self._places[sequence.request] = slot, total

    def _append(self, rows: dict[int, list[int]]) -> Logits:
        """Run tokens of some slots, and return the logits of all: float32 ``[B, vocab]``."""
        return self._batch.append([rows.get(slot, []) for slot in range(len(self._batch))])

    def _append_drafted(self, rows: dict[int, list[int]]) -> Logits:
        """Run the last token of the drafts of some slots: see :meth:`_append`."""
        return self._append(rows)

    def _choose(self, request: Request, logits: Logits, count: int) -> int | None:
        """Choose the token after ``count`` tokens of a draft; None if logits are not finite, which ends the draft but not the sequence."""
        try:
            return request.guess(logits[: self._vocab_size], count)
        except EngineError:
            return None

    def close(self) -> None:
        """Close engine and cache of the small model. Idempotent."""
        self._runner.close()
        self._parts.close()
