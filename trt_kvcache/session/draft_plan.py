"""``plan_drafts``: the drafts that the next step verifies, in one enqueue with the pending token of each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.drafter import DraftedSequence, Drafter
from trt_kvcache.generation.request import Request
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.hidden_states import downloaded
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import LogitsWanted, StepPlan


class DraftPlan(NamedTuple):
    """Rows of the pending token and the draft of each slot, and their enqueue."""

    plan: StepPlan
    chunk: Chunk

    def draft(self, slot: int) -> Sequence[int]:
        """Return the draft of a slot: empty for an idle one, and for one without a proposal."""
        return self.plan.rows[slot][1:]


def plan_drafts(runner: Runner, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan) -> DraftPlan | None:
    """Propose tokens that follow a plan of one token for each slot; None if there are none, or no slot has room for them."""
    sequences = _sequences(runner, slots, requests, plan)
    if not sequences:
        return None
    drafts = _proposals(runner, sequences)
    width = 1 + max(map(len, drafts.values()), default=0)
    lengths = [slot.length for slot in slots]
    while width > 1:
        wide = StepPlan.of([(*row, *drafts.get(slot, ()))[:width] for slot, row in enumerate(plan.rows)], LogitsWanted.ALL)
        chunks = runner.chunks(lengths, wide)
        if len(chunks) == 1:
            return DraftPlan(wide, chunks[0])
        width //= 2  # an enqueue writes rows for all slots in its range, and one of them is nearly full
    return None


def _sequences(runner: Runner, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan) -> dict[int, DraftedSequence]:
    """Return the sequences that may have a draft in the next step."""
    found = {}
    for index in plan.running():
        request, slot = requests[index], slots[index]
        if request.drafting is not None:
            longest = min(VERIFY_WIDTH, runner.plan.max_logits_per_slot) - 1
            room = runner.cache.lengths.max_sequence_length - slot.length - 1
            limit = min(request.drafting.length(request.num_tokens), longest, request.remaining - 1, room)
            if limit > 0:
                hidden = None
                if runner.hidden_states is not None:
                    rows = runner.hidden_states.rows(index, slot.copied, slot.length)
                    hidden = rows if getattr(request.drafting.drafter, "takes_device_states", False) else downloaded(rows)
                found[index] = DraftedSequence(request, slot.row, slot.length, tuple(plan.rows[index]), limit, hidden)
    return found


def _proposals(runner: Runner, sequences: Mapping[int, DraftedSequence]) -> dict[int, list[int]]:
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


def _checked(drafter: Drafter, sequences: Sequence[DraftedSequence], proposals: Any, vocab_size: int) -> list[list[int]]:
    """Check the proposals of a drafter, which may be the caller's, and cut them to their limits."""
    try:
        drafts = [[int(token) for token in draft][: one.limit] for one, draft in zip(sequences, proposals, strict=True)]
        if all(0 <= token < vocab_size for draft in drafts for token in draft):
            return drafts
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"{type(drafter).__name__}.propose: expected token ids from 0 to {vocab_size - 1} for each of {len(sequences)} sequences, "
        f"got {proposals!r}."
    )
