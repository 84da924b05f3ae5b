"""Which golden models an engine computes."""

import json
from collections.abc import Collection
from functools import cache

import pytest

from tests.paths import GOLDEN
from trt_kvcache.engine.attention_variants import why_not_native
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.features import features


@cache
def model_of(name: str) -> ModelConfig:
    """Return the configuration of a golden model."""
    return ModelConfig.from_dict(json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8")))


def features_of(name: str) -> tuple[str, ...]:
    """Return the features that a golden model needs."""
    return tuple(features(model_of(name)))


def attentions_of(name: str, max_sequence_length: int) -> tuple[str, ...]:
    """Return the variants of TensorRT's own attention that a golden model can be built with, the default one first."""
    return ("mask",) if why_not_native(model_of(name), max_sequence_length) else ("native", "mask")


def skip_what_is_not_computed(request: pytest.FixtureRequest, computed: Collection[str]) -> None:
    """Skip a test whose parameter ``model`` is a golden model that needs a feature which is not among those computed."""
    model = request.node.callspec.params.get("model") if hasattr(request.node, "callspec") else None
    missing = sorted(set(features_of(model)) - set(computed)) if isinstance(model, str) and (GOLDEN / model).is_dir() else []
    if missing:
        pytest.skip(f"{model} needs what the engine does not compute yet: {', '.join(missing)}")
