"""``Runner``: device work on one stream, and the host's record of the slots of the cache.

Work on the device comes first, :meth:`Runner.apply` last. So the host needs no record of what a failed step has changed on the
device: the cache returns to the lengths of the current slots, and finite rows past a length have no effect.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.cache.cache import Cache
from trt_kvcache.engine.bindings import BindingPlan
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine
from trt_kvcache.engine.slot_adapters import SlotAdapters
from trt_kvcache.engine.step_ancestors import StepAncestors
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.errors import ConfigError, RangeError
from trt_kvcache.generation.device_trees import DeviceTrees
from trt_kvcache.kernels.draft_tree_kernels import TreeInputs
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.chunks import Chunk, bucket_widths, plan_chunks
from trt_kvcache.session.hidden_states import HiddenInputs, HiddenStates
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import Rows, StepPlan
from trt_kvcache.session.token_paths import TokenPaths


class _States(Enum):
    """Relation of the current state buffer of the cache to the current slots. States cannot be shortened as K and V can."""

    OF_SLOTS = auto()
    #: States after one more step; the other buffer still has the states of the slots.
    ONE_STEP_FURTHER = auto()
    #: The states of the slots are overwritten.
    OTHERS = auto()


class _Held(NamedTuple):
    slots: tuple[Slot, ...]
    states: _States


class Runner:
    """Feeds tokens to an engine, commits their lengths, and holds the current slots."""

    def __init__(self, engine: Engine, cache: Cache, *, names: TensorNames = DEFAULT_NAMES) -> None:
        if cache.mamba_config is not None and not cache.mamba_config.ping_pong:
            raise ConfigError("cache: expected two buffers of states, ping_pong=True, got one: a step that fails could not be repeated.")
        self.engine = engine
        self.cache = cache
        self._recurrent = cache if cache.states is not None else None
        #: True if slots hold states, which cannot return to an earlier token.
        self.has_states = cache.states is not None
        self.plan = BindingPlan(engine, cache, names=names)
        self.stream = cache.memory.create_stream()
        self._held = _Held((), _States.OF_SLOTS)
        self._slot_adapters: SlotAdapters | None = getattr(engine, "slot_adapters", None)
        self._ancestors: StepAncestors | None = getattr(engine, "ancestors", None)
        # Of each active slot of the cache, in enqueues from now on. Slots that are not current yet may be among them.
        self._adapters: tuple[str | None, ...] = ()
        #: Rows past the lengths that a commit can still take: those of a verified draft, or of a step that was enqueued ahead. Any other
        #: work on the device overwrites them.
        self.uncommitted: object = None
        #: Called when the host is about to wait for the device, which is when other threads cost a step nothing.
        self.before_wait: Callable[[], None] = _do_nothing
        # First slot and new tokens of each slot of the last enqueue, with states.
        self._ran: tuple[int, tuple[int, ...]] = (0, ())
        self._buffers = StepBuffers(
            cache.memory,
            max_batch_size=cache.max_batch_size,
            max_width=self.plan.max_width,
            vocab_size=self.plan.vocab_size,
            index_dtypes=(self.plan.input_ids.dtype, self.plan.last_token_ids.dtype),
            logits_dtype=self.plan.logits.dtype,
            max_logits_per_slot=self.plan.max_logits_per_slot,
            has_states=self.has_states,
        )
        inputs, outputs = getattr(engine, "hidden_inputs", None), getattr(engine, "hidden_states", None)
        #: Hidden states that a draft head reads beside its tokens; None for other models.
        self.hidden_inputs: HiddenInputs | None = None
        #: Hidden states of each token in the cache, for a draft head; None if the engine was opened without them.
        self.hidden_states: HiddenStates | None = None
        self._paths: TokenPaths | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            self.hidden_inputs = HiddenInputs.of(inputs, outputs, cache)
            self.hidden_states = HiddenStates.of(outputs if inputs is None else None, cache)
            if self.takes_trees:
                self._paths = TokenPaths(cache.memory, max_slots=cache.max_batch_size)
            undo.pop_all()

    @property
    def takes_trees(self) -> bool:
        """True if new tokens of a slot may be a tree, not only a chain."""
        return self._ancestors is not None

    # --- current slots ---

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The active slots. A new tuple after each change, so that ``is`` tells whether there was one."""
        return self._held.slots

    def apply(self, slots: Sequence[Slot]) -> None:
        """Make slots current: the cache holds their tokens. One assignment, so an interrupt comes before it or after it."""
        self._held = _Held(tuple(slots), _States.OF_SLOTS)

    def use_adapters(self, adapters: Sequence[str | None]) -> None:
        """Run the active slots of the cache with these adapters from now on, by name. Inside :meth:`work`."""
        self._adapters = tuple(adapters)

    def note(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        """Make slots current that hold the same tokens as before, and return them. Pending tokens and samplers differ."""
        self._held = _Held(tuple(slots), self._held.states)
        return self._held.slots

    @contextmanager
    def work(self, *, continues: bool = False) -> Iterator[None]:
        """Return a context manager around device work. If it raises, the cache returns to the current slots.

        With ``continues``, the work looks at :attr:`uncommitted` itself, and clears it before anything overwrites its rows.
        """
        if not continues:
            self.uncommitted = None
        try:
            yield
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:
        """Return the cache to the current slots. If their states are overwritten, no slot is active."""
        self.uncommitted = None
        slots, states = self._held
        if states is _States.ONE_STEP_FURTHER and self._recurrent is not None:
            self._recurrent.swap()
        if states is _States.OTHERS and any(slot.length for slot in slots):
            slots = ()
        self._held = _Held(slots, _States.OF_SLOTS)
        self.use_adapters([slot.adapter for slot in slots])
        if not self.cache.closed:
            self.cache.reset_for_new_sequences([slot.length for slot in slots], stream=self.stream)

    def clear_rows(self) -> None:
        """Zero all rows of the active slots, stream-ordered, and make no slot active."""
        if self.cache.kv_layers is not None:
            self.cache.kv_layers.zero(self.cache.active_batch_size, stream=self.stream)
        self._held = _Held((), _States.OF_SLOTS)
        self.recover()

    def overwrite_states(self) -> None:
        """Say that states of the current slots are about to be overwritten."""
        if self._recurrent is not None:
            self._held = self._held._replace(states=_States.OTHERS)

    def checked_lengths(self) -> tuple[int, ...]:
        """Return the lengths of the cache."""
        lengths = self.cache.host_kv_cache_lengths
        known = tuple([slot.length for slot in self._held.slots])
        if known != lengths:
            raise RangeError(
                f"cache lengths: expected {known}, the tokens that this session has run, got {lengths}. "
                "Change them through the session (rewind, append), or start new sequences with prefill."
            )
        return lengths

    # --- enqueues ---

    def chunks(self, lengths: Sequence[int], plan: StepPlan, *, limit: int | None = None) -> list[Chunk]:
        """Cut a plan for slots of these lengths into enqueues that the engine accepts, of at most ``limit`` tokens a slot."""
        every_logit = plan.wants_all
        max_width = self.plan.max_logits_per_slot if every_logit else self.plan.max_width
        # A verification of states must be one enqueue, which a bucket that does not fit would split.
        buckets = () if every_logit and self.has_states else getattr(self.engine, "width_buckets", ())
        coarse = getattr(self.engine, "coarse_width_buckets", ()) if limit is not None and buckets else ()
        if limit is not None:
            max_width = min(max_width, limit)
        chunks = plan_chunks(
            lengths,
            plan.counts,
            max_width=max_width,
            max_sequence_length=self.cache.lengths.max_sequence_length,
            can_start_at=self.plan.can_start_at,
            buckets=bucket_widths(coarse or buckets, self.engine.profiles, max_width),
            pads=bool(coarse),
        )
        for chunk in chunks:
            self.plan.profile_for(chunk.count, chunk.width, chunk.width if every_logit else 1)
        return chunks

    def check_all_batch_sizes(self) -> None:
        """Check that the engine accepts every number of slots, for a decode step and for the widest prefill."""
        for count in range(1, self.cache.max_batch_size + 1):
            for width in (1, self.plan.max_width):
                self.plan.profile_for(count, width)

    def enqueue_decode(self, plan: StepPlan) -> None:
        """Enqueue a plan of one token at most for each active slot, in one enqueue; nothing is committed. Does not wait."""
        self._buffers.write_one_token_each([row[0] if row else 0 for row in plan.rows], stream=self.stream)
        self._take(0, plan.counts)
        self.enqueue_next(plan.counts)

    def enqueue_next(self, takes: Sequence[int]) -> None:
        """Enqueue the tokens that are in :meth:`device_views`, one for each slot from slot 0; nothing is committed. Does not wait.

        ``takes``: 1 for each slot, or 0 where the token is not wanted.
        """
        count = len(takes)
        self._buffers.want_first_logits(count, stream=self.stream)
        self.plan.prepare(0, count, 1, self._buffers)
        self._enqueue(Chunk(0, tuple(takes), 1))

    def tree_inputs(self, trees: DeviceTrees, count: int, width: int) -> TreeInputs:
        """Return the inputs of :meth:`enqueue_trees`, which :meth:`DeviceTrees.grow` writes."""
        assert self._ancestors is not None
        ids, _ = self._buffers.device_views(count * width)
        return trees.inputs(ids, *self._ancestors.written_on_device(count, width))

    def enqueue_trees(self, trees: DeviceTrees, count: int, width: int) -> None:
        """Enqueue the trees in :meth:`tree_inputs`, from slot 0 on, for the logits of all tokens; nothing is committed.

        Does not wait. A draft head reads its own state of the parent of each token.
        """
        self._buffers.want_every_logit(count, width, stream=self.stream)
        self.plan.prepare(0, count, width, self._buffers, logits=width)
        if self.hidden_inputs is not None:
            self.hidden_inputs.load_parents(trees.of_slots(count), width, stream=self.stream)
        self._enqueue(Chunk(0, (0,) * count, width), is_written=True)

    def device_views(self, count: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return the input token ids and the logits, on the device, of a decode step of ``count`` slots."""
        return self._buffers.device_views(count)

    def _take(self, first: int, new_lengths: Sequence[int]) -> None:
        """Say how many tokens of each slot the next enqueue runs."""
        if self.has_states:
            self._ran = first, tuple(new_lengths)
            self._buffers.write_new_lengths(new_lengths, stream=self.stream)

    def _enqueue(self, chunk: Chunk, parents: Rows | None = None, *, is_written: bool = False) -> None:
        """``is_written``: kernels have written the trees of the enqueue."""
        self._before_enqueue(chunk, parents, is_written=is_written)
        if self.hidden_inputs is not None:
            self.hidden_inputs.load(self._starts(chunk), chunk, stream=self.stream)
        self.engine.enqueue(self.stream)
        if self.hidden_inputs is not None:
            self.hidden_inputs.keep(chunk, stream=self.stream)
        if self.hidden_states is not None:
            self.hidden_states.store(self._starts(chunk), chunk, stream=self.stream)

    def _before_enqueue(self, chunk: Chunk, parents: Rows | None = None, *, is_written: bool = False) -> None:
        self.uncommitted = None
        if self._held.states is _States.ONE_STEP_FURTHER:
            self.overwrite_states()  # the engine writes its states into the buffer of the current slots
        if self._slot_adapters is not None:
            self._slot_adapters.write(self._adapters[chunk.first : chunk.end], stream=self.stream)
        if self._ancestors is not None and not is_written and (parents is not None or self._ancestors.in_use):
            self._ancestors.write(parents, chunk.width, stream=self.stream)

    def _starts(self, chunk: Chunk) -> Sequence[int]:
        return self.cache.host_kv_cache_lengths[chunk.first : chunk.end]

    def run(self, chunk: Chunk, rows: Rows, *, every_logit: bool, parents: Rows | None = None) -> None:
        """Enqueue the new tokens of a contiguous range of slots, or trees of them; nothing is committed. Does not wait."""
        if chunk.first:
            self._buffers.write_start_index(self.cache.host_kv_cache_lengths[chunk.first : chunk.end], stream=self.stream)
        self._buffers.write_rows(rows, chunk.width, stream=self.stream, every_logit=every_logit)
        self._take(chunk.first, chunk.takes)
        self.plan.prepare(chunk.first, chunk.count, chunk.width, self._buffers, logits=chunk.width if every_logit else 1)
        self._enqueue(chunk, parents)

    def run_from_device(self, chunk: Chunk) -> None:
        """Enqueue rows whose token ids are in :meth:`device_views`; all logits are wanted, and nothing is committed. Does not wait."""
        if chunk.first:
            self._buffers.write_start_index(self.cache.host_kv_cache_lengths[chunk.first : chunk.end], stream=self.stream)
        self._buffers.want_every_logit(chunk.count, chunk.width, stream=self.stream)
        self._take(chunk.first, chunk.takes)
        self.plan.prepare(chunk.first, chunk.count, chunk.width, self._buffers, logits=chunk.width)
        self._enqueue(chunk)

    # --- rows past the lengths of the cache, which begin where only the device knows ---

    def input_ids(self, count: int) -> DeviceTensor:
        """Return the token ids ``[count]`` of the next enqueue."""
        return self._buffers.input_ids[:count]

    def starts(self, count: int) -> DeviceTensor:
        """Return the positions ``[count]`` of the first rows of :meth:`run_ahead`."""
        return self._buffers.start_index[:count]

    def last_from_device(self, count: int) -> DeviceTensor:
        """Return the index of the token in each row of :meth:`run_ahead` whose logits are wanted."""
        return self._buffers.last_from_device(count)

    def run_ahead(self, count: int, width: int, *, every_logit: bool) -> None:
        """Enqueue rows of the first slots from :meth:`starts` on, with ids in :meth:`input_ids`; nothing is committed. Does not wait.

        The caller copies the hidden states that a head reads. Without ``every_logit``, the logits are those of :meth:`last_from_device`.
        """
        chunk = Chunk(0, (width,) * count)
        if every_logit:
            self._buffers.want_every_logit(count, width, stream=self.stream)
        self.plan.prepare(0, count, width, self._buffers, logits=width if every_logit else 1, starts_in_buffers=True)
        self._before_enqueue(chunk)
        self.engine.enqueue(self.stream)
        if self.hidden_states is not None:
            self.hidden_states.store_from(self.starts(count), chunk, stream=self.stream)

    def run_next_ahead(self, count: int) -> None:
        """Enqueue one more token of the first slots, as :meth:`run_ahead` does."""
        self._buffers.want_first_logits(count, stream=self.stream)
        self.run_ahead(count, 1, every_logit=False)

    def prefill(self, chunk: Chunk, rows: Rows, *, every_logit: bool = False, parents: Rows | None = None) -> None:
        """Enqueue the new tokens of a contiguous range of slots and commit. Does not wait."""
        self.run(chunk, rows, every_logit=every_logit, parents=parents)
        after = self.cache.active_batch_size - chunk.end
        self.commit([0] * chunk.first + [*chunk.takes] + [0] * after)

    def commit_paths(self, starts: Sequence[int], paths: Rows) -> None:
        """Commit the tokens of the last enqueue at the indices ``paths``, after ``starts`` tokens of each slot. Does not wait."""
        if any(path[-1] >= len(path) for path in paths if path):  # not the first rows
            assert self._paths is not None
            if self.cache.kv_layers is not None:
                on_device = self._paths.write(paths, stream=self.stream)
                self.cache.kv_layers.keep_paths(self.cache.kv_cache_lengths, *on_device, stream=self.stream)
            if self.hidden_states is not None:
                self.hidden_states.keep_paths(starts, paths, stream=self.stream)
        self.commit(tuple(map(len, paths)))

    def commit(self, increments: int | Sequence[int]) -> None:
        """Count tokens that the last enqueue has run, or will run, and make the states after them current. Does not wait."""
        self.cache.commit_sequence_length(increments, stream=self.stream)
        if self._recurrent is not None:
            self._move_states(self._recurrent, increments)

    def _move_states(self, cache: Cache, increments: int | Sequence[int]) -> None:
        first, ran = self._ran
        active = cache.active_batch_size
        taken = [increments] * active if isinstance(increments, int) else increments
        is_first = self._held.states is _States.OF_SLOTS
        self.overwrite_states()
        if first or len(ran) != active:
            cache.copy_back(first, len(ran), stream=self.stream)
            return
        for slot, (run, kept) in enumerate(zip(ran, taken, strict=True)):
            if run and not kept:
                cache.keep_states(slot, stream=self.stream)
        cache.swap()
        if is_first:
            self._held = self._held._replace(states=_States.ONE_STEP_FURTHER)

    def logits(self, count: int) -> np.ndarray[Any, Any]:
        """Wait for the last enqueue and return its logits."""
        self.before_wait()
        logits = self._buffers.read_logits(count, stream=self.stream)
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)

    def every_logit(self, chunk: Chunk) -> np.ndarray[Any, Any]:
        """Wait for the last enqueue, which was to return all logits, and return them."""
        return self.logits(chunk.count * chunk.width).reshape(chunk.count, chunk.width, -1)

    def synchronize(self) -> None:
        """Wait until everything that was enqueued is done."""
        self.cache.memory.synchronize(self.stream)

    def close(self) -> None:
        """Release the buffers. Idempotent."""
        for owner in (self._buffers, self.hidden_states, self.hidden_inputs, self._paths):
            if owner is not None:
                owner.close()


def _do_nothing() -> None:
    pass
