"""What a session checks of prompts and turns before it changes anything."""

from collections.abc import Sequence

from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.errors import CapacityError, ShapeError
from trt_kvcache.session.batch import ActiveSequences

Rows = Sequence[Sequence[int]]


class SlotChecks:
    """Checks rows of tokens against the slots that they are for. Raises :class:`ShapeError` or :class:`CapacityError`."""

    def __init__(self, sequences: ActiveSequences, cache: KVCacheBase) -> None:
        self._sequences = sequences
        self._cache = cache

    def new_sequences(self, rows: Rows, *, reuse: bool) -> None:
        """Check that rows can start new sequences."""
        slots = self._cache.kv_config.max_batch_size
        if not 1 <= len(rows) <= slots:
            raise ShapeError(f"prompts: expected 1 to max_batch_size={slots} of them, got {len(rows)}.")
        self.not_empty(rows)
        self.room([0] * len(rows), rows)
        if reuse:
            self.one_per_slot("prompts", len(rows))

    def next_turns(self, rows: Rows) -> None:
        """Check that rows can follow what the active slots hold and what is pending."""
        self.one_per_slot("prompts", len(rows))
        self.not_empty(rows)
        self.room(self._sequences.lengths, [[*held, *row] for held, row in zip(self._sequences.pending, rows, strict=True)])

    def not_empty(self, rows: Rows) -> None:
        """Check that every row has a token."""
        for index, row in enumerate(rows):
            if not row:
                raise ShapeError(f"prompts[{index}]: expected at least one token, got none.")

    def one_per_slot(self, what: str, count: int) -> None:
        """Check that there is one of something for each active slot."""
        self._sequences.check_lengths()
        active = self._cache.active_batch_size
        if count != active:
            raise ShapeError(f"{what}: expected one for each of {active} active slots, got {count}.")

    def room(self, lengths: Sequence[int], rows: Rows) -> None:
        """Check that rows fit behind so many tokens."""
        limit = self._sequences.max_sequence_length
        for slot, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            if length + len(row) > limit:
                adds = f"slot {slot} holds {length} tokens; adding {len(row)}" if length else f"prompt {slot} has {len(row)} tokens; that"
                raise CapacityError(f"{adds} exceeds max_sequence_length={limit}. Nothing was changed.")
