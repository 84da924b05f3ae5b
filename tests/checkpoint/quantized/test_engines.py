"""Engines compute with the values of quantized weights, as with those values stored as float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.quantized.conftest import Folder
from tests.helpers.quantized_models import ALL_CASES, CASES, write_quantized, write_values
from trt_kvcache import InferenceSession, estimate_build
from trt_kvcache.builder import resolved_options

Made = Callable[..., Folder]

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*are not")


#: Formats in which models with experts are published.
EXPERTS = ("gptq", "awq", "fp8-blocks", "compressed-int8")


def logits(folder: Path, dtype: str, engine: str = "reference") -> np.ndarray[Any, Any]:
    """Return the logits after a prompt."""
    with InferenceSession.from_model(folder, engine=engine, dtype=dtype, max_sequence_length=16) as session:  # type: ignore[arg-type]
        return session.prefill([[5, 6, 7, 9, 3, 11]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ALL_CASES)
def test_the_numpy_engine(made: Made, tmp_path: Path, case: str, dtype: str) -> None:
    folder = made(case)
    plain = write_values(tmp_path / "plain", folder.path, folder.values)
    np.testing.assert_array_equal(logits(folder.path, dtype), logits(plain, dtype))


def check_experts(folder: Path, case: str, engine: str) -> None:
    """Compare the logits of a model with quantized experts with those of its values in float32."""
    quantize, config = CASES[case]
    values = write_quantized(folder / "quantized", "qwen3_moe", quantize, config)
    plain = write_values(folder / "plain", folder / "quantized", values)
    for dtype in ("float32", "bfloat16"):
        found, expected = (logits(path, dtype, engine) for path in (folder / "quantized", plain))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_quantized_one_by_one(tmp_path: Path, case: str) -> None:
    check_experts(tmp_path, case, "reference")


def test_a_session_says_how_weights_are_stored(made: Made) -> None:
    with InferenceSession.from_model(made("gptq").path, engine="reference", max_sequence_length=16) as session:
        assert session.weights is not None
        assert session.weights.format == "GPTQ int4 in groups of 8"


def test_the_estimate_counts_packed_bytes(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_options, "HEAD_DIM_MIN", 8)
    folder = made("gptq")
    with folder.open() as checkpoint:
        assert estimate_build(folder.path).weights_nbytes == checkpoint.nbytes
        assert checkpoint.nbytes < sum(values.nbytes for values in folder.values.values())
