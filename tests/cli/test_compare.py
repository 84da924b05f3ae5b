from __future__ import annotations

import signal
from contextlib import contextmanager

import numpy as np
import pytest
from engine_files import make_engine_folder
from small_model import write_model

from trt_kvcache import opening
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.runner import RecomputeRunner

from .conftest import GOLDEN, NO_GPU, SHIPPED

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, no tokenizer
PROMPTS = ("--prompt-ids", "1,2,3,4,5", "--prompt-ids", "8,9,10")
COMPARE = ("compare", MODEL, "--engine", "reference", "--max-sequence-length", 16, "--steps", 3, *PROMPTS)
V_ROW = "  first at decode step 2 in the V rows of the cache: layer 1, V, slot 1, head 0, position 3, element 7 (`v_cache_1`)"
DIFFER = "reference and full recomputation DIFFER: "


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that changes one value of what full recomputation gives at one step."""
    infer = RecomputeRunner.infer_impl

    def plant(step, tensor, place, amount):
        calls = []

        def spoiled(self, feed):
            outputs = infer(self, feed)
            if len(calls) == step:
                outputs[tensor] = np.array(outputs[tensor])
                outputs[tensor][place] += amount
            calls.append(feed)
            return outputs

        monkeypatch.setattr(RecomputeRunner, "infer_impl", spoiled)

    return plant


def test_paths_that_agree(run):
    done = run(*COMPARE)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    what = "agree: logits and live cache rows of a prefill and 3 decode steps"
    pairs = ["reference and full recomputation", "reference and plugin reference", "full recomputation and plugin reference"]
    assert lines[::3] == [f"{pair} {what}" for pair in pairs]
    assert all(line.startswith("  largest difference of logits ") for line in lines[1::3])
    assert lines[2::3] == ["  greedy tokens: 8 of 8 equal"] * 3




def test_a_difference_in_the_cache_is_named(run, spoil):
    spoil(2, "v_cache_1", (1, 0, 3, 7), 5.0)
    done = run(*COMPARE)
    assert (done.code, done.err) == (3, "")
    first, second, third = done.out.splitlines()[:3]
    assert (first.startswith(DIFFER), second) == (True, V_ROW)
    assert "full recomputation has " in third
    assert "5 apart" in third




@pytest.mark.parametrize(("tolerance", "code"), [(1e-4, 3), (0.5, 0)])
def test_the_tolerance_can_be_set(run, spoil, tolerance, code):
    spoil(1, "k_cache_0", (0, 1, 2, 3), 0.05)
    assert run(*COMPARE, "--tolerance", tolerance).code == code


@pytest.mark.usefixtures("without_gpu")
def test_auto_goes_without_tensorrt_and_says_why(run, engine):
    done = run("compare", engine, "-p", "Alice", "--steps", 1)
    assert (done.code, done.err) == (0, f"warning: comparing without TensorRT: {NO_GPU}.\n")
    assert "TensorRT" not in done.out


def test_ctrl_c_while_tensorrt_is_being_imported(run, monkeypatch):
    def import_tensorrt(flavour):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return "tensorrt_rtx: cannot be imported (initialization failed)."

    monkeypatch.setattr(opening, "why_no_tensorrt", import_tensorrt)
    done = run("compare", MODEL, *PROMPTS)
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


NATIVE, PLUGIN = "reference native", "plugin reference plugin"
TENSORRT = ["TensorRT None", "plugin TensorRT plugin"]
REFERENCE = ["reference None", "full recomputation None"]
REFUSED = EngineError("not on this GPU")


@pytest.mark.parametrize(
    ("what", "options", "refusals", "expected", "warned"),
    [
        ("model", ["--engine", "reference"], {}, [*REFERENCE, PLUGIN], ""),
        ("model", ["--engine", "reference", "--attention", "plugin"], {}, ["reference plugin", "full recomputation plugin"], ""),
        ("model", ["--attention", "native"], {}, ["TensorRT native", NATIVE, "full recomputation native"], ""),
        ("model", [], {}, [*TENSORRT, *REFERENCE, PLUGIN], ""),
        ("model", [], {"plugin": ConfigError("head dim")}, [TENSORRT[0], *REFERENCE, PLUGIN], "plugin TensorRT: head dim"),
        ("model", [], {None: REFUSED}, [*REFERENCE, PLUGIN], "TensorRT: not on this GPU"),
        ("native engine", [], {"plugin": REFUSED}, [TENSORRT[0], *REFERENCE, PLUGIN], "plugin TensorRT: not on this GPU"),
        ("native engine", ["--engine", "tensorrt"], {None: REFUSED}, [], "error: not on this GPU"),
        ("plugin engine", [], {}, [TENSORRT[0], "native TensorRT native", *REFERENCE, "native reference native"], ""),
    ],
)
def test_paths_by_options(run, monkeypatch, tmp_path, what, options, refusals, expected, warned):
    folder = MODEL
    if "engine" in what:
        model = write_model(tmp_path / "model", head_dim=64)
        made = make_engine_folder(model, tmp_path / "engine", segmented="plugin" in what)
        folder = made.path
    found, opened = [], []

    @contextmanager
    def session(source):
        opened.append(source.attention)
        assert (source.engine, source.flavour) == ("tensorrt", "tensorrt_rtx" if source.max_prefill_length else "auto")
        try:
            yield source
        finally:
            opened.remove(source.attention)

    def opens(source):
        if source.attention in refusals:
            raise refusals[source.attention]
        return session(source)

    def note(paths, prompts, **_):
        found.extend(f"{path.name} {path._source.attention}" for path in paths)
        assert len(opened) == sum("TensorRT" in path.name for path in paths)
        raise ConfigError("enough seen")

    monkeypatch.setattr(opening, "why_no_tensorrt", lambda *_: None)
    monkeypatch.setattr("trt_kvcache.cli.compare.open_session", opens)
    monkeypatch.setattr("trt_kvcache.compare.compare_paths", note)
    done = run("compare", folder, *options, *PROMPTS)
    assert (found, opened) == (expected, [])
    warning = f"warning: comparing without {warned}\n" if warned else ""
    assert done.err == (f"{warned}\n" if not expected else f"{warning}error: enough seen\n")
