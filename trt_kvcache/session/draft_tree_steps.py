"""``DraftTreeSteps``: generates the drafts of a draft model for all slots as trees, one level of each tree at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import CapacityError, EngineError, LayoutError
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.growing_tree import GrowingTree
from trt_kvcache.generation.request import Request
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.draft_steps import Drafted
from trt_kvcache.session.runner import Runner


class DraftTreeSteps:
    """Runs tokens of slots and generates trees after them. Then a slot holds these tokens, and nothing of its tree."""

    # Each level runs the whole tree again, in an enqueue that is not committed: the first tokens of all paths are few, and attention needs
    # no mask over the rows of earlier enqueues. Tokens are chosen on the host.

    def __init__(self, runner: Runner, batch: Batch, *, vocab_size: int, max_tokens: int) -> None:
        self._inputs, self._batch, self._vocab_size = runner.hidden_inputs, batch, vocab_size
        self._max_tokens = min(max_tokens, runner.plan.max_logits_per_slot)

    @nvtx_range("draft")
    def run(self, drafted: Mapping[int, Drafted]) -> dict[int, DraftTree]:
        """Return the draft of each slot. Logits that are not finite end a path, but not the sequence."""
        slots = range(len(self._batch))
        growing = {slot: GrowingTree(limit=min(one.tree_limit, self._max_tokens), depth=one.limit) for slot, one in drafted.items()}
        self._read_parents({})
        logits = self._batch.append([drafted[slot].tokens if slot in drafted else () for slot in slots])[:, None]
        while True:
            for slot, tree in growing.items():
                if tree.frontier:
                    rows = logits[slot, [max(index, 0) for index in tree.frontier], : self._vocab_size]
                    level = tree.depth
                    tree.grow(rows, [self._guess(drafted[slot].request, row, level) for row in rows])
            trees = {slot: tree.tree for slot, tree in growing.items()}
            if not any(tree.frontier for tree in growing.values()):
                return trees
            running = [trees[slot] if slot in growing and growing[slot].frontier else DraftTree((), ()) for slot in slots]
            self._read_parents({slot: tree.parents_before for slot, tree in growing.items() if tree.frontier})
            try:
                logits = self._batch.verify([tree.tokens for tree in running], [tree.parents for tree in running])
            except (CapacityError, LayoutError):  # a slot is nearly full: nothing was changed
                return trees

    def _read_parents(self, parents: Mapping[int, Sequence[int]]) -> None:
        """Have a draft head read its own state of the parent of each token."""
        if self._inputs is not None:
            self._inputs.read_parents(parents)

    def _guess(self, request: Request, logits: Logits, count: int) -> int | None:
        try:
            return request.guess(logits, count)
        except EngineError:
            return None

    def close(self) -> None:
        """Release nothing: there is no sampler on the device."""
