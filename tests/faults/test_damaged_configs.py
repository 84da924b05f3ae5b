"""Damaged ``config.json`` of every family, and damaged descriptions: refused with an error of ours, or read as a model."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.faults.mutations import damage_value
from tests.faults.watch import Findings
from tests.golden.weights import SEEDS, VISION_SEEDS
from tests.paths import GOLDEN
from trt_kvcache.model import ModelConfig, rope_table
from trt_kvcache.model.features import features
from trt_kvcache.model.tensor_shapes import tensor_shapes

_FEW_LAYERS, _SMALL_HEAD = 64, 4096


def use(model: ModelConfig) -> None:
    """Read what every engine reads of a model, as far as it stays small."""
    assert ModelConfig.from_description(json.loads(json.dumps(model.to_description()))) == model
    features(model)
    model.rope_at_length(64)
    if model.num_layers <= _FEW_LAYERS:
        tensor_shapes(model)
    for mixer in set(model.attention_layers):
        if mixer.rope is not None and mixer.head_dim <= _SMALL_HEAD:
            with np.errstate(all="ignore"):
                rope_table(mixer.rope, mixer.head_dim, 20)


def check(name: str, seeds: range) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    description = ModelConfig.from_dict(config).to_description()
    findings = Findings()
    for seed in seeds:
        chance = random.Random(f"{name} {seed}")
        is_description = seed % 2
        data: Any = json.loads(json.dumps(description if is_description else config))
        for _ in range(chance.choice([1, 1, 2, 4])):
            damage_value(data, chance)
        read = ModelConfig.from_description if is_description else ModelConfig.from_dict
        findings.run(f"{name} {seed}", lambda read=read, data=data: use(read(data)))  # type: ignore[misc]
    findings.check()
    assert findings.refused
    assert findings.accepted


#: Golden models, with the folders of vision models.
NAMES = [*SEEDS, *(f"vision/{name}" for name in VISION_SEEDS)]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_fields(name: str) -> None:
    check(name, range(80))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_damaged_fields(name: str) -> None:
    check(name, range(100, 3000))
