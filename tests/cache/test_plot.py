"""The picture of a cache: what it shows, read back from the figure."""

import pytest
from matplotlib import colors as matplotlib_colors

from tests.helpers.caches import kv_config
from tests.helpers.models import write_model
from trt_kvcache import HybridCacheConfig, InferenceSession, LayerType, MambaCacheConfig
from trt_kvcache.cache.plot import COLOURS, LAYER_COLOUR, draw_cache
from trt_kvcache.errors import RangeError, ShapeError


def config(slots, layers=((2, 16), (1, 128))):
    """Two layers, the second with four times the bytes of the first."""
    return kv_config(list(layers), max_batch_size=slots, max_sequence_length=20)


def bars(axes):
    """Kind, start and end of the parts of each bar, from the top; parts of no width are left out."""
    names = {matplotlib_colors.to_rgba(colour): name for name, colour in {**COLOURS, "layer": LAYER_COLOUR}.items()}
    rows = {}
    for patch in axes.patches:
        if patch.get_width() and patch.get_facecolor() in names:
            part = (names[patch.get_facecolor()], patch.get_x(), patch.get_x() + patch.get_width())
            rows.setdefault(patch.get_y() + patch.get_height() / 2, []).append(part)
    return [parts for _, parts in sorted(rows.items())]


def slots_of(plot):
    return bars(plot.figure.axes[0])


def texts(axes):
    return [label.get_text() for label in axes.get_yticklabels()] + [text.get_text() for text in axes.texts] + [axes.get_title(loc="left")]


def test_a_slot_shows_reused_live_and_free_tokens():
    assert slots_of(draw_cache(config(3), [20, 5], [4, 0]))[:2] == [
        [("reused", 0, 4), ("live", 4, 20)],
        [("live", 0, 5), ("free", 5, 20)],
    ]


def test_a_slot_that_is_not_active_is_free_and_hatched():
    plot = draw_cache(config(3), [20, 5])
    assert slots_of(plot)[2] == [("free", 0, 20)]
    hatched = [patch for patch in plot.figure.axes[0].patches if patch.get_hatch()]
    assert [round(patch.get_y() + patch.get_height() / 2) for patch in hatched] == [2]


STATES = MambaCacheConfig(num_layers=2, max_batch_size=2, conv_dim=4, conv_kernel=2, num_heads=0, head_dim=0, state_size=0)


def test_slots_of_states_alone_have_no_limit():
    plot = draw_cache(HybridCacheConfig(layer_types=(LayerType.MAMBA,) * 2, mamba=STATES), [5, 2])
    assert slots_of(plot) == [[("live", 0, 5)], [("live", 0, 2)]]
    assert {"5", "2", "7 tokens in 2 of 2 slots"} <= set(texts(plot.figure.axes[0]))


def test_slots_of_states_alone_have_the_limit_that_is_given():
    limited = STATES.with_max_sequence_length(20)
    plot = draw_cache(HybridCacheConfig(layer_types=(LayerType.MAMBA,) * 2, mamba=limited), [5, 2])
    assert slots_of(plot) == [[("live", 0, 5), ("free", 5, 20)], [("live", 0, 2), ("free", 2, 20)]]
    assert "7 of 40 tokens (18%) in 2 of 2 slots" in texts(plot.figure.axes[0])


def test_attention_layers_beside_others_are_named_so():
    types = (LayerType.MAMBA, LayerType.ATTENTION, LayerType.MAMBA)
    kv = kv_config([(2, 16)], max_batch_size=2, max_sequence_length=20)
    plot = draw_cache(HybridCacheConfig(layer_types=types, kv=kv, mamba=STATES), [5])
    assert {"attention layer 0: 2 heads x 16", "2 layers with states"} <= set(texts(plot.figure.axes[1]))


def test_no_more_tokens_are_reused_than_there_are():
    assert slots_of(draw_cache(config(1), [4], [9])) == [[("reused", 0, 4), ("free", 4, 20)]]


def test_layers_are_as_wide_as_their_bytes():
    [(_, _, first)], [(_, _, second)] = bars(draw_cache(config(3), [1]).figure.axes[1])
    assert second == 4 * first


def test_neighbouring_layers_of_one_shape_share_a_bar():
    axes = draw_cache(config(3, [(2, 16), (2, 16), (1, 128), (2, 16)]), [1]).figure.axes[1]
    assert len(bars(axes)) == 3
    assert {"layers 0 to 1: 2 heads x 16", "layer 2: 1 head x 128", "layer 3: 2 heads x 16", "2 layers of 7.5 KiB", "30 KiB"} <= set(
        texts(axes)
    )


def test_the_texts_say_which_slot_and_how_much():
    found = texts(draw_cache(config(3), [20, 5], [4, 9]).figure.axes[0])
    assert {"slot 1", "slot 2", "5 (25%)", "not active", "25 of 60 tokens (42%) in 2 of 3 slots"} <= set(found)


@pytest.mark.parametrize(("slots", "is_named"), [(40, True), (41, False), (300, False)])
def test_slots_are_named_where_it_can_be_read(slots, is_named):
    plot = draw_cache(config(slots), [3])
    found = texts(plot.figure.axes[0])
    assert ("slot 0" in found, "3 (15%)" in found) == (is_named, is_named)
    assert len(slots_of(plot)) == slots
    assert plot.figure.get_size_inches()[1] < 14


@pytest.mark.parametrize(("longest", "last", "step"), [(20, 20, 4), (2048, 2048, 256), (7, 7, 1), (1, 1, 1)])
def test_tokens_are_marked_in_steps_of_a_power_of_two(longest, last, step):
    small = kv_config([(2, 16)], max_batch_size=1, max_sequence_length=longest)
    ticks = draw_cache(small, [1]).figure.axes[0].get_xticks()
    assert (ticks[-1], ticks[1]) == (last, step)


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
    assert slots_of(session.plot()) == [[("reused", 0, 5), ("live", 5, 7), ("free", 7, 20)], [("live", 0, 1), ("free", 1, 20)]]


def test_of_a_session_into_a_file(session, tmp_path):
    assert session.plot(tmp_path / "cache.svg").svg == (tmp_path / "cache.svg").read_text(encoding="utf-8")
