"""``plan_chunks``: cut prompts of different lengths into enqueues. A pure function over lengths.

TensorRT's KVCacheUpdate of padded width ``c`` writes ``c`` rows for every slot of the enqueue, so ``length + c <= S`` must hold for all of
them. The rows after a slot's own new tokens are padding; they are overwritten before they become live.

Engines that compile, tune or capture each shape get few widths: buckets. A long prompt runs in several chunks whose widths are buckets, all
filled but the last. The last chunk is padded if at most one row in eight is padding then, since each further enqueue reads all weights
again; otherwise it is cut again. A prompt of fewer than 64 tokens is one padded chunk. If other requests decode in the same step, chunks
are shorter. If the engine has ``coarse_width_buckets``, these shorter chunks have only those widths, and the last one is padded even if
more than one row in eight is padding then. The number of slots has no buckets: slots that pad a bucket would be written to, where a
``SequenceCacheManager`` keeps sequences that wait. B bounds it anyway.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import LayoutError

#: A slot whose free rows allow less than this share of the wanted width is enqueued alone.
_MIN_WIDTH_SHARE = 0.5

#: Prompts below this many tokens run in one enqueue, however much of it is padding.
_MIN_SPLIT = 64
#: In a prompt that may be split, padding is at most one row in ``_ROWS_PER_PADDING``.
_ROWS_PER_PADDING = 8


@dataclass(frozen=True)
class Chunk:
    """One enqueue over a contiguous run of slots."""

    first: int
    #: New tokens of each slot; 0 for a slot whose row is computed and not committed.
    takes: tuple[int, ...]
    #: Rows that are written at least, padding included.
    min_width: int = 0

    @property
    def count(self) -> int:
        """Slots in the run."""
        return len(self.takes)

    @property
    def end(self) -> int:
        """One past the last slot of the run."""
        return self.first + len(self.takes)

    @property
    def width(self) -> int:
        """Rows that are written for every slot of the run."""
        return max(self.min_width, *self.takes)


def from_first_slot(chunk: Chunk, lengths: Sequence[int], max_sequence_length: int) -> Chunk | None:
    """Return an enqueue over the slots before it too, whose rows are not wanted; None if one of its slots lacks room for them."""
    if max(lengths[: chunk.end]) + chunk.width > max_sequence_length:
        return None
    return Chunk(0, (0,) * chunk.first + chunk.takes, chunk.width)


def bucket_widths(buckets: Sequence[int], profiles: Iterable[EngineProfile], max_width: int) -> list[int]:
    """Return the buckets of an engine that a profile takes, up to the maximum, which becomes one if a larger bucket is left out."""
    profiles = list(profiles)
    widths = [width for width in buckets if width < max_width]
    if len(widths) < len(buckets):
        widths.append(max_width)
    return [width for width in widths if any(one.min_width <= width <= one.max_width for one in profiles)]


def plan_chunks(
    lengths: Sequence[int],
    remaining: Sequence[int],
    *,
    max_width: int,
    max_sequence_length: int,
    can_start_at: Callable[[int], bool] = lambda slot: True,
    buckets: Sequence[int] = (),
    pads: bool = False,
) -> list[Chunk]:
    """Cut the remaining tokens into enqueues, in order; widths up to the largest bucket are buckets. ``length + remaining <= S``.

    ``pads``: each prompt's last one is a whole bucket. Raises LayoutError if no enqueue may start between a full slot and a later one.
    """
    planner = _Planner(list(lengths), list(remaining), max_width, max_sequence_length, can_start_at, buckets, tuple(remaining), pads)
    chunks: list[Chunk] = []
    while any(planner.remaining):
        chunks += planner.next_chunks(0, len(planner.lengths))
    return chunks


@dataclass
class _Planner:
    """Lengths and remaining tokens as they will be after the chunks so far."""

    lengths: list[int]
    remaining: list[int]
    max_width: int
    max_sequence_length: int
    can_start_at: Callable[[int], bool]
    buckets: Sequence[int]
    #: New tokens of each slot in all chunks.
    counts: tuple[int, ...]
    pads: bool

    def next_chunks(self, low: int, high: int) -> Iterator[Chunk]:
        """Return chunks that do not overlap and advance every slot of ``low .. high - 1`` that can be advanced."""
        waiting = [slot for slot in range(low, high) if self.remaining[slot]]
        if not waiting:
            return
        first, end = self._last_start(waiting[0]), waiting[-1] + 1
        longest = max(range(first, end), key=lambda slot: self.lengths[slot])
        room = self.max_sequence_length - self.lengths[longest]
        wanted = min(self.max_width, max(self.remaining[first:end]))
        cuts = [slot for slot in (longest, longest + 1) if first < slot < end and self._reachable_from(slot)]
        if room < wanted * _MIN_WIDTH_SHARE and cuts:
            for part_low, part_high in itertools.pairwise([first, *cuts, end]):
                yield from self.next_chunks(part_low, part_high)
        elif room:
            yield self._advance(first, end, self._width(first, end, room))
        else:
            raise LayoutError(
                f"slot {waiting[-1]}: slot {longest} before it is full, and no view that starts between them is aligned to 256 bytes. "
                "Choose max_sequence_length so that H * S * D * itemsize is a multiple of 256."
            )

    def _last_start(self, slot: int) -> int:
        """Return the last slot, up to ``slot``, that an enqueue may start at."""
        return next(start for start in range(slot, -1, -1) if self._starts_at(start))

    def _reachable_from(self, low: int) -> bool:
        """Tell whether the first waiting slot from ``low`` on can be reached without the slots before ``low``."""
        waiting = next(slot for slot in range(low, len(self.remaining)) if self.remaining[slot])
        return self._last_start(waiting) >= low

    def _width(self, first: int, end: int, room: int) -> int:
        """Return the width of the next enqueue over slots that have room for ``room`` rows."""
        longest = max(range(first, end), key=lambda slot: self.remaining[slot])
        left, limit = self.remaining[longest], min(room, self.max_width)
        if not self.buckets or min(left, limit) > self.buckets[-1]:
            return min(left, limit)
        padded = next((width for width in self.buckets if left <= width <= limit), None)
        if padded is not None:
            rows = self.counts[longest] - left + padded
            if self.pads or self.counts[longest] < _MIN_SPLIT or (padded - left) * _ROWS_PER_PADDING <= rows:
                return padded
        return max(width for width in self.buckets if width <= min(left, limit))

    def _advance(self, first: int, end: int, width: int) -> Chunk:
        """Take up to ``width`` tokens of each slot.

        A slot must not become full as long as a later slot waits that only an enqueue over both can reach. Such a slot gets no tokens yet.
        """
        takes: list[int] = []
        blocked = False
        for slot in range(end - 1, first - 1, -1):
            take = min(self.remaining[slot], width)
            if blocked and self.lengths[slot] + take == self.max_sequence_length:
                take = 0
            blocked = not self._starts_at(slot) and (blocked or take < self.remaining[slot])
            self.lengths[slot] += take
            self.remaining[slot] -= take
            takes.append(take)
        return Chunk(first, tuple(reversed(takes)), width if self.buckets else 0)

    def _starts_at(self, slot: int) -> bool:
        return slot == 0 or self.can_start_at(slot)
