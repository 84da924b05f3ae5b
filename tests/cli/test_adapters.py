"""``--adapter``: the commands that open or build a model folder, and ``inspect`` of a folder that was built with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.adapters import write_adapter
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model

from .conftest import Run

PROMPT = ("--prompt-ids", "5,6,7", "--engine", "reference")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def test_generate_and_score_run_with_the_adapter(run: Run, base: Path, adapter: Path) -> None:
    for command in (("generate", base, *PROMPT, "--max-new-tokens", 4, "--json"), ("score", base, *PROMPT, "--json")):
        plain, adapted = run(*command), run(*command, "--adapter", adapter)
        assert plain.code == adapted.code == 0
        assert plain.out != adapted.out


def test_compare_runs_all_paths_with_the_adapter(run: Run, base: Path, adapter: Path) -> None:
    done = run("compare", base, *PROMPT, "--steps", 2, "--adapter", adapter)
    assert done.code == 0, done.err


def test_a_dry_run_of_a_build_checks_the_adapter(run: Run, base: Path, adapter: Path, tmp_path: Path) -> None:
    command = ("build", base, "-o", tmp_path / "engine", "--dry-run", "--adapter")
    assert run(*command, adapter).code == 0
    write_adapter(adapter, lora_bias=True)
    refused = run(*command, adapter)
    assert refused.code != 0
    assert "lora_bias" in refused.complaint


def test_a_folder_that_is_absent_is_named_with_the_flag(run: Run, base: Path, tmp_path: Path) -> None:
    done = run("generate", base, *PROMPT, "--adapter", tmp_path / "none")
    assert done.code != 0
    assert "--adapter: expected a folder of PEFT" in done.complaint


def test_inspect_names_the_adapter(run: Run, base: Path, adapter: Path, tmp_path: Path) -> None:
    engine = make_engine_folder(base, tmp_path / "engine", adapter=adapter).path
    found = json.loads(run("inspect", engine, "--json").out)["checkpoint"]
    assert found["adapter"] == str(adapter)
    shown = "".join(run("inspect", engine).out.split())
    assert f"mergedadapter:{adapter},fingerprint{found['adapter_fingerprint'][:16]}" in shown
    assert "merged adapter" not in run("inspect", make_engine_folder(base, tmp_path / "plain").path).out
