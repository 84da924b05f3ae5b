"""``plan_drafts``: the drafts that the next step verifies, in one enqueue with the pending token of each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.drafter import DraftedSequence, Drafter
from trt_kvcache.generation.request import Request
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.session.chunks import Chunk, from_first_slot
from trt_kvcache.session.hidden_states import downloaded
from trt_kvcache.session.model_drafter import EnqueuedDrafts, ModelDrafter
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import LogitsWanted, Rows, StepPlan

_NONE = DraftTree((), ())


class DraftPlan(NamedTuple):
    """Rows of the pending token and the draft of each slot, and their enqueue."""

    plan: StepPlan
    chunk: Chunk

    #: Draft of each slot: empty for an idle one, and for one without a proposal. If they are in flight, token 0 stands for each token.
    drafts: Sequence[DraftTree]
    #: Drafts whose tokens are on the device only, and the slot of the drafter for each slot that has one.
    enqueued: EnqueuedDrafts | None = None

    def read(self) -> DraftPlan:
        """Return the plan with the tokens of drafts that are in flight, after waiting for them. A draft ends before an error."""
        if self.enqueued is None:
            return self
        found, places = self.enqueued.in_flight.read(), self.enqueued.slots
        drafts = [DraftTree.chain(found[places[slot]][: len(asked)]) if len(asked) else asked for slot, asked in enumerate(self.drafts)]
        rows = [(row[0], *draft.tokens, *row[1 + len(draft) :]) if row else row for row, draft in zip(self.plan.rows, drafts, strict=True)]
        return DraftPlan(self.plan._replace(rows=rows), self.chunk, drafts)


def plan_drafts(
    runner: Runner, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan, limit: int, *, on_device: bool
) -> DraftPlan | None:
    """Propose tokens that follow a plan of one token for each slot; None if there are none, or no slot has room for them.

    ``limit``: most tokens of a draft. ``on_device``: the tokens may stay on the device.
    """
    sequences = _sequences(runner, slots, requests, plan, limit)
    if not sequences:
        return None
    enqueued = _enqueued(sequences) if on_device else None
    drafts = _proposals(runner, sequences) if enqueued is None else _unread(enqueued)
    width = 1 + max(map(len, drafts.values()), default=0)
    lengths = [slot.length for slot in slots]
    while width > 1:
        cut = [drafts.get(slot, _NONE).within(width, width - 1) for slot in range(len(plan.rows))]
        wide = _plan_of(plan.rows, cut)
        chunks = runner.chunks(lengths, wide)
        if len(chunks) == 1:
            # A step ahead, which may follow drafts that are in flight, begins with slot 0.
            own, limit = chunks[0], runner.cache.lengths.max_sequence_length
            return DraftPlan(wide, (enqueued and from_first_slot(own, lengths, limit)) or own, cut, enqueued)
        width //= 2  # an enqueue writes rows for all slots in its range, and one of them is nearly full
    return None


def draft_limit(request: Request, limit: int) -> int:
    """Return the most tokens of the next draft of a request, in a step with this limit."""
    return 0 if request.drafting is None else min(limit, VERIFY_WIDTH - 1)


def _plan_of(rows: Rows, drafts: Sequence[DraftTree]) -> StepPlan:
    """Plan a token of each slot that is not idle, and its draft: a token whose parent is -1 follows that token."""
    parents = None
    if not all(draft.is_chain for draft in drafts):
        parents = [(-1, *(parent + 1 for parent in draft.parents)) if row else () for row, draft in zip(rows, drafts, strict=True)]
    return StepPlan.of([(*row, *draft.tokens) for row, draft in zip(rows, drafts, strict=True)], LogitsWanted.ALL, parents)


def _sequences(runner: Runner, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan, most: int) -> dict[int, DraftedSequence]:
    """Return the sequences that may have a draft in the next step."""
    found = {}
    for index in plan.running():
        request, slot = requests[index], slots[index]
        if request.drafting is not None:
            room = min(runner.plan.max_logits_per_slot, runner.cache.lengths.max_sequence_length - slot.length) - 1
            limit = min(draft_limit(request, most), request.remaining - 1, room)
            if limit > 0:
                hidden = None
                if runner.hidden_states is not None:
                    rows = runner.hidden_states.rows(index, slot.copied, slot.length)
                    hidden = rows if getattr(request.drafting.drafter, "takes_device_states", False) else downloaded(rows)
                tree_limit = min(MAX_TREE_TOKENS - 1, room) if runner.takes_trees else 0
                pending, vocab_size = tuple(plan.rows[index]), runner.plan.vocab_size
                sequence = DraftedSequence(request, slot.row, slot.length, pending, limit, hidden, tree_limit, index, vocab_size)
                found[index] = sequence
    return found


def _enqueued(sequences: Mapping[int, DraftedSequence]) -> EnqueuedDrafts | None:
    """Enqueue the drafts of a model or head that all sequences share; None if their tokens come to the host first."""
    drafters = {id(one.request.drafting.drafter): one.request.drafting.drafter for one in sequences.values() if one.request.drafting}
    [drafter, *others] = drafters.values()
    found = drafter.enqueue([*sequences.values()]) if isinstance(drafter, ModelDrafter) and not others else None
    if found is None:
        return None
    slots = [*sequences]
    return EnqueuedDrafts(found.in_flight, {slots[index]: place for index, place in found.slots.items()})


def _unread(enqueued: EnqueuedDrafts) -> dict[int, DraftTree]:
    """Return chains of as many tokens as drafts that are in flight."""
    return {slot: DraftTree.chain([0] * enqueued.in_flight.limits[place]) for slot, place in enqueued.slots.items()}


def _proposals(runner: Runner, sequences: Mapping[int, DraftedSequence]) -> dict[int, DraftTree]:
    """Return the proposals for sequences that have one, by slot. A drafter is called once for all of its sequences."""
    by_drafter: dict[int, tuple[Drafter, list[int]]] = {}
    for slot, sequence in sequences.items():
        assert sequence.request.drafting is not None
        drafter = sequence.request.drafting.drafter
        by_drafter.setdefault(id(drafter), (drafter, []))[1].append(slot)
    found = {}
    for drafter, of_slots in by_drafter.values():
        wanted = [sequences[slot] for slot in of_slots]
        for slot, draft in zip(of_slots, _checked(drafter, wanted, drafter.propose(wanted), runner.plan.vocab_size), strict=True):
            if draft:
                found[slot] = draft
    return found


def _checked(drafter: Drafter, sequences: Sequence[DraftedSequence], proposals: Any, vocab_size: int) -> list[DraftTree]:
    """Check the proposals of a drafter, which may be the caller's, and cut them to their limits."""
    try:
        drafts = [_draft(proposal) for _, proposal in zip(sequences, proposals, strict=True)]
        is_known = all(0 <= token < vocab_size for draft in drafts for token in draft.tokens)
    except (TypeError, ValueError):
        is_known = False
    name = f"{type(drafter).__name__}.propose"
    if not is_known:
        raise ConfigError(
            f"{name}: expected token ids from 0 to {vocab_size - 1} for each of {len(sequences)} sequences, got {proposals!r}."
        )
    if any(not (one.tree_limit or draft.is_chain) for one, draft in zip(sequences, drafts, strict=True)):
        raise ConfigError(f"{name}: expected chains, as the engine takes no trees (DraftedSequence.tree_limit is 0), got {proposals!r}.")
    return [draft.within(one.limit, one.tree_limit or one.limit) for one, draft in zip(sequences, drafts, strict=True)]


def _draft(proposal: Any) -> DraftTree:
    """Return a proposal, a tree or the tokens of a chain, as a tree."""
    return proposal if isinstance(proposal, DraftTree) else DraftTree.chain([int(token) for token in proposal])
