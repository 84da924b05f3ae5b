"""Merged adapters in the torch engine, as in the reference engine: golden logits of PEFT, and weights that are packed after the merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.helpers.adapters import write_adapter  # noqa: E402
from tests.helpers.assertions import assert_close  # noqa: E402
from tests.helpers.models import write_model  # noqa: E402
from tests.session import test_adapters as of_sessions  # noqa: E402
from trt_kvcache import load  # noqa: E402


@pytest.mark.parametrize("name", of_sessions.ADAPTERS)
def test_logits_are_those_of_peft(name: str) -> None:
    of_sessions.assert_logits_of_peft(name, "torch")


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_weights_are_rounded_after_the_merge(tmp_path: Path, quantize: str | None) -> None:
    base, adapter = write_model(tmp_path / "model", num_hidden_layers=2), write_adapter(tmp_path / "adapter")
    logits = []
    for engine in ("torch", "numpy"):
        with load(base, engine=engine, adapter=adapter, quantize=quantize, dtype="float32", max_sequence_length=16) as session:
            logits.append(session.prefill([[5, 6, 7, 30]]))
    assert_close(*logits)
