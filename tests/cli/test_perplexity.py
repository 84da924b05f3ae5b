"""``trt-kvcache perplexity``: what ``text_perplexity`` returns, of files and of stdin, rounded weights too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trt_kvcache import InferenceSession, text_perplexity

from .conftest import SHIPPED, Run

REFERENCE = ("--engine", "reference")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((SHIPPED / "text.txt").read_text(encoding="utf-8")[:600], encoding="utf-8")
    return path


def test_a_line(run: Run, text: Path):
    done = run("perplexity", SHIPPED, text, *REFERENCE, "--window", 100, "--stride", 40)
    assert done.code == 0
    with InferenceSession.from_model(SHIPPED, engine="reference", max_logits_per_slot=64) as session:
        found = text_perplexity(session, text.read_text(encoding="utf-8"), window=100, stride=40)
    tokens = found.num_tokens
    assert done.out == (
        f"perplexity {found.perplexity:.4f} over {tokens} of {tokens} tokens in {found.num_windows} windows of 100 tokens, stride 40\n"
    )
    assert done.err.splitlines()[-1].startswith("ReferenceEngine on cpu: prefill ")


def test_json_and_rounded_weights(run: Run, text: Path):
    plain, rounded = (
        json.loads(run("perplexity", SHIPPED, text, *REFERENCE, "--json", *more).out) for more in ([], ["--quantize", "int8"])
    )
    assert plain["weights_format"] == "float16"
    assert rounded["weights_format"] == "int8 by output (rounded to nearest)"
    assert plain["num_scored"] == rounded["num_scored"]
    assert plain["perplexity"] != rounded["perplexity"]
    assert plain["perplexity"] == pytest.approx(rounded["perplexity"], rel=0.05)
    assert {"window", "stride", "num_windows", "logprob", "engine", "statistics"} <= plain.keys()


def test_a_file_that_is_no_text(run: Run, tmp_path: Path):
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    done = run("perplexity", SHIPPED, tmp_path / "bytes", *REFERENCE)
    assert (done.code, done.err) == (1, f"error: {tmp_path / 'bytes'}: expected text in UTF-8, got byte 0xff at 3.\n")


def test_a_stride_that_leaves_tokens_out(run: Run, text: Path):
    done = run("perplexity", SHIPPED, text, *REFERENCE, "--window", 20, "--stride", 20)
    assert (done.code, done.out) == (1, "")
    assert "error: stride: expected an integer from 1 to 18, got 20." in done.err
