"""Ranges for profilers: there where ``nvtx`` sees one, and not a single call more where it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.paths import ROOT
from trt_kvcache._util import nvtx_ranges

#: A package ``nvtx`` that writes down what it is told. ``{domain}`` is the name of the class of its domains.
FAKE_NVTX = """
EVENTS = []
class {domain}:
    def get_event_attributes(self, message): return message
    def push_range(self, attributes): EVENTS.append(f"push {{attributes}}")
    def pop_range(self): EVENTS.append("pop")
def get_domain(name):
    assert name == "trt_kvcache"
    return {domain}()
"""
GENERATE = """
import json, nvtx
from trt_kvcache import InferenceSession
with InferenceSession.from_model("examples/tiny-llama", engine="reference", max_batch_size=2) as session:
    session._decode_steps.on_device = {on_device}
    list(session.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True))
    generated = list(nvtx.EVENTS)
    for count in (1, 2):
        session.submit([5, 6], max_new_tokens=count, ignore_eos=True)
    while session.step():
        pass
print(json.dumps([generated, nvtx.EVENTS[len(generated):]]))
"""


def ranges(tmp_path, domain, *, on_device=False):
    (tmp_path / "nvtx.py").write_text(FAKE_NVTX.format(domain=domain))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE.format(on_device=on_device)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_prefill_decode_sampling_and_compaction_have_ranges(tmp_path):
    generated, served = ranges(tmp_path, "Domain")
    step = ["push decode", "pop", "push sampling", "pop"]
    assert generated == ["push prefill", "pop", "push sampling", "pop", *step, *step]
    assert "push compaction" in served
    assert {"push prefill", "push decode", "push sampling"} <= set(served)


def test_a_step_on_the_device_has_its_sampling_in_its_range(tmp_path):
    generated, _ = ranges(tmp_path, "Domain", on_device=True)
    two_samplings = ["push decode", *["push sampling", "pop"] * 2, "pop"]  # the second one is that of the step ahead
    assert generated == ["push prefill", "pop", "push sampling", "pop", *two_samplings, "push decode", "pop"]


def test_without_a_profiler_there_are_none(tmp_path):
    assert ranges(tmp_path, "DummyDomain") == [[], []]


def test_without_a_profiler_the_function_itself_is_called(monkeypatch):
    monkeypatch.setattr(nvtx_ranges, "_DOMAIN", None)

    def work():
        return 1

    assert nvtx_ranges.nvtx_range("work")(work) is work


def test_a_range_ends_where_the_function_raises(monkeypatch):
    class Domain:
        def __init__(self):
            self.events = []

        def get_event_attributes(self, message):
            return message

        def push_range(self, attributes):
            self.events.append(attributes)

        def pop_range(self):
            self.events.append("pop")

    domain = Domain()
    monkeypatch.setattr(nvtx_ranges, "_DOMAIN", domain)

    @nvtx_ranges.nvtx_range("work")
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert domain.events == ["work", "pop"]
    assert fail.__name__ == "fail"
