"""Builds of models with a vision tower: of their text decoders, from folders as they are published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trt_kvcache
from tests.golden.weights import VISION, VISION_SEEDS
from tests.helpers.models import write_text_decoder
from tests.sweeps import one_of_each_family
from trt_kvcache import build_engine, estimate_build
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import ConfigError

SIZES = {"max_batch_size": 2, "max_sequence_length": 24, "max_prefill_length": 8}


@pytest.mark.trt
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gemma3" else pytest.mark.slow) for name in VISION_SEEDS if "moe" not in name]
)
def test_an_engine_with_its_weights_runs_as_the_folder_does(tmp_path: Path, name: str) -> None:
    path = tmp_path / "engine"
    build_engine(VISION / name, path, **SIZES, attention="mask", embed_weights=True)
    with Checkpoint.open(VISION / name) as checkpoint:
        assert EngineFolder.open(path).config.model == checkpoint.config
    logits = []
    for folder in (path, VISION / name):
        sizes = {} if folder == path else {**SIZES, "attention": "mask"}
        with trt_kvcache.load(folder, engine="numpy", **sizes) as session:
            logits.append(session.prefill([[3, 1, 4, 1, 5]])[0].copy())
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", one_of_each_family(VISION_SEEDS))
def test_an_estimate_counts_no_tower(tmp_path: Path, name: str) -> None:
    text = write_text_decoder(tmp_path / "text", name)
    if "moe" in name:
        with pytest.raises(ConfigError, match="head_dim: expected one of 64"):  # experts need plugin layers
            estimate_build(VISION / name, **SIZES)
        return
    assert estimate_build(VISION / name, **SIZES) == estimate_build(text, **SIZES)
