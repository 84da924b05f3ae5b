"""Parameters of models with experts, in total and of one token, against the numbers that were announced with the models."""

from __future__ import annotations

import json

import pytest

from tests.helpers.models import model_of
from tests.paths import ROOT
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.parameter_counts import ParameterCounts


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("mixtral-8x7b-v0.1", 46.7, 12.9),
        ("mixtral-8x22b-v0.1", 141, 39),
        ("olmoe-1b-7b-0924", 6.9, 1.3),
        ("lfm2-8b-a1b", 8.3, 1.5),
        ("nemotron-3-nano-30b-a3b", 31.6, 3.6),
        ("nemotron-3-super-120b-a12b", 120.6, 12.7),
        ("gemma-4-26b-a4b-it", 25.2, 3.8),
        ("gpt-oss-20b", 20.9, 3.6 + 0.58),  # announced without the embedding
        ("gpt-oss-120b", 116.8, 5.1 + 0.58),
    ],
)
def test_announced_numbers(name: str, total: float, active: float) -> None:
    """In billions, in the digits that were announced."""
    path = ROOT / "tests" / "model" / "published" / f"{name}.json"
    model = ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))["config"], default_dtype="bfloat16")
    counts = ParameterCounts.of(model)
    assert counts.total / 1e9 == pytest.approx(total, rel=0.01)
    assert counts.active / 1e9 == pytest.approx(active, rel=0.04)


def test_a_model_without_experts_uses_all_parameters() -> None:
    counts = ParameterCounts.of(model_of("llama"))
    assert counts.total == counts.active > 0


def test_experts_that_are_not_chosen_are_left_out() -> None:
    """Layers 1 and 3 would have 5 experts of 3 * 28 * 48, of which a token takes 3; layer 1 has a single MLP."""
    counts = ParameterCounts.of(model_of("qwen3_moe-dense-window"))
    assert counts.total - counts.active == 2 * 3 * 28 * 48
