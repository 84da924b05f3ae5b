"""Sequences over a cache whose tokens have scales of their own: they are appended, read, moved and swapped with K and V."""

import numpy as np
import pytest

from tests.handles.sequences import On
from tests.helpers.assertions import raises
from tests.helpers.caches import HEADS, Unchanged, cache_holding, make_cache
from trt_kvcache import SequenceCacheManager
from trt_kvcache.errors import ConfigError, DTypeError, ShapeError


def drawn(count, seed):
    """K, V and their scales of so many tokens: by layer."""
    random = np.random.default_rng(seed)
    rows = [[random.integers(-127, 128, (h, count, d), np.int8) for h, d in HEADS] for _ in range(2)]
    scales = [[random.uniform(0.1, 1, (h, count)).astype(np.float32) for h, _ in HEADS] for _ in range(2)]
    return rows, scales


@pytest.fixture
def sequences(memory, stream):
    with (
        cache_holding("scaled", memory, stream) as cache,
        On(SequenceCacheManager(cache, enable_swapping=True, swap_threshold=1), stream) as found,
    ):
        yield found


def add(sequences, seq, count, seed):
    (keys, values), (key_scales, value_scales) = drawn(count, seed)
    sequences.append(seq, keys, values, key_scales=key_scales, value_scales=value_scales)


def check(sequences, seq, *parts):
    """A sequence holds these parts, ``(count, seed)``, one behind the other."""
    drawings = [drawn(*part) for part in parts]
    for found, which in ((sequences.get(seq), 0), (sequences.get_scales(seq), 1)):
        for k_or_v in range(2):
            for layer in range(len(HEADS)):
                expected = np.concatenate([drawing[which][k_or_v][layer] for drawing in drawings], axis=1)
                assert found[k_or_v][layer].dtype == expected.dtype
                assert found[k_or_v][layer].tobytes() == expected.tobytes()


def test_scales_are_appended_at_any_token(sequences):
    seq = sequences.create_sequence()
    add(sequences, seq, 3, 1)
    add(sequences, seq, 2, 2)
    check(sequences, seq, (3, 1), (2, 2))


def test_scales_are_swapped_out_and_in(sequences):
    ids = [sequences.create_sequence() for _ in range(8)]
    for seq in ids:
        add(sequences, seq, 5, seq)
    assert sequences.memory_swapped == 3 * 5 * 2 * sum(h * (d + 4) for h, d in HEADS)
    for seq in ids:
        check(sequences, seq, (5, seq))


def test_a_shorter_sequence_goes_on_with_other_scales(sequences):
    seq = sequences.create_sequence()
    add(sequences, seq, 6, 1)
    sequences.truncate(seq, 5)
    add(sequences, seq, 2, 2)
    (keys, _), (key_scales, _) = sequences.get(seq), sequences.get_scales(seq)
    before, after = drawn(6, 1), drawn(2, 2)
    for layer in range(len(HEADS)):
        for found, which in ((keys, 0), (key_scales, 1)):
            expected = np.concatenate([before[which][0][layer][:, :5], after[which][0][layer]], axis=1)
            assert found[layer].tobytes() == expected.tobytes()


def test_equal_layers_have_one_array(memory, stream):
    heads = [(2, 16)] * 3
    with make_cache("scaled", memory, heads=heads) as cache, On(SequenceCacheManager(cache), stream) as sequences:
        seq, scales = sequences.create_sequence(), np.arange(3 * 2 * 5, dtype=np.float32).reshape(3, 2, 5)
        rows = np.ones((3, 2, 5, 16), np.int8)
        sequences.append(seq, rows, rows, key_scales=scales, value_scales=memory.to_device(-scales, stream=stream))
        found = sequences.get_scales(seq)
        assert [part.tolist() for part in found] == [scales.tolist(), (-scales).tolist()]


REFUSED = {
    "none": ({"key_scales": None}, ShapeError, "key_scales: expected an array [L, H, n], or an array [H, n] per layer, got NoneType."),
    "of a layer less": ({"value_scales": drawn(3, 1)[1][1][:2]}, ShapeError, "value_scales: expected 3 layers, got 2."),
    "of fewer tokens": (
        {"key_scales": drawn(2, 1)[1][0]},
        ShapeError,
        "key_scales[0]: expected [num_kv_heads, n] = (2, 3), got (2, 2).",
    ),
    "of another dtype": (
        {"value_scales": [scales.astype(np.float64) for scales in drawn(3, 1)[1][1]]},
        DTypeError,
        "value_scales[0]: expected float32, got float64.",
    ),
    "no arrays": ({"key_scales": [None] * 3}, ShapeError, "key_scales[0]: expected an array [H, n], got NoneType."),
}


@pytest.mark.parametrize(("change", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_scales_that_do_not_fit(sequences, change, error, text):
    seq = sequences.create_sequence()
    (keys, values), (key_scales, value_scales) = drawn(3, 1)
    with Unchanged(sequences.cache), pytest.raises(error) as caught:
        sequences.append(seq, keys, values, **{"key_scales": key_scales, "value_scales": value_scales, **change})
    assert str(caught.value) == text
    assert sequences.length(seq) == 0


def test_scales_where_there_are_none(memory, stream):
    with make_cache("manager", memory, dtype="int8") as cache, On(SequenceCacheManager(cache), stream) as sequences:
        seq, (rows, scales) = sequences.create_sequence(), drawn(3, 1)
        with raises(DTypeError, "key_scales", expected="None", got="list"):
            sequences.append(seq, *rows, key_scales=scales[0])
        with raises(ConfigError, "get_scales", expected="cache with scales by token", got="without"):
            sequences.get_scales(seq)
