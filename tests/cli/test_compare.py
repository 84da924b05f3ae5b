from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from trt_kvcache.builder import checked_build
from trt_kvcache.builder.attention_choice import BuildTarget
from trt_kvcache.cli import compare as compare_module
from trt_kvcache.cli.compare import _other_than_auto
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError
from trt_kvcache.polygraphy.runners import RecomputeRunner
from trt_kvcache.session.session_options import SessionOptions
from trt_kvcache.session.session_source import SessionSource

from .conftest import GOLDEN, NO_GPU, SHIPPED, Run

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, no tokenizer
PROMPTS = ("--prompt-ids", "1,2,3,4,5", "--prompt-ids", "8,9,10")
COMPARE = ("compare", MODEL, "--engine", "reference", "--max-sequence-length", 16, "--steps", 3)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that changes one value of what full recomputation gives at one step."""

    def plant(step: int, tensor: str, place: tuple[int, ...], amount: float) -> None:
        infer, calls = RecomputeRunner.infer_impl, 0

        def spoiled(self: RecomputeRunner, feed: Any) -> Any:
            nonlocal calls
            outputs = infer(self, feed)
            if calls == step:
                outputs[tensor] = np.array(outputs[tensor])
                outputs[tensor][place] += amount
            calls += 1
            return outputs

        monkeypatch.setattr(RecomputeRunner, "infer_impl", spoiled)

    return plant


def test_paths_that_agree(run: Run):
    done = run(*COMPARE, *PROMPTS)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    what = "agree: logits and live cache rows of a prefill and 3 decode steps"
    pairs = ["reference and full recomputation", "reference and plugin reference", "full recomputation and plugin reference"]
    assert lines[::3] == [f"{pair} {what}" for pair in pairs]
    assert all(line.startswith("  largest difference of logits ") for line in lines[1::3])
    assert lines[2::3] == ["  greedy tokens: 8 of 8 equal"] * 3


def test_text_prompts(run: Run):
    done = run("compare", SHIPPED, "--engine", "reference", "-p", "Alice was beginning", "-p", "The rabbit-hole", "--steps", 2)
    assert done.code == 0
    assert done.out.splitlines()[2] == "  greedy tokens: 6 of 6 equal"


def test_a_difference_in_the_cache_is_named(run: Run, spoil: Any):
    spoil(2, "v_cache_1", (1, 0, 3, 7), 5.0)
    done = run(*COMPARE, *PROMPTS)
    assert (done.code, done.err) == (3, "")
    first, second, third = done.out.splitlines()[:3]
    assert first.startswith("reference and full recomputation DIFFER: ")
    place = "layer 1 (attention), V, slot 1, head 0, position 3, element 7"
    assert second == f"  first at decode step 2 in the V rows of the cache: {place} (`v_cache_1`)"
    assert "full recomputation has " in third
    assert "5 apart" in third


def test_a_difference_in_the_logits_is_named(run: Run, spoil: Any):
    spoil(0, "logits", (1, 7), 100.0)
    done = run(*COMPARE, *PROMPTS)
    assert done.code == 3
    assert done.out.splitlines()[1] == "  first at the prefill in the logits: slot 1, token 7 (`logits`)"
    assert done.out.splitlines()[4].startswith("  greedy tokens: 7 of 8 equal; first different after the prefill in slot 1:")


def test_the_tolerance_can_be_set(run: Run, spoil: Any):
    spoil(1, "k_cache_0", (0, 1, 2, 3), 0.05)
    assert run(*COMPARE, *PROMPTS, "--tolerance", 1e-4).code == 3
    spoil(1, "k_cache_0", (0, 1, 2, 3), 0.05)
    assert run(*COMPARE, *PROMPTS, "--tolerance", 0.5).code == 0


@pytest.mark.usefixtures("without_gpu")
class TestTensorRT:
    def test_auto_leaves_tensorrt_out_with_a_warning(self, run: Run, engine: Path):
        done = run("compare", engine, "-p", "Alice", "--steps", 1)
        assert (done.code, done.err) == (0, f"warning: comparing without TensorRT: {NO_GPU}.\n")
        assert "TensorRT" not in done.out

    def test_engine_tensorrt_fails_without_a_gpu(self, run: Run, engine: Path):
        done = run("compare", engine, "-p", "Alice", "--engine", "tensorrt")
        assert (done.code, done.out) == (1, "")
        assert done.err == f"error: CudaMemory: {NO_GPU}.\n"


def test_ctrl_c_while_tensorrt_is_imported(run: Run, monkeypatch: pytest.MonkeyPatch):
    def import_tensorrt(flavour: str) -> str | None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return "tensorrt_rtx: cannot be imported (initialization failed)."
        return None

    monkeypatch.setattr(compare_module, "why_no_tensorrt", import_tensorrt)
    done = run("compare", MODEL, *PROMPTS)
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "expected --prompt or --prompt-ids, got neither."),
        ([*PROMPTS, "--tolerance", -1], "Invalid value for --tolerance: expected 0 or more, got -1.0."),
        ([*PROMPTS, "--tolerance", "nan"], "Invalid value for --tolerance: expected 0 or more, got nan."),
        ([*PROMPTS, "--steps", -1], "Invalid value for '--steps'"),
    ],
    ids=str,
)
def test_wrong_usage(run: Run, arguments: list[object], complaint: str):
    done = run("compare", "no/such/folder", *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


def test_a_prompt_and_steps_longer_than_the_cache_are_refused(run: Run):
    done = run(*COMPARE, *PROMPTS, "--steps", 12)
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: reference: a prompt of 5 tokens and 12 more exceed --max-sequence-length=16. Nothing was run.\n"


def test_more_prompts_than_slots_are_refused(run: Run, engine: Path):
    done = run("compare", engine, "--engine", "reference", *("--prompt-ids", "1") * 4)
    assert (done.code, done.err) == (1, "error: prompts: expected 1 to --max-batch-size=3 of them, got 4.\n")


def test_options_that_an_engine_folder_fixes_are_refused(run: Run, engine: Path):
    done = run("compare", engine, "--engine", "reference", "-p", "A", "--dtype", "float32")
    assert done.code == 1
    assert done.err.startswith("error: --dtype: expected with a Hugging Face folder only")


PLUGIN = "plugin reference plugin"
NOT_64 = "head_dim: expected one of 64, 80, 96, 128, 256, 512, got 24."


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are compared, by name and attention; TensorRT refuses a head of 24 for the plugin."""
    found: list[str] = []

    def note(paths: list[str], prompts: object, **_: object) -> None:
        found.extend(paths)
        raise ConfigError("enough seen")

    def note_path(source: SessionSource, name: str, adapter: str | None) -> str:
        return f"{name} {source.options.attention}"

    def open_session(source: SessionSource) -> Any:
        if source.options.attention == "plugin" and source.folder == MODEL:
            raise ConfigError(NOT_64)
        return nullcontext(source)

    monkeypatch.setattr("trt_kvcache.polygraphy.runners.SessionRunner", note_path)
    monkeypatch.setattr(
        "trt_kvcache.polygraphy.runners.RecomputeRunner", lambda source, name, adapter: f"{name} {source.options.attention}"
    )
    monkeypatch.setattr("trt_kvcache.polygraphy.path_comparison.compare_paths", note)
    monkeypatch.setattr("trt_kvcache.cli.session_flags.open_session", open_session)
    monkeypatch.setattr(compare_module, "why_no_tensorrt", lambda flavour: None)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--engine", "reference"], ["reference None", "full recomputation None", PLUGIN]),
        (["--engine", "reference", "--attention", "plugin"], ["reference plugin", "full recomputation plugin"]),
        (["--attention", "native"], ["TensorRT native", "reference native", "full recomputation native"]),
        (["--kv-dtype", "fp8"], ["TensorRT None", "reference None", "full recomputation None"]),
    ],
    ids=["reference", "one attention", "TensorRT's own", "quantized K and V"],
)
def test_paths_of_a_model(run: Run, compared: list[str], options: list[str], expected: list[str]):
    assert run("compare", MODEL, *options, *PROMPTS).err == "error: enough seen\n"
    assert compared == expected


def test_attention_that_does_not_support_the_model_is_left_out_with_a_warning(run: Run, compared: list[str]):
    done = run("compare", MODEL, *PROMPTS)
    assert done.err == f"warning: comparing without plugin TensorRT: {NOT_64}\nerror: enough seen\n"
    assert compared == ["TensorRT None", "reference None", "full recomputation None", PLUGIN]


@pytest.mark.parametrize(("built", "other"), [("native", "plugin"), ("plugin", "native")])
def test_an_engine_folder_is_compared_with_the_other_attention(run: Run, compared: list[str], tmp_path: Path, built: str, other: str):
    folder = make_engine_folder(write_model(tmp_path / "wide", head_dim=64), tmp_path / "engine", segmented=built == "plugin").path
    assert run("compare", folder, *PROMPTS).err == "error: enough seen\n"
    paths = ["TensorRT None", f"{other} TensorRT {other}", "reference None", "full recomputation None"]
    assert compared == [*paths, f"{other} reference {other}"]


def test_an_engine_folder_with_quantized_k_and_v_is_compared_with_no_other_attention(run: Run, compared: list[str], tmp_path: Path):
    """Which would be over 16 bits: that is what quantization costs, and no difference of engines."""
    options = {"segments": None, "tensorrt_flavour": "tensorrt", "attention_variant": "plugin", "quantized": QuantizedKV("fp8")}
    folder = make_engine_folder(write_model(tmp_path / "wide", head_dim=64), tmp_path / "engine", **options).path
    assert run("compare", folder, *PROMPTS).err == "error: enough seen\n"
    assert compared == ["TensorRT None", "reference None", "full recomputation None"]


def test_json_is_one_document(run: Run):
    done = run("compare", SHIPPED, "--engine", "reference", "-p", "Alice", "--steps", 1, "--attention", "native", "--json")
    found = json.loads(done.out)
    assert list(found) == ["agrees", "paths", "pairs", "steps", "prompt_lengths", "continuations", "live_rows"]
    assert (found["agrees"], found["steps"]) == (True, 1)
    (pair,) = found["pairs"]
    assert (pair["agrees"], pair["first"], pair["second"]) == (True, "reference", "full recomputation")


def test_json_keeps_the_exit_code_of_a_difference(run: Run):
    done = run("compare", SHIPPED, "--engine", "reference", "-p", "Alice", "--steps", 1, "--dtype", "float16", "--tolerance", 0, "--json")
    assert (done.code, json.loads(done.out)["agrees"]) == (3, False)
    assert any(pair["difference"] is not None for pair in json.loads(done.out)["pairs"])


@pytest.mark.trt
@pytest.mark.parametrize(("passed", "other"), [(False, "plugin"), (True, "native")])
def test_the_other_attention_is_not_that_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool, other: str):
    target = BuildTarget(tensorrt="tensorrt_rtx 1.7", is_rtx=True, doctor_passed=passed)
    monkeypatch.setattr(checked_build, "build_target", lambda tensorrt, options: target)
    model = write_model(tmp_path / "model", head_dim=64)
    assert _other_than_auto(model, SessionOptions(flavour="tensorrt_rtx")) == other
