"""The picture of a cache: what it shows, read back from the SVG."""

from xml.etree import ElementTree

import pytest

from tests.helpers.cache_cases import kv_config
from tests.helpers.small_model import write_model
from trt_kvcache import InferenceSession
from trt_kvcache.cache.plot import COLOURS, LAYER_COLOUR, draw_cache
from trt_kvcache.errors import RangeError, ShapeError

RECT, TEXT = "{http://www.w3.org/2000/svg}rect", "{http://www.w3.org/2000/svg}text"


def config(slots):
    """Two layers, the second with four times the bytes of the first."""
    return kv_config([(2, 16), (1, 128)], max_batch_size=slots, max_sequence_length=20)


def bars(svg):
    """Colour and width of the parts of each bar, from the top; neither the paper nor the legend is one."""
    names = {colour: name for name, colour in COLOURS.items()} | {LAYER_COLOUR: "layer"}
    rows = {}
    _, *rectangles = ElementTree.fromstring(svg).iter(RECT)
    for rectangle in rectangles[len(COLOURS) :]:
        rows.setdefault(float(rectangle.get("y")), []).append((names[rectangle.get("fill")], float(rectangle.get("width"))))
    return [parts for _, parts in sorted(rows.items())]


def texts(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter(TEXT)]


def near(width):
    """Coordinates are rounded to hundredths."""
    return pytest.approx(width, abs=0.01)


def test_the_paper_is_white_whatever_the_page():
    paper = next(ElementTree.fromstring(draw_cache(config(3), [1])).iter(RECT))
    assert paper.attrib == {"width": "100%", "height": "100%", "fill": "#ffffff"}


def test_a_slot_shows_reused_live_and_free_tokens():
    full, part, free, *_ = bars(draw_cache(config(3), [20, 5], [4, 0]))
    width = free[0][1]
    assert full == [("reused", near(0.2 * width)), ("live", near(0.8 * width))]
    assert part == [("live", near(0.25 * width)), ("free", near(0.75 * width))]


def test_a_slot_that_is_not_active_is_free():
    *_, free, _, _ = bars(draw_cache(config(3), [20, 5]))
    assert [name for name, _ in free] == ["free"]


def test_no_more_tokens_are_reused_than_there_are():
    part, *_ = bars(draw_cache(config(1), [4], [9]))
    assert [name for name, _ in part] == ["reused", "free"]


def test_layers_are_as_wide_as_their_bytes():
    *_, first, second = bars(draw_cache(config(3), [1]))
    assert [name for name, _ in (*first, *second)] == ["layer", "layer"]
    assert first[0][1] == near(second[0][1] / 4)


def test_the_texts_say_which_slot_and_layer_and_how_much():
    found = texts(draw_cache(config(3), [20, 5], [4, 9]))
    assert {"slot 1", "slot 2 (not active)", "5 / 20", "layer 1: 1 x 128", "30,720"} <= set(found)


def test_a_title_is_text_and_no_markup():
    assert "a <title>" in texts(draw_cache(config(1), [1], title="a <title>"))


@pytest.mark.parametrize("slots", [1, 42, 43, 300])
def test_everything_is_inside_the_picture(slots):
    root = ElementTree.fromstring(draw_cache(config(slots), [3]))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert all(float(one.get("y")) + float(one.get("height")) < float(root.get("height")) for one in list(root.iter(RECT))[1:])


@pytest.mark.parametrize(("slots", "labelled"), [(42, True), (43, False), (300, False)])
def test_slots_are_labelled_where_it_can_be_read(slots, labelled):
    svg = draw_cache(config(slots), [3])
    assert (">slot 0<" in svg, ">3 / 20<" in svg, "layer 1" in svg) == (labelled, labelled, True)
    assert min(float(node.get("font-size")) for node in ElementTree.fromstring(svg).iter(TEXT)) >= 6


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"lengths": [1, 21]}, RangeError, "lengths[1]: expected an integer from 0 to 20, got 21."),
        ({"lengths": [5], "reused": [-3]}, RangeError, "reused[0]: expected an integer from 0 to 20, got -3."),
        ({"lengths": [1, 2, 3]}, ShapeError, "lengths: expected at most max_batch_size=2 of them, got 3."),
    ],
)
def test_what_cannot_be_drawn(given, error, text):
    with pytest.raises(error) as caught:
        draw_cache(config(2), **given)
    assert str(caught.value) == text


@pytest.fixture
def session(tmp_path):
    """A session of two slots, the first of which reuses five of its seven tokens."""
    options = {"engine": "reference", "max_batch_size": 2, "max_sequence_length": 20, "dtype": "float32", "prompt_cache_bytes": 1 << 20}
    with InferenceSession.from_model(write_model(tmp_path / "model"), **options) as session:
        session.prefill([[1, 2, 3, 4, 5]])
        session.prefill([[1, 2, 3, 4, 5, 6, 7], [8]])
        yield session


def test_of_a_session_shows_what_a_prompt_reused(session):
    first, second, _ = bars(session.plot())
    assert [name for name, _ in first] == ["reused", "live", "free"]
    assert first[0][1] / first[1][1] == pytest.approx(5 / 2, rel=0.01)
    assert [name for name, _ in second] == ["live", "free"]


def test_of_a_session_into_a_file(session, tmp_path):
    assert session.plot(tmp_path / "cache.svg") == (tmp_path / "cache.svg").read_text()
