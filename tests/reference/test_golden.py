"""Logits against Hugging Face transformers: the files that tests/golden/make_golden.py made."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trt_kvcache.reference import Attention

from .rig import GOLDEN, MODELS, Rig

# Both sides sum in float32, in another order; tables of angles are float64 here and float32 there. Seen: 1e-5.
TOLERANCE = 2e-4

# What rounding weights and K/V to a dtype does to logits whose spread is up to 4: about its epsilon times ten.
ROUNDED = {"float16": 0.02, "bfloat16": 0.2}

TOKENS = 24


def golden(model: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return token ids ``[24]`` and logits ``[24, vocab]``."""
    with np.load(GOLDEN / model / "golden.npz") as file:
        return file["input_ids"][0], file["logits"][0]


def test_all_folders_are_tested() -> None:
    assert sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz")) == MODELS
    assert set(json.loads((GOLDEN / "versions.json").read_text())) == {"torch", "transformers", "numpy"}


@pytest.mark.parametrize("attention", ["native", "mask"])
@pytest.mark.parametrize("model", MODELS)
def test_one_full_pass(model: str, attention: Attention) -> None:
    ids, expected = golden(model)
    rig = Rig(model, attention=attention)
    for position in range(TOKENS):
        logits = rig.step(ids, [0], [position])
        np.testing.assert_allclose(logits[0], expected[position], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("widths", [[1] * 24, [24], [5, 1, 1, 10, 7], [23, 1], [8, 8, 8]])
@pytest.mark.parametrize("model", MODELS)
def test_any_split_into_chunks_and_decode_steps(model: str, widths: list[int]) -> None:
    ids, expected = golden(model)
    logits = Rig(model).run(ids, widths)
    np.testing.assert_allclose(logits, expected[np.cumsum(widths) - 1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_rounded_to_other_dtypes(model: str, dtype: str) -> None:
    ids, expected = golden(model)
    logits = Rig(model, dtype=dtype).run(ids, [17, 1, 1, 5])
    error = np.abs(logits - expected[[16, 17, 18, 23]]).max()
    assert TOLERANCE < error < ROUNDED[dtype]
