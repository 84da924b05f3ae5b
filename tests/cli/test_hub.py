"""Every command that takes a model folder takes an id of the Hugging Face Hub too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.session.hub import fake_hub

from .conftest import SHIPPED

HUB_ID = "some-org/tiny.llama_1"
PROGRAM = "import sys; from trt_kvcache.cli import main; sys.exit(main(sys.argv[1:]))"
REFERENCE = ("--engine", "reference", "--max-sequence-length", "64")
COMMANDS = {
    "generate": ["-p", "Alice", "--max-new-tokens", "2", *REFERENCE],
    "serve-file": ["-", "--max-new-tokens", "2", *REFERENCE],
    "chat": ["--max-new-tokens", "2", *REFERENCE],
    "compare": ["-p", "Alice", "--steps", "1", *REFERENCE],
    "memory": [],
}

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Command, list[str]]]:
    """Yield a function that runs a command with a Hub of one model, and the names of the files that were downloaded."""
    with fake_hub(HUB_ID, SHIPPED) as (address, downloaded):
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}

        def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", PROGRAM, *arguments]
            options = {"capture_output": True, "text": True, "timeout": 120, "check": False, "input": "Alice\n"}
            return subprocess.run(command, cwd=tmp_path, env={**environment, **more}, **options)

        yield run, downloaded


# All commands resolve ids in one place, so one that loads weights and one that reads the configuration alone stand for the others.
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[] if name in ("generate", "memory") else pytest.mark.slow) for name in COMMANDS]
)
def test_a_model_of_the_hub(hub: tuple[Command, list[str]], command: str):
    run, downloaded = hub
    done = run(command, HUB_ID, *COMMANDS[command])
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert ("model.safetensors" in downloaded) == (command != "memory"), "memory reads config.json alone"
    again = len(downloaded)
    assert run(command, HUB_ID, *COMMANDS[command], HF_HUB_OFFLINE="1").returncode == 0
    assert len(downloaded) == again, "the cache has it"


def test_quiet_shows_no_download(hub: tuple[Command, list[str]]):
    run, _ = hub
    done = run("generate", HUB_ID, "-q", "--json", *COMMANDS["generate"])
    assert done.stderr == ""
    assert json.loads(done.stdout)["answers"]


def test_what_neither_the_disk_nor_the_hub_has(hub: tuple[Command, list[str]]):
    run, _ = hub
    done = run("generate", "some-org/other", *COMMANDS["generate"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: some-org/other: expected a folder, or a model of the Hugging Face Hub. There is no folder ")


@pytest.mark.trt
def test_an_engine_is_built_from_a_model_of_the_hub(hub: tuple[Command, list[str]], tmp_path: Path):
    run, _ = hub
    done = run("build", HUB_ID, "-o", "engine", "--max-sequence-length", "32")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "engine" / "engine.plan").is_file()
