from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest

from trt_kvcache.builder import BUILDING
from trt_kvcache.cli import build as build_module
from trt_kvcache.errors import BuildError

from .conftest import GOLDEN, SHIPPED
from .test_inspect import rows


@pytest.fixture
def asked(monkeypatch):
    """What the builder is asked for; it refuses everything."""
    seen = {}

    def refuse(model, target, **options):
        seen.update(options, model=model, target=target)
        raise BuildError("the engine could not be built. TensorRT says: no")

    monkeypatch.setattr(build_module, "build_engine", refuse)
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            [],
            {
                **{"max_batch_size": 1, "max_sequence_length": 512, "max_prefill_length": 512, "dtype": None, "attention": "native"},
                **{"flavour": "auto", "embed_weights": False, "compute_capabilities": None},
            },
        ),
        (
            [
                *("--max-batch-size", 3, "--max-sequence-length", 99, "--max-prefill-length", 17, "--dtype", "float32", "--embed-weights"),
                *("--attention", "mask", "--flavour", "tensorrt_rtx", "--compute-capability", "8.6", "--compute-capability", "12.0"),
            ],
            {
                **{"max_batch_size": 3, "max_sequence_length": 99, "max_prefill_length": 17, "dtype": "float32", "attention": "mask"},
                **{"flavour": "tensorrt_rtx", "embed_weights": True, "compute_capabilities": ["8.6", "12.0"]},
            },
        ),
        (["--max-sequence-length", 40], {"max_sequence_length": 40, "max_prefill_length": 40}),
    ],
    ids=["defaults come from the model", "all", "a prefill is no longer than the sequence"],
)
def test_options_reach_the_builder(run, asked, tmp_path, options, expected):
    done = run("build", SHIPPED, "-o", tmp_path / "engine", *options)
    assert (done.code, done.out, done.err) == (1, "", "error: the engine could not be built. TensorRT says: no\n")
    assert callable(asked.pop("progress"))
    assert {**asked, **expected} == asked == {**asked, "model": SHIPPED, "target": tmp_path / "engine"}
    assert len(asked) == 10


def test_a_target_that_cannot_be_made(run, model):
    before = sorted(model.rglob("*"))
    done = run("build", model, "-o", model)
    assert (done.code, done.out) == (1, "")
    assert "Choose another path." in done.err
    assert sorted(model.rglob("*")) == before


@pytest.mark.trt
class TestWithTensorRT:
    def test_an_engine_folder_is_made_and_runs(self, run, tmp_path):
        target = tmp_path / "[red]new folder[/]" / "engine"
        done = run("build", SHIPPED, "-o", target, "--max-batch-size", 2)
        assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
        assert done.out.startswith(f"{target}: ")
        assert " by tensorrt_rtx 1." in done.out
        generated = run("generate", target, "--engine", "reference", "-p", "The rabbit-hole went straight", "--max-new-tokens", 9)
        assert generated.out.startswith("The rabbit-hole went straight on like a tunnel")

    def test_what_was_built_is_what_inspect_and_memory_show_and_is_replaced(self, run, built_engine):
        shown = run("inspect", built_engine).out
        assert rows(shown, "Optimisation profiles") == [["0", "prefill", "1-2", "1-64"], ["1", "decode", "1-2", "1"]]
        assert rows(shown, "Sizes")[0][1] == str((built_engine / "engine.plan").stat().st_size)
        for out in (shown, run("memory", built_engine).out):
            assert "2 slots of 64 tokens, float16, separate" in out
        assert run("build", SHIPPED, "-o", built_engine, "--max-sequence-length", 32).code == 0
        assert "1 slot of 32 tokens" in run("memory", built_engine).out
        assert [path.name for path in built_engine.parent.iterdir()] == [built_engine.name]

    def test_decomposable_attention_is_said_and_explained(self, run, tmp_path):
        done = run("build", GOLDEN / "llama", "-o", tmp_path / "engine", "--dtype", "float32")
        assert done.code == 0
        assert "is decomposable; `trt-kvcache inspect " in done.out
        attention = rows(run("inspect", tmp_path / "engine").out, "Attention")
        assert attention
        assert all(row[2].startswith("yes: ") and "float32" in row[2] for row in attention)

    def test_what_cannot_be_built(self, run, tmp_path):
        done = run("build", SHIPPED, "-o", tmp_path / "engine", "--compute-capability", "9.9")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert "9.9" in done.err
        assert list(tmp_path.iterdir()) == []

    def test_ctrl_c_inside_tensorrt_leaves_nothing(self, run, tmp_path, monkeypatch):
        progress_bar, reported = build_module.progress_bar, []

        @contextmanager
        def interrupted_in_the_middle():
            with progress_bar() as progress:

                def report(stage, done):
                    progress(stage, done)
                    reported.append(stage)
                    if reported.count(BUILDING) == 3:
                        signal.raise_signal(signal.SIGINT)

                yield report

        monkeypatch.setattr(build_module, "progress_bar", interrupted_in_the_middle)
        done = run("build", SHIPPED, "-o", tmp_path / "engine")
        assert (done.code, done.out, done.err) == (130, "", "interrupted\n")
        assert reported.count(BUILDING) == 3, "the next report ended the build"
        assert list(tmp_path.iterdir()) == []
