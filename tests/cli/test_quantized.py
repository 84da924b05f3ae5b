"""Commands on folders of quantized weights: they say the format, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.folders import edit_config, edit_tensors
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.helpers.quantized_models import CASES, write_quantized
from trt_kvcache.benchmarking import copy_speed
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.quantized_kv import QuantizedKV

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


@pytest.mark.filterwarnings("ignore:.*activations are not quantized")
def test_the_kind_of_scales_of_k_and_v_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_speed, "_HOST_NBYTES", 1 << 16)
    monkeypatch.setattr(copy_speed, "_last_level_cache", lambda: 0)
    source = write_model(tmp_path / "model", head_dim=64)
    quantize, config = CASES["compressed-int8"]
    static = tmp_path / "static"
    write_quantized(static, str(source), quantize, {**config, "kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}})
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in range(2) for side in "kv"]
    edit_tensors(static, lambda tensors: tensors.update(dict.fromkeys(names, np.full((), 0.5, np.float32))))
    for model, kind in ((source, "scales by token"), (static, "static scales by tensor")):
        done = run("generate", model, *PROMPT, "--max-new-tokens", 2, "--kv-dtype", "int8")
        assert f"K and V: int8, {kind}" in done.err.splitlines()
        small = ("--engine", "reference", "--runs", 1, "-p", 4, "-n", 2, "--kv-dtype", "int8")
        assert f"KiB in int8, {kind}\n" in run("bench", model, *small).out
        assert json.loads(run("bench", model, *small, "--json").out)["cache"]["scales"] == kind.split()[-1]
    assert "K and V" not in run("generate", source, *PROMPT, "--max-new-tokens", 2).err


def test_inspect_says_the_scales(run: Run, tmp_path: Path):
    model = write_model(tmp_path / "model", head_dim=64)
    engine = make_engine_folder(
        model, tmp_path / "engine", attention_variant="plugin", tensorrt_flavour="tensorrt", quantized=QuantizedKV("int8")
    ).path
    assert "tokens, int8, scales by token, combined" in run("inspect", engine).out


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


def test_sizes_of_an_engine_count_packed_weights(run: Run, tmp_path: Path):
    quantize, config = CASES["awq"]
    plain = write_model(tmp_path / "plain", hidden_size=32, intermediate_size=64, head_dim=16)
    write_quantized(tmp_path / "awq", str(plain), quantize, config)
    found = [
        json.loads(run("memory", folder, "--engine", "--json", *more).out)["build"]["weights_nbytes"]
        for folder, more in (("plain", ()), ("awq", ()), ("plain", ("--quantize", "int8")))
        for folder in [tmp_path / folder]
    ]
    assert found[1] < found[2] < found[0]


def test_rounding_is_said_and_recorded(run: Run, tmp_path: Path):
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    done = run("generate", model, *PROMPT, "--max-new-tokens", 2, "--quantize", "int4,head=int8")
    assert done.code == 0
    assert "weights: int4 in groups of 32 (rounded to nearest) and int8 by output (rounded to nearest)" in done.err.splitlines()
    done = run("compare", model, *PROMPT, "--steps", 2, "--quantize", "int8", "--json")
    assert json.loads(done.out)["agrees"]
    done = run("generate", model, *PROMPT, "--quantize", "int5")
    assert done.code == 1
    assert "quantize: weights: expected one of int8, int4, int4:32, int4:128, got 'int5'" in done.err


def test_inspect_says_the_rounding(run: Run, tmp_path: Path):
    model = write_model(tmp_path / "model")
    engine = make_engine_folder(model, tmp_path / "engine", quantize="int8").path
    assert "computed in float16, weights in int8 by output (rounded to nearest)" in run("inspect", engine).out
    assert json.loads(run("inspect", engine, "--json").out)["checkpoint"]["quantize"] == "int8"


@pytest.mark.parametrize("command", ["build", "generate", "memory"])
def test_a_rounding_is_no_number(run: Run, command: str):
    assert "--quantize FORMAT" in " ".join(run(command, "--help").out.split())
