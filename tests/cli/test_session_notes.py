"""What commands print about a session on stderr."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from trt_kvcache import InferenceSession
from trt_kvcache.cli.session_notes import note_statistics, warn_of_full_cache

from .conftest import SHIPPED


@pytest.fixture
def session() -> Iterator[InferenceSession]:
    with InferenceSession.from_model(SHIPPED, engine="reference", max_batch_size=2, max_sequence_length=4) as session:
        yield session


def test_statistics_in_one_line(session: InferenceSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.prefill([[5, 6], [7]])
    session.decode([8, 9])
    note_statistics(session)
    text = capsys.readouterr().err
    assert re.fullmatch(
        r"ReferenceEngine on cpu: prefill 3 tokens in \d+\.\d{3} s; decode 2 tokens, \d+\.\d tokens/s; cache .*iB live of .*iB\n", text
    )


def test_reused_tokens_are_mentioned(session: InferenceSession, capsys: pytest.CaptureFixture[str]) -> None:
    session.prefill([[5, 6, 7]])
    session.prefill([[5, 6, 8]], reuse=True)
    note_statistics(session)
    assert "prefill 4 tokens (2 more were in the cache) in " in capsys.readouterr().err


def test_slots_without_room_for_their_next_token_are_warned_of(session: InferenceSession, capsys: pytest.CaptureFixture[str]) -> None:
    list(session.generate([[5, 6, 7, 8], [5]], max_new_tokens=2, ignore_eos=True))
    warn_of_full_cache(session)
    assert capsys.readouterr().err == "warning: the cache is full: max_sequence_length=4 ended the text of slot 0.\n"


def test_without_a_full_slot_there_is_no_warning(session: InferenceSession, capsys: pytest.CaptureFixture[str]) -> None:
    list(session.generate([[5, 6, 7], [5]], max_new_tokens=1, ignore_eos=True))
    warn_of_full_cache(session)
    assert capsys.readouterr().err == ""
