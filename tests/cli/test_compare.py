from __future__ import annotations

import signal

import numpy as np
import pytest

from trt_kvcache import opening
from trt_kvcache.runner import RecomputeRunner

from .conftest import GOLDEN, NO_GPU, SHIPPED

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, no tokenizer
PROMPTS = ("--prompt-ids", "1,2,3,4,5", "--prompt-ids", "8,9,10")
COMPARE = ("compare", MODEL, "--engine", "reference", "--max-sequence-length", 16, "--steps", 3, *PROMPTS)
V_ROW = "  first at decode step 2 in the V rows of the cache: layer 1, V, slot 1, head 0, position 3, element 7 (`v_cache_1`)"
DIFFER, AGREE = "reference and full recomputation DIFFER: ", "reference and full recomputation agree: "


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
    first, second, third = done.out.splitlines()
    assert first == f"{AGREE}logits and live cache rows of a prefill and 3 decode steps"
    assert second.startswith("  largest difference of logits ")
    assert third == "  greedy tokens: 8 of 8 equal"


def test_text_prompts(run):
    done = run("compare", SHIPPED, "--engine", "reference", "-p", "Alice was beginning", "-p", "The rabbit-hole", "--steps", 2)
    assert (done.code, done.out.splitlines()[2]) == (0, "  greedy tokens: 6 of 6 equal")


def test_a_difference_in_the_cache_is_named(run, spoil):
    spoil(2, "v_cache_1", (1, 0, 3, 7), 5.0)
    done = run(*COMPARE)
    assert (done.code, done.err) == (3, "")
    first, second, third = done.out.splitlines()[:3]
    assert (first.startswith(DIFFER), second) == (True, V_ROW)
    assert "full recomputation has " in third
    assert "5 apart" in third


def test_a_difference_in_the_logits_is_named(run, spoil):
    spoil(0, "logits", (1, 7), 100.0)
    done = run(*COMPARE)
    assert (done.code, done.out.splitlines()[1]) == (3, "  first at the prefill in the logits: slot 1, token 7 (`logits`)")
    assert done.out.splitlines()[-1].startswith("  greedy tokens: 7 of 8 equal; first different after the prefill in slot 1:")


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
