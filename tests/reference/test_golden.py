"""Logits against Hugging Face transformers: the files that tests/golden/make_golden.py made."""

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.sweeps import each_once, one_of_each_family

from .rig import GOLDEN, MODELS, Rig, golden

# Of the largest logit. Both sides sum in float32, in another order; tables of angles are float64 here and float32 there. Seen: 5e-6.
TOLERANCE = 2e-5

# What rounding weights and K/V to a dtype does to logits whose spread is up to 4: about its epsilon times ten.
ROUNDED = {"float16": 0.02, "bfloat16": 0.2}


def test_all_folders_are_tested():
    assert sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors")) == MODELS


@pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
@pytest.mark.parametrize("model", one_of_each_family(MODELS))
def test_one_full_pass(model, attention):
    ids, expected = golden(model)
    rig = Rig(model, attention=attention)
    for length, logits in expected.items():
        assert_close(rig.step(ids, [0], [length - 1])[0], logits, TOLERANCE)


@pytest.mark.parametrize(("model", "widths"), each_once(one_of_each_family(MODELS), [[1] * 24, [5, 1, 8, 1, 9], [24], [23, 1], [8, 8, 8]]))
def test_any_split_into_chunks_and_decode_steps(model, widths):
    ids, expected = golden(model)
    native, mask, plugin = (Rig(model, attention=attention).run(ids, widths) for attention in ("native", "mask", "plugin"))
    for other in (mask, plugin):
        assert_close(other, native)
    logits = dict(zip(np.cumsum(widths).tolist(), native, strict=True))
    for length in logits.keys() & expected.keys():
        assert_close(logits[length], expected[length], TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", one_of_each_family(MODELS))
def test_rounded_to_other_dtypes(model, dtype):
    ids, expected = golden(model)
    wanted = np.array([*expected.values()])
    native, plugin = (Rig(model, dtype=dtype, attention=attention).run(ids, [5, 1, 8, 1, 9]) for attention in ("native", "plugin"))
    for logits in (native, plugin):
        assert TOLERANCE / 2 * np.abs(wanted).max() < np.abs(logits - wanted).max() < ROUNDED[dtype]
    np.testing.assert_array_equal(plugin.argmax(axis=-1), native.argmax(axis=-1))


def test_the_length_of_the_cache_chooses_the_factors_of_longrope():
    """A cache of more than 80 tokens, the original context, takes those for long sequences, as keys are rotated once."""
    ids, expected = golden("phi3-short-window")
    length = max(expected)
    for rows, is_short in ((80, True), (81, False)):
        found = Rig("phi3-short-window", length=rows).step(ids, [0], [length - 1])[0]
        difference = np.abs(found - expected[length]).max() / np.abs(expected[length]).max()
        assert bool(difference <= TOLERANCE) is is_short
