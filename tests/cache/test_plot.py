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
    return kv_config([(2, 16), (1, 128)], max_batch_size=slots, max_sequence_length=20)


def bars(svg):
    """Colour and width of the parts of each bar, from the top; the legend is not one."""
    names = {colour: name for name, colour in COLOURS.items()} | {LAYER_COLOUR: "layer"}
    rows = {}
    paper, *rectangles = ElementTree.fromstring(svg).iter(RECT)
    assert paper.attrib == {"width": "100%", "height": "100%", "fill": "#ffffff"}
    for rectangle in rectangles[len(COLOURS) :]:
        rows.setdefault(float(rectangle.get("y")), []).append((names[rectangle.get("fill")], float(rectangle.get("width"))))
    return [parts for _, parts in sorted(rows.items())]


def test_slots_and_layers():
    svg = draw_cache(config(3), [20, 5], [4, 9], title="a <title>")
    full, part, free, first, second = bars(svg)
    width = free[0][1]
    assert [full, part, free] == [
        [("reused", pytest.approx(0.2 * width)), ("live", pytest.approx(0.8 * width, abs=0.01))],
        [("reused", pytest.approx(0.25 * width)), ("free", pytest.approx(0.75 * width, abs=0.01))],
        [("free", width)],
    ]
    assert (first, second) == ([("layer", pytest.approx(width / 4, abs=0.01))], [("layer", width)])
    texts = [node.text for node in ElementTree.fromstring(svg).iter(TEXT)]
    assert {"a <title>", "slot 1", "slot 2 (not active)", "5 / 20", "layer 1: 1 x 128", "30,720"} <= set(texts)


@pytest.mark.parametrize(("slots", "labelled"), [(42, True), (43, False), (300, False)])
def test_many_slots_stay_inside_and_only_what_can_be_read_is_written(slots, labelled):
    svg = draw_cache(config(slots), [3])
    root = ElementTree.fromstring(svg)
    assert all(float(one.get("y")) + float(one.get("height")) < float(root.get("height")) for one in list(root.iter(RECT))[1:])
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    sizes = [float(node.get("font-size")) for node in root.iter(TEXT)]
    assert (min(sizes) >= 6, ">slot 0<" in svg, ">3 / 20<" in svg, "layer 1" in svg) == (True, labelled, labelled, True)


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


def test_of_a_session(tmp_path):
    options = {"engine": "reference", "max_batch_size": 2, "max_sequence_length": 20, "dtype": "float32", "prompt_cache_bytes": 1 << 20}
    with InferenceSession.from_model(write_model(tmp_path / "model"), **options) as session:
        session.prefill([[1, 2, 3, 4, 5]])
        session.prefill([[1, 2, 3, 4, 5, 6, 7], [8]])
        assert session.plot(tmp_path / "cache.svg") == (tmp_path / "cache.svg").read_text()
        first, second, _ = bars(session.plot())
    assert [name for name, _ in first] == ["reused", "live", "free"]
    assert first[0][1] / first[1][1] == pytest.approx(5 / 2, rel=0.01)
    assert [name for name, _ in second] == ["live", "free"]
