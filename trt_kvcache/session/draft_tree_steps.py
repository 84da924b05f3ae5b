"""``DraftTreeSteps``: generates the drafts of a draft model for all slots as trees, one level of each tree at a time.

On a GPU, trees grow on the device: the host enqueues all levels, then waits once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import CapacityError, EngineError, LayoutError
from trt_kvcache.generation.device_trees import DeviceTrees, WantedTree
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.growing_tree import GrowingTree
from trt_kvcache.generation.request import Request
from trt_kvcache.kernels.sampling_workspace import MAX_VOCAB_SIZE
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.chunks import Chunk, from_first_slot
from trt_kvcache.session.draft_steps import Drafted
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.step_plan import LogitsWanted, StepPlan


class _Enqueues(NamedTuple):
    """Enqueues of trees on the device."""

    tokens: StepPlan
    #: The enqueue of the tokens before the trees, from slot 0 on.
    first: Chunk
    #: Tokens of a tree in each slot, padding included.
    width: int
    #: Number of levels; all but the last one run.
    levels: int


class DraftTreeSteps:
    """Runs tokens of slots and generates trees after them. Then a slot holds these tokens, and nothing of its tree."""

    # Each level runs the whole tree again, in an enqueue that is not committed: the first tokens of all paths are few, and attention needs
    # no mask over the rows of earlier enqueues.

    def __init__(self, runner: Runner, batch: Batch, *, vocab_size: int, max_tokens: int) -> None:
        self._runner, self._batch, self._vocab_size = runner, batch, vocab_size
        self._max_tokens = min(max_tokens, runner.plan.max_logits_per_slot)
        self._trees: DeviceTrees | None = None
        #: True if trees grow on the device. Tests set it over host memory.
        self.on_device = not runner.cache.memory.is_host and self.can_be_on_device

    @property
    def can_be_on_device(self) -> bool:
        """True if the engine has ids and logits that :class:`DeviceTrees` takes, of tokens that the large model has."""
        plan = self._runner.plan
        is_taken = (plan.input_ids.dtype, plan.logits.dtype) == ("int32", "float32")
        return is_taken and plan.vocab_size <= min(self._vocab_size, MAX_VOCAB_SIZE)

    @nvtx_range("draft")
    def run(self, drafted: Mapping[int, Drafted]) -> dict[int, DraftTree]:
        """Return the draft of each slot. Logits that are not finite end a path, but not the sequence."""
        self._read_parents({})
        if not self.on_device:
            return self._run_on_host(drafted)
        if len(self._runner.chunks(self._batch.held, self._tokens(drafted))) > 1:  # the first tokens of a long sequence
            self._batch.run([drafted[slot].tokens[:-1] if slot in drafted else () for slot in self._slots])
            drafted = {slot: one._replace(tokens=one.tokens[-1:]) for slot, one in drafted.items()}
        enqueues = self._enqueues(drafted)
        return self._run_on_host(drafted) if enqueues is None else self._run_on_device(drafted, enqueues)

    @property
    def _slots(self) -> range:
        return range(len(self._batch))

    def _tokens(self, drafted: Mapping[int, Drafted]) -> StepPlan:
        return StepPlan.of([drafted[slot].tokens if slot in drafted else () for slot in self._slots])

    def _limit(self, one: Drafted) -> int:
        return min(one.tree_limit, self._max_tokens)

    def _enqueues(self, drafted: Mapping[int, Drafted]) -> _Enqueues | None:
        """Return the enqueues of trees; None if slots have no room for the rows that they pad."""
        tokens, held = self._tokens(drafted), self._batch.held
        rows = [(0,) * self._limit(drafted[slot]) if slot in drafted else () for slot in self._slots]
        after = [length + count for length, count in zip(held, tokens.counts, strict=True)]
        first, trees = self._one_chunk(held, tokens), self._one_chunk(after, StepPlan.of(rows, LogitsWanted.ALL))
        levels = max(min(one.limit, self._limit(one)) for one in drafted.values())
        if first is None or (trees is None and levels > 1):
            return None
        return _Enqueues(tokens, first, trees.width if trees is not None else 0, levels)

    def _one_chunk(self, lengths: Sequence[int], plan: StepPlan) -> Chunk | None:
        """Return one enqueue of a plan, from slot 0 on; None if there must be several."""
        try:
            [chunk, *more] = self._runner.chunks(lengths, plan)
        except LayoutError:  # a slot is full
            return None
        return None if more else from_first_slot(chunk, lengths, self._batch.max_sequence_length)

    def _run_on_device(self, drafted: Mapping[int, Drafted], enqueues: _Enqueues) -> dict[int, DraftTree]:
        runner, stream, (plan, first, width, levels) = self._runner, self._runner.stream, enqueues
        count = first.count
        trees = self._trees = self._trees or DeviceTrees(
            runner.cache.memory,
            max_slots=runner.cache.max_batch_size,
            max_width=min(runner.plan.max_logits_per_slot, MAX_TREE_TOKENS),
            vocab_size=runner.plan.vocab_size,
            stream=stream,
        )
        wanted = [
            WantedTree(drafted[slot].request.positions((0,)), self._limit(drafted[slot]), drafted[slot].limit) if slot in drafted else None
            for slot in range(count)
        ]
        with runner.work():
            runner.run(first, plan.rows[:count], every_logit=False)
            runner.commit(plan.increments)
            trees.begin(wanted, stream=stream)
            for level in range(1, levels + 1):
                if level > 1:
                    runner.enqueue_trees(trees, count, width)
                _, logits = runner.device_views(count * width if level > 1 else count)
                inputs = runner.tree_inputs(trees, count, width if level < levels else 0)
                trees.grow(logits, level, inputs, slots=count, stream=stream)
            grown = trees.download(count, stream=stream)
            runner.before_wait()
            found = grown.read()
            runner.apply(plan.applied(runner.slots))
        return {slot: found[slot] for slot in drafted}

    def _run_on_host(self, drafted: Mapping[int, Drafted]) -> dict[int, DraftTree]:
        growing = {slot: GrowingTree(limit=self._limit(one), depth=one.limit) for slot, one in drafted.items()}
        logits = self._batch.append(self._tokens(drafted).rows)[:, None]
        while True:
            for slot, tree in growing.items():
                if tree.frontier:
                    rows = logits[slot, [max(index, 0) for index in tree.frontier], : self._vocab_size]
                    level = tree.depth
                    tree.grow(rows, [self._guess(drafted[slot].request, row, level) for row in rows])
            trees = {slot: tree.tree for slot, tree in growing.items()}
            if not any(tree.frontier for tree in growing.values()):
                return trees
            running = [trees[slot] if slot in growing and growing[slot].frontier else DraftTree((), ()) for slot in self._slots]
            self._read_parents({slot: tree.parents_before for slot, tree in growing.items() if tree.frontier})
            try:
                if not self._states_are_kept(running):
                    return trees
                logits = self._batch.verify([tree.tokens for tree in running], [tree.parents for tree in running])
            except (CapacityError, LayoutError):  # a slot is nearly full: nothing was changed
                return trees

    def _states_are_kept(self, running: Sequence[DraftTree]) -> bool:
        """Return False if a head needs several enqueues: the next level would read states of all of them, which the last one overwrites."""
        plan = StepPlan.of([tree.tokens for tree in running], LogitsWanted.ALL)
        return self._runner.hidden_inputs is None or len(self._runner.chunks(self._batch.held, plan)) == 1

    def _read_parents(self, parents: Mapping[int, Sequence[int]]) -> None:
        """Have a draft head read its own state of the parent of each token."""
        if self._runner.hidden_inputs is not None:
            self._runner.hidden_inputs.read_parents(parents)

    def _guess(self, request: Request, logits: Logits, count: int) -> int | None:
        try:
            return request.guess(logits, count)
        except EngineError:
            return None

    def close(self) -> None:
        """Release the trees on the device. Idempotent."""
        if self._trees is not None:
            self._trees.close()
