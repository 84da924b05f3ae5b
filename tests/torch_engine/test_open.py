"""How a session comes to the torch engine: ``engine="torch"``, ``"auto"``, the command line, comparisons."""

from __future__ import annotations

import builtins
import json
import logging
import re
import sys

import numpy as np
import pytest

from tests.cli.conftest import run  # noqa: F401
from tests.helpers.models import write_model
from tests.paths import GOLDEN, ROOT
from tests.torch_engine.needs_torch import need_torch

need_torch()

from trt_kvcache import InferenceSession, ReferenceEngine  # noqa: E402
from trt_kvcache.errors import EngineError  # noqa: E402
from trt_kvcache.session import open_model as opening  # noqa: E402
from trt_kvcache.session.open_model import EngineFallbackWarning  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402

SHIPPED = ROOT / "examples" / "tiny-llama"
NO_GPU = "there is no GPU here"


@pytest.fixture
def _no_gpu(monkeypatch):
    monkeypatch.setattr(opening, "find_gpu", lambda device: NO_GPU)


@pytest.mark.usefixtures("_no_gpu")
class TestWithoutAGpu:
    def test_torch_runs_on_the_cpu_as_asked_for(self, caplog):
        with caplog.at_level(logging.INFO, "trt_kvcache"), InferenceSession.from_model(GOLDEN / "llama", engine="torch") as session:
            assert isinstance(session.engine, TorchEngine)
            assert session.engine.memory.is_host
        assert f"torch runs on the CPU: {NO_GPU}" in caplog.text

    def test_auto_takes_torch_with_one_warning(self):
        with (
            pytest.warns(EngineFallbackWarning, match=f"^running the PyTorch engine: {NO_GPU}$") as caught,
            InferenceSession.from_model(GOLDEN / "llama") as session,
        ):
            assert isinstance(session.engine, TorchEngine)
        assert [one.filename for one in caught] == [__file__]

    def test_a_text_is_scored_without_an_option(self):
        scores = []
        for engine in ("torch", "numpy"):
            with InferenceSession.from_model(SHIPPED, engine=engine, max_batch_size=2, dtype="fp32") as session:
                scores += session.score("Alice was beginning to get very tired.")
        assert scores[0].logprob == pytest.approx(scores[1].logprob, rel=1e-4)

    def test_a_torch_that_cannot_be_imported_is_left_out(self, monkeypatch, caplog):
        monkeypatch.setitem(sys.modules, "trt_kvcache.torch_engine", None)
        with (
            caplog.at_level(logging.INFO, "trt_kvcache"),
            pytest.warns(EngineFallbackWarning, match=f"^running the NumPy reference engine: {NO_GPU}; import of "),
        ):
            InferenceSession.from_model(GOLDEN / "llama").close()
        assert f"engine: numpy, because {NO_GPU}; and " in caplog.text

    @pytest.mark.parametrize("kind", [ImportError, OSError])
    def test_a_torch_that_lacks_a_library_is_an_error_that_says_so(self, monkeypatch, kind):
        def broken(name, *more):
            if name == "trt_kvcache.torch_engine":
                raise kind("libcudart.so.13: cannot open shared object file")
            return real(name, *more)

        real = builtins.__import__
        monkeypatch.setattr(builtins, "__import__", broken)
        text = f"PyTorch: expected a library that can be imported, got {kind.__name__}: libcudart.so.13: cannot open shared object file"
        with pytest.raises(EngineError, match=f"^{re.escape(text)}$"):
            InferenceSession.from_model(GOLDEN / "llama", engine="torch")
        with pytest.warns(EngineFallbackWarning, match=f"^running the NumPy reference engine: {NO_GPU}; {re.escape(text)}$"):
            InferenceSession.from_model(GOLDEN / "llama").close()

    def test_auto_takes_numpy_for_a_model_that_torch_does_not_compute(self, monkeypatch, caplog):
        monkeypatch.setattr("trt_kvcache.torch_engine.engine.COMPUTED_FEATURES", frozenset())
        with (
            caplog.at_level(logging.INFO, "trt_kvcache"),
            pytest.warns(
                EngineFallbackWarning, match=f"^running the NumPy reference engine: {NO_GPU}; .*the PyTorch engine does not support"
            ),
            InferenceSession.from_model(GOLDEN / "gemma2") as session,
        ):
            assert isinstance(session.engine, ReferenceEngine)
        assert "the PyTorch engine does not support sliding window yet (gemma2)" in caplog.text

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_sessions_agree_with_the_reference_engine(self, tmp_path, dtype):
        folder = write_model(tmp_path / "model", num_hidden_layers=2)
        options = {"max_batch_size": 2, "max_sequence_length": 40, "dtype": dtype}
        prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
        with (
            InferenceSession.from_model(folder, engine="torch", **options) as ours,
            InferenceSession.from_model(folder, engine="reference", **options) as reference,
        ):
            steps = [(session.prefill(prompts), session.decode([1, 2]), session.decode([3, 4])) for session in (ours, reference)]
        for found, expected in zip(*steps, strict=True):
            assert np.abs(found - expected).max() <= {"float32": 1e-5, "bfloat16": 8e-2}[dtype] * np.abs(expected).max()

    def test_text_is_that_of_the_reference_engine(self):
        texts = []
        for engine in ("torch", "reference"):
            with InferenceSession.from_model(SHIPPED, engine=engine, max_sequence_length=64, dtype="float32") as session:
                texts.append("".join(token.text for token in session.generate("Alice was beginning", max_new_tokens=20)))
        assert texts[0] == texts[1]


def test_the_command_generates(run):  # noqa: F811
    done = run("generate", SHIPPED, "--engine", "torch", "-p", "Alice was beginning", "--max-new-tokens", 4)
    assert done.code == 0
    assert "TorchEngine on cpu" in done.err


@pytest.mark.parametrize(
    ("flags", "paths"),
    [
        (["--engine", "torch"], ["torch", "plugin torch", "reference", "full recomputation", "plugin reference"]),
        (["--engine", "reference", "--reference", "torch"], ["torch", "full recomputation", "plugin torch"]),
        (["--engine", "torch", "--reference", "torch", "--attention", "native"], ["torch", "full recomputation"]),
    ],
)
def test_compare_takes_it(run, flags, paths):  # noqa: F811
    done = run("compare", SHIPPED, *flags, "-p", "Alice was", "--steps", 2, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    names = {pair[side] for pair in document["pairs"] for side in ("first", "second")}
    assert document["agrees"]
    assert names == set(paths)
