"""Engines compute with the values of quantized weights, as with those values stored as float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.quantized.conftest import Folder
from tests.helpers.quantized_models import ALL_CASES, write_values
from trt_kvcache import InferenceSession, estimate_build
from trt_kvcache.builder.definition import check_weights
from trt_kvcache.errors import BuildError, ConfigError

Made = Callable[..., Folder]

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*are not")


def logits(folder: Path, dtype: str) -> np.ndarray[Any, Any]:
    """Return the logits after a prompt."""
    with InferenceSession.from_model(folder, engine="reference", dtype=dtype, max_sequence_length=16) as session:  # type: ignore[arg-type]
        return session.prefill([[5, 6, 7, 9, 3, 11]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ALL_CASES)
def test_the_numpy_engine(made: Made, tmp_path: Path, case: str, dtype: str) -> None:
    folder = made(case)
    plain = write_values(tmp_path / "plain", folder.path, folder.values)
    np.testing.assert_array_equal(logits(folder.path, dtype), logits(plain, dtype))


def test_a_session_says_how_weights_are_stored(made: Made) -> None:
    with InferenceSession.from_model(made("gptq").path, engine="reference", max_sequence_length=16) as session:
        assert session.weights is not None
        assert session.weights.format == "GPTQ int4 in groups of 8"


def test_tensorrt_refuses_by_the_name_of_the_format(made: Made) -> None:
    folder = made("gptq")
    with folder.open() as checkpoint, pytest.raises(BuildError, match=r"got GPTQ int4 in groups of 8\. .* engine=\"torch\" and"):
        check_weights(checkpoint)
    with pytest.raises(ConfigError, match="expected weights that are not quantized, got GPTQ int4 in groups of 8"):
        estimate_build(folder.path, max_batch_size=1)
