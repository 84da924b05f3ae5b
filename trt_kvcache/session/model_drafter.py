"""``ModelDrafter``: drafts of a small model with the tokenizer of the large one, from a cache and an engine of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.generation.request import Request
from trt_kvcache.generation.token_ids import common_prefix
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.draft_steps import Drafted, DraftsInFlight, DraftSteps
from trt_kvcache.session.draft_tree_steps import DraftTreeSteps
from trt_kvcache.session.drafts_ahead import AheadPlan, ChosenTokens, Continued, DraftsAhead
from trt_kvcache.session.runner import Runner

if TYPE_CHECKING:
    from trt_kvcache.session.open_model import SessionParts

#: Token that a draft model or head reads in the places of rows.
PLACEHOLDER = 0


class DraftToContinue(NamedTuple):
    """A slot of the large model whose draft is being verified, and the length of its next draft."""

    request: Request
    #: Tokens in the cache, and tokens of the draft.
    length: int
    asked: int
    #: Tokens of the next draft.
    limit: int


class EnqueuedDrafts(NamedTuple):
    """Drafts whose tokens are on the device, and the slot of the drafter for each sequence that has one, by its index."""

    in_flight: DraftsInFlight
    slots: Mapping[int, int]


class ModelDrafter:
    """Generates drafts with a small model. It owns the parts of a session, with a slot for each slot of the large model.

    It samples with the random numbers of each request, so that both models often choose the same token. ``tree_tokens``: 0 for chains.
    """

    def __init__(self, parts: SessionParts, *, vocab_size: int, tree_tokens: int = 0) -> None:
        if parts.cache.states is not None:
            raise ConfigError(
                "draft: expected a model without recurrent states, which cannot go back to the accepted tokens, got one with."
            )
        self._parts = parts
        self._runner = Runner(parts.engine, parts.cache, names=parts.names)
        self._batch = Batch(self._runner, PromptCache(parts.cache))
        self._batch.activate_all()
        self._steps: DraftSteps | DraftTreeSteps = DraftSteps(self._runner, self._batch, vocab_size=vocab_size)
        if tree_tokens:
            self._steps = DraftTreeSteps(self._runner, self._batch, vocab_size=vocab_size, max_tokens=tree_tokens)
        self._ahead: DraftsAhead | None = None
        # Slot of each request, and the number of tokens of the request in that slot. Tokens after them are an earlier draft.
        self._places: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()

    def run_on(self, stream: Any) -> None:
        """Run on the stream of the large model, which verifies drafts before the host has read them."""
        self._runner.synchronize()
        self._runner.stream = stream

    def propose(self, sequences: Sequence[DraftedSequence]) -> Sequence[Sequence[int] | DraftTree]:
        """Generate a draft for each sequence: first append the tokens that its slot lacks, then generate one token of all at a time."""
        slots, drafted = self._begin(sequences)
        found = self._steps.run(drafted) if drafted else {}
        return [found[slots[index]] if index in slots else () for index in range(len(sequences))]

    def enqueue(self, sequences: Sequence[DraftedSequence]) -> EnqueuedDrafts | None:
        """Enqueue the drafts that :meth:`propose` would generate; None if there are none, or their tokens are chosen on the host."""
        if not isinstance(self._steps, DraftSteps):
            return None
        slots, drafted = self._begin(sequences)
        in_flight = self._steps.enqueue(drafted) if drafted else None
        return None if in_flight is None else EnqueuedDrafts(in_flight, slots)

    def plan_ahead(self, verified: Mapping[int, DraftToContinue]) -> AheadPlan | None:
        """Plan the drafts that follow those that slots of the large model verify; None if they must wait for the host."""
        if (
            type(self._steps) is not DraftSteps
            or self._steps.sampler is None
            or any(one.request not in self._places for one in verified.values())
        ):
            return None
        self._ahead = self._ahead or DraftsAhead(self._runner, self._batch)
        places = {target: self._places[one.request] for target, one in verified.items()}
        return self._ahead.plan(
            {
                place: Continued(target, verified[target].length, known, verified[target].asked + 1, verified[target].limit)
                for target, (place, known) in places.items()
            }
        )

    def run_ahead(self, plan: AheadPlan, chosen: ChosenTokens) -> EnqueuedDrafts:
        """Enqueue drafts after tokens that only the device knows."""
        assert isinstance(self._steps, DraftSteps)
        assert self._ahead is not None
        assert self._steps.sampler is not None
        in_flight = self._ahead.run(plan, chosen, self._steps.sampler)
        return EnqueuedDrafts(in_flight, {one.target: place for place, one in plan.continued.items()})

    def settle(self, chosen: Mapping[Request, Sequence[int]]) -> None:
        """Take the tokens after which :meth:`run_ahead` has drafted into the slots of their requests."""
        assert self._ahead is not None
        places = {request: self._places[request] for request in chosen}
        self._ahead.settle({place: chosen[request] for request, (place, _) in places.items()})
        for request, (place, known) in places.items():
            self._places[request] = place, known + len(chosen[request])

    def _begin(self, sequences: Sequence[DraftedSequence]) -> tuple[dict[int, int], dict[int, Drafted]]:
        """Give slots to the sequences that can have a draft; return them by the index of a sequence, and what each of them runs."""
        limits = self._limits(sequences)
        drafted = [index for index, count in enumerate(limits) if count > 0]
        slots = dict(zip(drafted, self._slots_of([sequences[index] for index in drafted]), strict=True))
        if not drafted:
            return {}, {}
        kept = {slot: self._kept(sequences[index], slot) for index, slot in slots.items()}
        self._take_slots({slot: sequences[index] for index, slot in slots.items()}, kept)
        return slots, {
            slot: Drafted(
                sequences[index].request, self._tokens(sequences[index], kept[slot]), limits[index], self._tree_limit(sequences[index])
            )
            for index, slot in slots.items()
        }

    def _limits(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        """Return the most tokens of each draft; 0 or less for none."""
        limit = self._batch.max_sequence_length
        return [min(one.limit, limit - one.num_tokens) for one in sequences]

    def _tree_limit(self, sequence: DraftedSequence) -> int:
        """Return the most tokens of a tree, all of which may run after the sequence."""
        return min(sequence.tree_limit, self._batch.max_sequence_length - sequence.num_tokens)

    def _slots_of(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        """Return the slots of sequences. A new request gets a free slot, else the slot of a request that has no draft in this step."""
        requests = [one.request for one in sequences]
        known = {request: self._places[request][0] for request in requests if request in self._places}
        taken = {slot for slot, _ in self._places.values()}
        slots = range(self._parts.cache.max_batch_size)
        free = iter(sorted((slot for slot in slots if slot not in known.values()), key=taken.__contains__))
        return [known[request] if request in known else next(free) for request in requests]

    def _kept(self, sequence: DraftedSequence, slot: int) -> int:
        """Return how many tokens of a slot are the first ones of a sequence, which has at least one more."""
        held = self._batch[slot]
        count = min(self._known(sequence, slot), sequence.num_tokens)
        count += common_prefix(known_tokens(sequence, count), held.row[count : held.length])
        return min(count, sequence.num_tokens - 1)

    def _tokens(self, sequence: DraftedSequence, kept: int) -> list[int]:
        """Return the tokens to run after those that a slot keeps of a sequence."""
        return known_tokens(sequence, kept)

    def _known(self, sequence: DraftedSequence, slot: int) -> int:
        """Return the number of tokens that a slot holds of a sequence, an earlier draft not counted."""
        _, given = self._places.get(sequence.request, (slot, 0))
        return min(given, self._batch[slot].length)

    def _take_slots(self, sequences: Mapping[int, DraftedSequence], kept: Mapping[int, int]) -> None:
        """Shorten slots to the tokens that they keep of sequences, and take them from other requests."""
        self._batch.shorten([kept.get(slot, length) for slot, length in enumerate(self._batch.held)])
        for request in [other for other, (its, _) in self._places.items() if its in sequences]:
            del self._places[request]
        for slot, sequence in sequences.items():
            self._places[sequence.request] = slot, self._num_known(sequence)

    def _num_known(self, sequence: DraftedSequence) -> int:
        """Return the number of tokens of a sequence that its slot will hold before a draft."""
        return sequence.num_tokens

    def close(self) -> None:
        """Close engine and cache of the small model. Idempotent."""
        self._steps.close()
        if self._ahead is not None:
            self._ahead.close()
        self._runner.close()
        self._parts.close()


def known_tokens(sequence: DraftedSequence, first: int) -> list[int]:
    """Return the tokens from an index on, with :data:`PLACEHOLDER` for rows, which a draft model does not have."""
    tokens, end = sequence.tokens_from(first), sequence.vocab_size
    return tokens if end is None or max(tokens, default=0) < end else [token if token < end else PLACEHOLDER for token in tokens]
