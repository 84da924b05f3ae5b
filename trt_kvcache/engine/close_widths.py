"""``eighths``: widths of enqueues that are at most an eighth apart, so that a prompt between two of them has little padding."""

from collections.abc import Iterator

_PER_OCTAVE = 8


def eighths(*starts: int) -> Iterator[int]:
    """Yield eight widths from each start, a multiple of 8, to its double. At most one row in nine is padding up to the next of them."""
    for start in starts:
        yield from range(start + start // _PER_OCTAVE, 2 * start + 1, start // _PER_OCTAVE)
