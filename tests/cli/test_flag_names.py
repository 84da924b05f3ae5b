"""Errors of commands name flags, not Python names; names of other projects are known or answered with ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from trt_kvcache.cli.app import COMMANDS, app
from trt_kvcache.cli.flag_names import flags_of, in_flags, naming_flags
from trt_kvcache.cli.option_groups import flat_parameters

from .conftest import SHIPPED, Run

NUMPY = ("--engine", "numpy")
ALL_FLAGS = {name: flag for command in COMMANDS for name, flag in flags_of(flat_parameters(command)).items()}


def test_flags_are_those_that_typer_makes():
    """The mapping reads declarations; the parser is the truth."""
    commands = typer.main.get_command(app).commands
    known = {flag for command in commands.values() for parameter in command.params for flag in parameter.opts}
    assert set(ALL_FLAGS.values()) <= known
    assert ALL_FLAGS["max_new_tokens"] == "--max-new-tokens"
    assert ALL_FLAGS["quantize"] == "--quantize"
    assert ALL_FLAGS["echo"] == "--echo"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_batch_size: expected at most 4.", "--max-batch-size: expected at most 4."),
        ("a: exceeds max_batch_size=4. Give max_batch_size.", "a: exceeds --max-batch-size=4. Give --max-batch-size."),
        ("adapters_modules: expected adapters_rank with it.", "--adapters-module: expected --adapters-rank with it."),
        ("build with embed_weights=True.", "build with --embed-weights."),
        ("dtype: expected float16, got dtype.", "--dtype: expected float16, got dtype."),
        ("/a/config.json: dtype: wrong", "/a/config.json: dtype: wrong"),
        ("/a/max_batch_size/x: nothing there", "/a/max_batch_size/x: nothing there"),
        ("max_batch_size/x: nothing there", "max_batch_size/x: nothing there"),
        ("max_batch_size.json: nothing there", "max_batch_size.json: nothing there"),
        ("unknown: got 'max_batch_size'", "unknown: got 'max_batch_size'"),
        ("p.jsonl:3: unknown max_batch_size", "p.jsonl:3: unknown max_batch_size"),
        ("max_batch_size, dtype: expected", "--max-batch-size, --dtype: expected"),
        ("max_batch_size, texts: expected", "--max-batch-size, texts: expected"),
        ("head_dim: of the model", "head_dim: of the model"),
        ("KVCacheConfig.max_batch_size: expected", "KVCacheConfig.max_batch_size: expected"),
        ("my_max_batch_size_2: x", "my_max_batch_size_2: x"),
        ("Give it api_keys, or any_host=True.", "Give it --api-key-file, or --allow-anyone."),
        ("", ""),
    ],
)
def test_names_become_flags_and_other_words_stay(text: str, shown: str):
    with naming_flags(ALL_FLAGS):
        assert in_flags(text) == shown
    assert in_flags(text) == text, "outside of a command"


def test_a_command_without_options_changes_nothing():
    with naming_flags(flags_of([])):
        assert in_flags("max_batch_size: x") == "max_batch_size: x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", SHIPPED, "-p", "a", *NUMPY, "--max-sequence-length", 600], "error: --max-sequence-length: expected at most 512,"),
        (["generate", SHIPPED, "-p", "a", "--attention", "mask", "--kv-dtype", "fp8"], "error: --attention: expected plugin for K and V"),
        (["serve", SHIPPED, "--host", "0.0.0.0"], "got '0.0.0.0'. Give it --api-key-file, or --allow-anyone."),
        (["generate", SHIPPED], "Error: expected --prompt or --prompt-ids, got neither."),
        (["memory", SHIPPED, "--layers", 3], "Error: expected a folder, or --layers, --kv-heads and --head-dim, got both."),
    ],
)
def test_errors_of_commands_name_flags(run: Run, arguments: list[object], message: str):
    done = run(*arguments)
    assert done.code in (1, 2)
    assert message in done.complaint
    assert "Invalid value:" not in done.complaint


@pytest.mark.parametrize("limit", ["-n", "--max-tokens", "--n-predict"])
def test_names_of_other_projects_are_known(run: Run, limit: str):
    done = run("generate", SHIPPED, *NUMPY, "-p", "Alice was", limit, 2, "--temp", 0, "--no-stats")
    assert done.out == run("generate", SHIPPED, *NUMPY, "-p", "Alice was", "--max-new-tokens", 2, "--no-stats").out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", SHIPPED, "--ctx-size", 3], "--max-sequence-length"),
        (["generate", SHIPPED, "--max-model-len", 3], "--max-sequence-length"),
        (["generate", SHIPPED, "--repeat-penalty", 3], "--repetition-penalty"),
        (["run", SHIPPED], "No such command 'run'. Did you mean generate or chat?"),
        (["serv", SHIPPED], "No such command 'serv'. Did you mean serve?"),
    ],
)
def test_unknown_names_are_answered_with_ours(run: Run, arguments: list[object], hint: str):
    done = run(*arguments)
    assert done.code == 2
    assert hint in done.complaint


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_prompt_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: bytes):
    expected = run("generate", SHIPPED, *NUMPY, "-p", "Alice was", "-n", 2, "--no-stats").out
    with _stdin(monkeypatch, tmp_path, b"Alice was" + end):
        done = run("generate", SHIPPED, *NUMPY, "-p", "-", "-n", 2, "--no-stats")
    assert done.out == expected


@pytest.mark.parametrize(
    ("content", "prompts", "message"),
    [
        (b"", ["-"], "--prompt: expected text on stdin, got none."),
        (b"\n", ["-"], "--prompt: expected text on stdin, got none."),
        (b"ab\xff", ["-"], "--prompt: expected UTF-8 on stdin, got byte 0xff at 2."),
        (b"text", ["-", "-"], "expected --prompt - once, as stdin can be read once."),
    ],
)
def test_what_is_no_prompt_on_stdin(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, prompts: list[str], message: str
):
    with _stdin(monkeypatch, tmp_path, content):
        done = run("generate", SHIPPED, *NUMPY, *(word for prompt in prompts for word in ("-p", prompt)))
    assert (done.code, done.out) == (2, "")
    assert message in done.complaint


def _stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes):
    file = tmp_path / "stdin"
    file.write_bytes(content)
    opened = file.open(encoding="utf-8")
    monkeypatch.setattr("sys.stdin", opened)
    return opened
