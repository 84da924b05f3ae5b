"""Models in GGUF files, written from the golden folders in llama.cpp's conventions: the logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf")

import trt_kvcache
from tests.helpers.tolerance import assert_close
from tests.reference.rig import GOLDEN, golden

from .convert import convert

# As in tests/reference/test_golden.py.
TOLERANCE = 2e-5


@pytest.mark.parametrize("model", ["llama"])
def test_logits_are_those_of_the_folder(tmp_path: Path, model: str) -> None:
    ids, expected = golden(model)
    path = convert(GOLDEN / model, tmp_path / "model.gguf")
    with trt_kvcache.load(path, engine="reference", max_batch_size=1) as session:
        for length, logits in expected.items():
            assert_close(session.prefill([ids[:length].tolist()])[0], logits, TOLERANCE)
