"""Widths of the enqueues of TensorRT engines: padding, enqueues and shapes for every length of a prompt, and their estimated time."""

from collections.abc import Sequence

import pytest

from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.session.chunks import bucket_widths, plan_chunks
from trt_kvcache.trt.graph_engine import MAX_PREFILL_GRAPHS
from trt_kvcache.trt.width_buckets import WIDTH_BUCKETS

POWERS = [1 << exponent for exponent in range(31)]
EVERY_LENGTH = range(1, 1025)


def widths(count: int, max_width: int, *, limit: int = 4096, length: int = 0, buckets: Sequence[int] = WIDTH_BUCKETS) -> list[int]:
    """Return the widths of the enqueues of a prompt, in an engine that takes up to ``max_width`` tokens."""
    profiles = decoder_profiles(max_batch_size=1, max_prefill_length=max_width)
    allowed = bucket_widths(buckets, profiles, max_width)
    chunks = plan_chunks([length], [count], max_width=max_width, max_sequence_length=limit, buckets=allowed)
    assert all(chunk.width in allowed for chunk in chunks)
    assert sum(chunk.takes[0] for chunk in chunks) == count
    return [chunk.width for chunk in chunks]


@pytest.mark.parametrize("max_width", [64, 100, 256, 500, 512, 1000, 1024, 2048])
def test_from_64_tokens_on_at_most_one_row_in_eight_is_padding(max_width):
    for count in EVERY_LENGTH:
        found = widths(count, max_width)
        rows = sum(found)
        assert rows < 2 * count
        assert count < 64 or (rows - count) * 8 <= rows, (count, found)


def test_up_to_512_tokens_a_prompt_is_one_enqueue_and_up_to_1024_at_most_two():
    for count in EVERY_LENGTH:
        assert len(widths(count, 512)) == (count + 511) // 512
        assert len(widths(count, 2048)) <= 2


def test_the_default_engine_has_31_widths():
    assert len({width for count in EVERY_LENGTH for width in widths(count, 512)}) == 31 < MAX_PREFILL_GRAPHS
    assert [width for width in WIDTH_BUCKETS if width <= 80] == [1, 2, 4, 8, 16, 32, 64, 72, 80]
    assert [width for width in WIDTH_BUCKETS if width >= 448] == [448, 480, *POWERS[9:]]
    assert widths(600, 512) == [512, 88]
    assert widths(100, 512) == [104]


def test_no_row_is_past_the_end_of_a_slot():
    for count in EVERY_LENGTH:
        for room in (0, 1, 7, 40):
            rows = sum(widths(count, 512, length=11, limit=11 + count + room))
            assert rows <= count + room


@pytest.mark.parametrize("rows_of_a_read", [100, 165, 300])  # rows whose products take the time to read the weights in 16 bits
def test_closer_widths_are_estimated_faster_than_powers_of_two(rows_of_a_read):
    def time(found: Sequence[int]) -> float:
        return sum(max(1.0, width / rows_of_a_read) for width in found)

    for low, high, least in ((65, 128, 1.6), (129, 256, 1.25), (257, 512, 1.05), (513, 1024, 1.0)):
        close, powers = (
            sum(time(widths(count, 512, buckets=buckets)) for count in range(low, high + 1)) for buckets in (WIDTH_BUCKETS, POWERS)
        )
        assert powers > least * close, (low, powers / close)
