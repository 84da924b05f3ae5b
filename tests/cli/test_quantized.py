"""Commands on folders of quantized weights: they say the format, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.folders import edit_config
from tests.helpers.quantized_models import CASES, write_quantized
from trt_kvcache.benchmarking import copy_speed
from trt_kvcache.checkpoint import Checkpoint

from .conftest import Run

TITLE = "AWQ int4 in groups of 8"
PROMPT = ("--prompt-ids", "5,6,7", "--engine", "reference")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quantize, config = CASES["awq"]
    write_quantized(tmp_path / "awq", "llama", quantize, config)
    return tmp_path / "awq"


def test_generate_says_the_format(run: Run, folder: Path):
    done = run("generate", folder, *PROMPT, "--max-new-tokens", 2)
    assert done.code == 0
    assert f"weights: {TITLE}" in done.err.splitlines()


def test_compare_says_the_format(run: Run, folder: Path):
    done = run("compare", folder, *PROMPT, "--steps", 2)
    assert done.code == 0
    assert f"weights: {TITLE}" in done.err.splitlines()


def test_memory_says_the_format(run: Run, folder: Path):
    assert f"weights:      {TITLE}" in run("memory", folder).out.splitlines()
    assert json.loads(run("memory", folder, "--json").out)["weights_format"] == TITLE


def test_bench_counts_packed_bytes(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_speed, "_HOST_NBYTES", 1 << 16)
    monkeypatch.setattr(copy_speed, "_last_level_cache", lambda: 0)
    small = ("--engine", "reference", "--runs", 1, "-p", 4, "-n", 2)
    assert f"KiB in {TITLE}; cache" in run("bench", folder, *small).out
    found = json.loads(run("bench", folder, *small, "--json").out)
    with Checkpoint.open(folder) as checkpoint:
        assert found["limit"]["weights_nbytes"] == checkpoint.nbytes
        assert found["limit"]["step_weights_nbytes"] == checkpoint.weights.step_nbytes


def test_a_format_that_is_not_read_is_refused_by_name(run: Run, folder: Path):
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    for command in (("memory", folder), ("generate", folder, *PROMPT)):
        done = run(*command)
        assert done.code == 1
        assert "quantization_config.quant_method: expected one of" in done.err
        assert "got 'bitsandbytes'" in done.err


def test_sizes_of_an_engine_are_refused(run: Run, folder: Path):
    done = run("memory", folder, "--engine")
    assert done.code == 1
    assert f"expected weights that are not quantized, got {TITLE}" in done.err
