import numpy as np
import pytest

from trt_kvcache.polygraphy.runner import RecomputeRunner

from .conftest import GOLDEN, NO_GPU

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, no tokenizer
PROMPTS = ("--prompt-ids", "1,2,3,4,5", "--prompt-ids", "8,9,10")
COMPARE = ("compare", MODEL, "--engine", "reference", "--max-sequence-length", 16, "--steps", 3, *PROMPTS)
V_ROW = "  first at decode step 2 in the V rows of the cache: layer 1, V, slot 1, head 0, position 3, element 7 (`v_cache_1`)"
DIFFER = "reference and full recomputation DIFFER: "


@pytest.fixture
def spoil(monkeypatch):
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


def test_the_tolerance_can_be_set(run, spoil):
    spoil(1, "k_cache_0", (0, 1, 2, 3), 0.05)
    assert run(*COMPARE, "--tolerance", 0.5).code == 0


@pytest.mark.usefixtures("without_gpu")
def test_auto_goes_without_tensorrt_and_says_why(run, engine):
    done = run("compare", engine, "-p", "Alice", "--steps", 1)
    assert (done.code, done.err) == (0, f"warning: comparing without TensorRT: {NO_GPU}.\n")
    assert "TensorRT" not in done.out
