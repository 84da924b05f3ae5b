import io
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.paths import ROOT
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.cli import main
from trt_kvcache.errors import CudaError
from trt_kvcache.session import open_model

SHIPPED = ROOT / "examples" / "tiny-llama"
GOLDEN = ROOT / "tests" / "golden"

CONFIG = ModelConfig.from_dict(json.loads((SHIPPED / "config.json").read_text(encoding="utf-8")))
TOKEN_NBYTES = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
_SIDE_NBYTES = 3 * 38 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
CACHE_NBYTES = CONFIG.num_layers * 2 * -(-_SIDE_NBYTES // 256) * 256

NO_GPU = "this test has no GPU"

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_BOX = re.compile(r"[│╭╮╰╯─\s]+")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaint(self):
        return _BOX.sub(" ", self.err).strip()


@pytest.fixture
def run(capsys):
    def run_here(*arguments):
        code = main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return Outcome(code, _COLOUR.sub("", written.out), _COLOUR.sub("", written.err))

    return run_here


@pytest.fixture
def without_gpu(monkeypatch):
    def refuse(device, **_):
        raise CudaError(f"CudaMemory: {NO_GPU}.")

    monkeypatch.setattr(open_model, "find_gpu", lambda device: f"{NO_GPU}.")
    monkeypatch.setattr(open_model, "CudaMemory", refuse)


@pytest.fixture
def type_lines(monkeypatch):
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


@pytest.fixture
def engine(model, tmp_path):
    """An engine folder of `model` with B = 3, S = 38, P = 11, whose plan TensorRT never saw."""
    return make_engine_folder(model, tmp_path / "engine").path


def change_json(file, change):
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
