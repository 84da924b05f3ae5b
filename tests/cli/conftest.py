"""Runs the command line inside the test process, on the shipped model and on engine folders made from it."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.paths import ROOT
from trt_kvcache.cli import main
from trt_kvcache.errors import CudaError
from trt_kvcache.model import ModelConfig
from trt_kvcache.session import open_model

SHIPPED = ROOT / "examples" / "tiny-llama"
GOLDEN = ROOT / "tests" / "golden"

#: What the shipped model is; its sizes may change.
CONFIG = ModelConfig.from_dict(json.loads((SHIPPED / "config.json").read_text(encoding="utf-8")))
#: The attention of each of its layers.
MIXER = CONFIG.layers[0].mixer
#: Bytes of K and V of one of its tokens, in float16.
TOKEN_NBYTES = CONFIG.num_layers * 2 * MIXER.num_kv_heads * MIXER.head_dim * 2
#: Bytes of the cache of `engine`, whose K and V of a layer each start at a multiple of 256 bytes.
_SIDE_NBYTES = 3 * 38 * MIXER.num_kv_heads * MIXER.head_dim * 2
CACHE_NBYTES = CONFIG.num_layers * 2 * -(-_SIDE_NBYTES // 256) * 256

#: Why `without_gpu` says that there is no GPU.
NO_GPU = "this test has no GPU"

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_BOX = re.compile(r"[│╭╮╰╯─\s]+")


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What it wrote on stderr as one line, without the box that typer draws."""
        return _BOX.sub(" ", self.err).strip()


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_here(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return Outcome(code, _COLOUR.sub("", written.out), _COLOUR.sub("", written.err))

    return run_here


@pytest.fixture(autouse=True)
def ctrl_c_arrives() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt, also where a shell that runs the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int, **_: object) -> None:
        raise CudaError(f"CudaMemory: {NO_GPU}.")

    monkeypatch.setattr(open_model, "find_gpu", lambda device: f"{NO_GPU}.")
    monkeypatch.setattr(open_model, "why_no_torch", lambda: "torch is not installed.")
    monkeypatch.setattr(open_model, "CudaMemory", refuse)


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts lines into stdin: a pipe, or as if typed at a terminal."""

    def put_lines(*lines: str, terminal: bool = False) -> None:
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stdin)

    return put_lines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the shipped model, to be damaged."""
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Path:
    """An engine folder of `model` with B = 3, S = 38, P = 11, whose plan TensorRT never saw."""
    return make_engine_folder(model, tmp_path / "engine").path


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("built") / "engine"
    assert main(["build", str(SHIPPED), "-o", str(target), "--max-batch-size", "2", "--max-sequence-length", "64"]) == 0
    return target


@pytest.fixture
def built_engine(_built: Path, tmp_path: Path) -> Path:
    """A copy of an engine folder that TensorRT built, with B = 2, S = 64."""
    return Path(shutil.copytree(_built, tmp_path / "engine"))


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
