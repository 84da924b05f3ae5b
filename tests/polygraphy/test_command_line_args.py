"""The real ``polygraphy`` command, in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.paths import ROOT
from trt_kvcache.polygraphy.command_line_args import get_arg_groups

MODEL = ROOT / "tests" / "golden" / "llama"
SHIPPED = ROOT / "examples" / "tiny-llama"
POLYGRAPHY = Path(sys.executable).with_name("polygraphy")
CPU = ["--kvcache-engine", "reference", "--kvcache-max-batch-size", "2"]
SHAPES = ["--input-shapes", "input_ids:[2,5]", "new_lengths:[2]"]
RANDOM = [*SHAPES, "--val-range", "input_ids:[0,60]", "new_lengths:[1,5]", "--iterations", "4"]


def _polygraphy(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "POLYGRAPHY_INTERNAL_CORRECTNESS_CHECKS": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run([POLYGRAPHY, *map(str, arguments)], env=variables, capture_output=True, text=True, timeout=120, check=False)


def _passes(*arguments: str | Path, **environment: str) -> str:
    done = _polygraphy("run", *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_entry_point_is_found() -> None:
    (entry,) = [entry for entry in entry_points(group="polygraphy.run.plugins") if entry.name == "trt-kvcache"]
    assert entry.load() is get_arg_groups


def test_help_shows_the_group_and_the_runners() -> None:
    text = _passes("--help")
    assert "KV Cache Sessions:" in text
    for option in ("session", "recompute", "reference", "engine", "max-batch-size", "max-sequence-length", "dtype", "no-live-rows"):
        assert f"--kvcache-{option}" in text


def test_all_three_runners_agree_on_random_inputs() -> None:
    text = _passes(MODEL, "--kvcache-session", "--kvcache-recompute", "--kvcache-reference", *CPU, *RANDOM)
    assert text.count("Passed: 4/4 iterations") == 2
    assert "Outputs: ['logits', 'k_cache_0', 'v_cache_0', 'k_cache_1', 'v_cache_1', 'kvcache_lengths']" in text
    assert "internal error" not in text.lower()


def test_a_difference_fails_the_command(tmp_path: Path) -> None:
    exact = tmp_path / "float32.json"
    _passes(MODEL, "--kvcache-reference", "--kvcache-dtype", "float32", *CPU[2:], *RANDOM, "--save-outputs", exact)
    plugin = ["--kvcache-dtype", "float32", "--kvcache-attention", "plugin", *CPU[2:]]
    _passes(MODEL, "--kvcache-reference", *plugin, *RANDOM, "--load-outputs", exact)
    half = [MODEL, "--kvcache-reference", "--kvcache-dtype", "float16", *CPU[2:], *RANDOM, "--load-outputs", exact]
    done = _polygraphy("run", *half)
    assert done.returncode == 1
    assert "Passed: 0/4 iterations" in done.stdout + done.stderr
    _passes(*half, "--atol", "0.05")


def test_the_feed_script_continues_prompts_of_the_shipped_model() -> None:
    feed = ["--data-loader-script", ROOT / "engines" / "feed.py", "--atol", "0.1"]
    text = _passes(SHIPPED, "--kvcache-session", "--kvcache-recompute", *CPU, *feed, "--kvcache-no-live-rows")
    assert "Passed: 9/9 iterations" in text
    assert "Outputs: ['logits']" in text
    done = _polygraphy("run", MODEL, "--kvcache-session", *CPU, *feed, TRT_KVCACHE_MODEL=str(MODEL))
    assert done.returncode == 1
    assert "prompts: expected token ids, got text" in done.stderr


def test_every_option_reaches_its_runner() -> None:
    given = {
        "engine": "tensorrt",
        "flavour": "tensorrt_rtx",
        "max-batch-size": "2",
        "max-sequence-length": "32",
        "max-prefill-length": "7",
        "dtype": "bfloat16",
        "attention": "mask",
    }
    options = [word for name, value in given.items() for word in (f"--kvcache-{name}", value)] + ["--kvcache-no-live-rows"]
    script = _passes(MODEL, "--kvcache-session", "--kvcache-recompute", "--kvcache-reference", *options, "--gen", "-")
    shared = "flavour='tensorrt_rtx', max_batch_size=2, max_sequence_length=32, max_prefill_length=7, dtype='bfloat16', attention='mask'"
    assert f"SessionFromFolder({str(MODEL)!r}, engine='tensorrt', {shared})" in script
    assert f"SessionFromFolder({str(MODEL)!r}, engine='numpy', {shared})" in script
    assert "    SessionRunner(kvcache_load_session, live_rows=False, tokens_only=True)," in script
    assert "    RecomputeRunner(kvcache_load_session, live_rows=False, tokens_only=True)," in script
    assert "    SessionRunner(kvcache_load_session_1, name='kvcache-reference', live_rows=False, tokens_only=True)," in script


@pytest.mark.parametrize("model", [MODEL, pytest.param(SHIPPED, marks=pytest.mark.slow)], ids=["float32", "float16"])
def test_default_inputs_are_decoded_in_every_iteration(model: Path) -> None:
    runners = ["--kvcache-session", "--kvcache-recompute"]
    text = _passes(model, *runners, *CPU, "--iterations", "3", "--kvcache-max-prefill-length", "7")
    assert text.count("{input_ids [dtype=int32, shape=(2, 32)]}") == 3
    assert text.count("each iteration compares 63 tokens in 2 slots: prompts of 16, 15 tokens, then 16 decode steps.") == 1
    assert "Passed: 3/3 iterations" in text


def test_what_the_command_line_says_about_inputs_and_tolerances_holds() -> None:
    options = ["--kvcache-session", "--kvcache-recompute", *CPU, "--gen", "-"]
    default = _passes(SHIPPED, *options)
    assert "val_range={'input_ids': (0, 319)}" in default
    assert "tolerances.py', name='float16')" in default
    assert "name='bfloat16')" in _passes(SHIPPED, *options, "--kvcache-dtype", "bf16")
    given = _passes(SHIPPED, *options, "--val-range", "input_ids:[0,5]", "--atol", "0.1")
    assert "tolerances.py" not in given
    assert "val_range={'input_ids': (0, 5)}" in given
    assert "tolerances.py" not in _passes(SHIPPED, *options, *SHAPES)


@pytest.mark.slow
def test_rows_of_one_token_decode_nothing_and_say_so() -> None:
    text = _passes(MODEL, "--kvcache-session", "--kvcache-recompute", *CPU, "--input-shapes", "input_ids:[2,1]")
    assert "[W] each iteration compares 2 tokens in 2 slots: prompts of 1, 1 tokens, then 0 decode steps: nothing is decoded." in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kvcache-reference", "--kvcache-max-sequence-length", "100000"], "max_sequence_length: expected at most"),
        (["--kvcache-reference", *SHAPES, "--val-range", "new_lengths:[0,0]", *CPU[2:]], "prompts[0]: expected at least one token"),
        (["--kvcache-session", "--kvcache-engine", "tensorrt"], "[!] "),
    ],
    ids=["option", "step", "no GPU"],
)
def test_what_fails_is_one_message_without_a_traceback(arguments: list[str], complaint: str) -> None:
    done = _polygraphy("run", MODEL, *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert complaint in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "FAILED | Runtime" in done.stdout + done.stderr


def test_warnings_are_in_the_log_of_polygraphy() -> None:
    text = _passes(MODEL, "--kvcache-session", "--kvcache-max-batch-size", "1", CUDA_VISIBLE_DEVICES="")
    assert re.search(r"\[W\] running the (PyTorch|NumPy reference) engine: ", text)


def test_our_tolerances_can_be_used(tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text("from trt_kvcache.polygraphy import SessionCompareFunc\ncompare_outputs = SessionCompareFunc(dtype='float16')\n")
    exact = tmp_path / "float32.json"
    _passes(MODEL, "--kvcache-reference", "--kvcache-dtype", "float32", *CPU[2:], *RANDOM, "--save-outputs", exact)
    half = [MODEL, "--kvcache-reference", "--kvcache-dtype", "float16", *CPU[2:], *RANDOM, "--load-outputs", exact]
    assert "Passed: 4/4 iterations" in _passes(*half, "--compare-func-script", script)


@pytest.mark.trt
def test_an_engine_folder_is_run_as_it_was_built(tmp_path: Path) -> None:
    from trt_kvcache import build_engine

    folder = tmp_path / "engine"
    build_engine(MODEL, folder, max_batch_size=3, max_sequence_length=24, max_prefill_length=8, flavour="tensorrt_rtx")
    runners = ["--kvcache-session", "--kvcache-recompute", "--kvcache-engine", "reference"]
    assert "Passed: 4/4 iterations" in _passes(folder, *runners, *RANDOM)
    done = _polygraphy("run", folder, *runners, "--kvcache-dtype", "float16", *RANDOM)
    assert done.returncode == 1
    assert "dtype: expected with a Hugging Face folder only" in done.stderr
