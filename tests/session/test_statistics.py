"""What a session counts."""

from __future__ import annotations

from tests.helpers.sessions import MAX_SEQUENCE_LENGTH
from trt_kvcache import SamplingParams

S = MAX_SEQUENCE_LENGTH


class TestStatistics:
    def test_counters_times_and_bytes(self, session):
        assert session.statistics == type(session.statistics)(
            prefill_seconds=0.0,
            prefill_tokens=0,
            reused_tokens=0,
            decode_seconds=0.0,
            decode_steps=0,
            decode_tokens=0,
            cache_bytes_live=0,
            cache_bytes_reserved=session.cache.nbytes,
        )
        assert session.statistics.prefill_tokens_per_second == session.statistics.decode_tokens_per_second == 0
        session.prefill([[1, 2, 3, 4, 5, 6], [7]])
        session.decode([1, 2])
        session.decode([1, 2])
        now = session.statistics
        assert (now.prefill_tokens, now.reused_tokens, now.decode_steps, now.decode_tokens) == (7, 0, 2, 4)
        # K and V of 1 + 2 heads of 16 float32, for 8 + 3 tokens.
        assert now.cache_bytes_live == 2 * 3 * 16 * 4 * (8 + 3)
        assert 0 < now.prefill_seconds < 60
        assert 0 < now.decode_seconds < 60
        assert now.prefill_tokens_per_second == 7 / now.prefill_seconds
        assert now.decode_tokens_per_second == 4 / now.decode_seconds

    def test_idle_slots_are_not_counted(self, session):
        list(session.generate([[1, 2], [3]], [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=4)]))
        assert (session.statistics.decode_steps, session.statistics.decode_tokens) == (3, 3)

    def test_reused_and_appended_tokens_are_counted(self, session):
        session.prefill([[1, 2, 3]])
        session.append([[4, 5]])
        session.prefill([[1, 2, 3, 4, 9]], reuse=True)
        assert (session.statistics.prefill_tokens, session.statistics.reused_tokens) == (3 + 2 + 1, 4)


def test_statistics_stay_after_close_and_count_no_live_bytes(session):
    session.prefill([[1, 2, 3]])
    live = session.statistics.cache_bytes_live
    session.close()
    assert live > 0
    assert (session.statistics.prefill_tokens, session.statistics.cache_bytes_live) == (3, 0)
