"""Models in GGUF files, written from the golden folders in llama.cpp's conventions: the logits are those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import trt_kvcache
from tests.helpers.assertions import assert_close
from tests.paths import GOLDEN
from tests.reference.rig import golden

from .convert import convert

# As in tests/reference/test_golden.py.
TOLERANCE = 2e-5

#: Those whose every field GGUF can say.
MODELS = (
    *("llama", "llama-llama3-bias", "llama-linear", "mistral-window", "ministral3", "ministral3-window"),
    *("qwen2-tied", "qwen3-sharded", "qwen3_moe", "phi3-long", "phi3-short-window", "gemma2", "gemma3", "olmo2", "granite", "granite-bias"),
    *("gemma4", "gemma4-ple", "gemma4-experts"),
    *("lfm2", "lfm2-bias", "mamba2", "bamba", "granitemoehybrid", "nemotron_h", "qwen3_5", "qwen3_5-bias"),
)

#: What GGUF cannot say of the others: the folder without it is read by both.
CHANGED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss-mxfp4": {"swiglu_limit": 7.0},
    "mistral": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 28}},
    "smollm3": {"no_rope_layer_interval": 4},
    "mamba2-bias": {"time_step_limit": None},
    "bamba-bias": {"time_step_limit": None},
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    ids, expected = golden(model)
    path = convert(GOLDEN / model, tmp_path / "model.gguf")
    found = logits(path, ids, expected)
    assert_close(found, np.array([*expected.values()]), TOLERANCE)


@pytest.mark.parametrize("model", CHANGED)
def test_logits_are_those_of_the_folder(tmp_path: Path, model: str) -> None:
    folder = shutil.copytree(GOLDEN / model, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CHANGED[model]))
    path = convert(folder, tmp_path / "model.gguf", kind="MXFP4" if "mxfp4" in model else "F32")
    ids, expected = golden(model)
    assert_close(logits(path, ids, expected), logits(folder, ids, expected), TOLERANCE)


def logits(path: Path, ids: Any, lengths: Any) -> np.ndarray[Any, Any]:
    with trt_kvcache.load(path, engine="reference", max_batch_size=1, max_sequence_length=29, dtype="float32") as session:
        return np.array([session.prefill([ids[:length].tolist()])[0] for length in lengths])
