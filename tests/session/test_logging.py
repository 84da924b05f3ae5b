"""What a session logs for a user who asks (``-v``): engine and reason, seeds, prompt cache, queue. Nothing unless asked."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.helpers.sessions import drain, make
from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.session import open_model
from trt_kvcache.session.open_model import EngineFallbackWarning

MODEL = ROOT / "examples" / "tiny-llama"


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="trt_kvcache")
    return caplog


def test_the_engine_and_why(log, monkeypatch):
    monkeypatch.setattr(open_model, "find_gpu", lambda device: "there is no GPU here")
    monkeypatch.setattr(open_model, "why_no_torch", lambda: "torch is not installed")
    with pytest.warns(EngineFallbackWarning):
        InferenceSession.from_model(MODEL, max_sequence_length=64).close()
    InferenceSession.from_model(MODEL, engine="reference", max_sequence_length=64).close()
    opened = f"opened {MODEL}: ReferenceEngine, 1 slots of 64 tokens in float16, 0 MiB of K and V, 0 MiB of weights in float16"
    assert [(one.name, one.message) for one in log.records] == [
        ("trt_kvcache.session", "engine: numpy, because there is no GPU here; and torch is not installed"),
        ("trt_kvcache.session", opened),
        ("trt_kvcache.session", "engine: numpy, as asked for"),
        ("trt_kvcache.session", opened),
    ]


def test_the_queue_and_the_prompt_cache(log):
    session = make(slots=1, reuse=1 << 20)
    session.submit([1, 2, 3], max_new_tokens=2)
    session.submit([1, 2, 3, 4], max_new_tokens=1, temperature=1.0, seed=9)
    drain(session)
    assert log.messages == [
        "request 0: 3 prompt tokens, is number 1 in the queue",
        "request 1: 4 prompt tokens, seed 9, is number 2 in the queue",
        "request 0: begins in slot 0, 0 of its tokens are copies",
        "request 0: ended after 2 tokens, length",
        "request 1: begins in slot 0, 3 of its tokens are copies",
        "request 1: ended after 1 tokens, length",
    ]


def test_generate(log):
    session = make(slots=2, reuse=1 << 20)
    for _ in range(2):
        list(session.generate([[1, 2, 3], [4]], max_new_tokens=1, temperature=1.0, seed=5))
    begin = ["prompt 0: 3 tokens, seed 5", "prompt 1: 1 tokens, seed 5"]
    assert log.messages == [*begin, *begin, "slot 0: 2 of 3 prompt tokens are from the prompt cache"]


def test_nothing_is_printed_unless_a_program_asks():
    program = f"import trt_kvcache, logging; trt_kvcache.load({str(MODEL)!r}, engine='reference').close()"
    program += "; logging.getLogger('trt_kvcache').error('x')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_session_in_words():
    session = make(slots=2)
    assert repr(session) == "InferenceSession(engine=RecordingEngine, slots=2, max_sequence_length=16, vocab_size=263, active=0)"
    session.prefill([[1]])
    assert repr(session).endswith("active=1)")
    session.close()
    assert repr(session).endswith("closed)")


def test_a_snapshot_in_words(tmp_path):
    with InferenceSession.from_model(MODEL, engine="reference") as session:
        list(session.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True, seed=3, temperature=1.0))
        text = repr(session.save_snapshot(tmp_path / "a.kv"))
    assert text.startswith("Snapshot(tokens=4, pending=1, sampler=SamplerState(seed=3, counter=2, generated=2), nbytes=")
    assert len(text) < 120
