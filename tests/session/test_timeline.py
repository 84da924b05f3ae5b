"""``Timeline``: what it records of a queue, and what the picture shows."""

import pytest

from tests.helpers.models import write_model
from trt_kvcache import InferenceSession
from trt_kvcache.session.timeline import SlotMove, SlotSpan, Timeline


class Clock:
    """Each look takes a second."""

    def __init__(self):
        self.now = -1.0

    def __call__(self):
        self.now += 1.0
        return self.now


def step(timeline, slots, waiting=0):
    timeline.record_step(timeline.now(), slots, waiting)


def test_steps_of_one_activity_are_one_span():
    timeline = Timeline(Clock())
    step(timeline, [(7, "prefill")])
    step(timeline, [(7, "decode"), (8, "prefill")])
    step(timeline, [(7, "decode"), (8, "decode")])
    assert timeline.spans == (
        SlotSpan(0, 7, "prefill", 1.0, 2.0),
        SlotSpan(0, 7, "decode", 3.0, 6.0),
        SlotSpan(1, 8, "prefill", 3.0, 4.0),
        SlotSpan(1, 8, "decode", 5.0, 6.0),
    )


def test_a_slot_that_does_not_advance_has_no_span():
    timeline = Timeline(Clock())
    step(timeline, [None, (8, "prefill")])
    assert [span.slot for span in timeline.spans] == [1]


def test_compaction_ends_the_spans_of_what_it_moves_and_drops():
    timeline = Timeline(Clock())
    step(timeline, [(5, "decode"), (6, "decode"), (7, "decode")])
    timeline.record_moves([5, 6, 7], [0, -1, 1])
    step(timeline, [(5, "decode"), (7, "decode")])
    assert timeline.moves == (SlotMove(3.0, 7, 2, 1),)
    assert [(span.slot, span.request, span.begin, span.end) for span in timeline.spans] == [
        (0, 5, 1.0, 5.0),
        (1, 6, 1.0, 2.0),
        (2, 7, 1.0, 2.0),
        (1, 7, 4.0, 5.0),
    ]


@pytest.fixture
def session(tmp_path):
    options = {"engine": "reference", "max_batch_size": 2, "max_sequence_length": 20, "max_prefill_length": 2, "dtype": "float32"}
    with InferenceSession.from_model(write_model(tmp_path / "model"), **options) as session:
        yield session


def test_of_a_session_has_every_request_and_the_queue(session):
    timeline = session.record()
    for count in (2, 5, 3):
        session.submit([1, 2, 3], max_new_tokens=count, ignore_eos=True)
    while session.step():
        pass
    spans = timeline.spans
    assert [(span.slot, span.activity) for span in spans if span.request == 0] == [(0, "prefill"), (0, "decode")]
    assert {span.activity for span in spans if span.request == 2} == {"prefill", "decode"}
    assert [(move.request, move.source, move.target) for move in timeline.moves] == [(1, 1, 0), (2, 1, 0)]
    assert [count for _, count in timeline.waiting] == [1, 0]  # not one for each step: a long run takes little memory
    assert all(span.begin <= span.end for span in spans)


def test_what_is_generated_does_not_depend_on_the_recording(session):
    def tokens():
        handles = [session.submit([1, 2, 3], max_new_tokens=count, ignore_eos=True) for count in (2, 5, 3)]
        while session.step():
            pass
        return [handle.tokens for handle in handles]

    before = tokens()
    session.record()
    assert tokens() == before


def test_the_picture_has_a_bar_for_each_span_and_an_arrow_for_each_move(session):
    timeline = session.record()
    for count in (2, 5, 3):
        session.submit([1, 2, 3], max_new_tokens=count, ignore_eos=True)
    while session.step():
        pass
    upper, lower = timeline.plot(title="three").figure.axes
    assert sorted((bar.get_x(), round(bar.get_y() + bar.get_height() / 2)) for bar in upper.patches) == [
        (span.begin, span.slot) for span in timeline.spans
    ]
    assert sum(getattr(text, "arrow_patch", None) is not None for text in upper.texts) == len(timeline.moves) == 2
    assert [line.get_label() for line in lower.lines] == ["waiting"]
    assert upper.get_title(loc="left").startswith("3 requests in 2 slots")


def test_an_empty_recording_can_be_drawn():
    assert "0 requests" in Timeline().plot().svg


def test_many_slots_have_no_names():
    timeline = Timeline(Clock())
    step(timeline, [(slot, "decode") for slot in range(128)])
    upper = timeline.plot().figure.axes[0]
    assert len(upper.patches) == 128
    assert upper.get_ylabel() == "slot"


def test_a_block_records_to_its_end(session):
    def run_one():
        session.submit([1, 2, 3], max_new_tokens=2, ignore_eos=True)
        while session.step():
            pass

    with session.record() as timeline:
        run_one()
    recorded = timeline.spans
    assert recorded
    run_one()
    assert timeline.spans == recorded


def test_a_recording_without_a_block_goes_on(session):
    timeline = session.record()
    for _ in range(2):
        session.submit([1, 2, 3], max_new_tokens=2, ignore_eos=True)
        while session.step():
            pass
    assert {span.request for span in timeline.spans} == {0, 1}


def test_session_and_recording_are_plotted_alike(session, tmp_path):
    """Both take a path and a title, and return the picture."""
    for name, plotted in (("cache", session), ("timeline", session.record())):
        path = tmp_path / f"{name}.svg"
        assert plotted.plot(path, title=name).svg == path.read_text()
        assert f">{name}<" in path.read_text()


def test_a_legend_over_a_drawing_has_a_white_box(session):
    timeline = session.record()
    frame = timeline.plot().figure.axes[1].get_legend().get_frame()
    assert frame.get_visible()
    assert frame.get_facecolor()[:3] == (1, 1, 1)
