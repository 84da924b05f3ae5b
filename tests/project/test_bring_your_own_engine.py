"""The example of an engine that this package did not build: it runs, and its cache is right however a prompt is cut."""

import runpy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np

from tests.helpers.recording import poison
from tests.paths import ROOT
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager

SCRIPT = str(ROOT / "examples" / "bring_your_own_engine.py")
PRINTED = """\
1 2 3 4 1 2 3 4 1 2 3 4 -> 1 2 3 4 1 2 3 4
7 7 8 7 7 8 -> 7 8 7 8 7 8 7 8
5 30 5 30 -> 5 30 5 30 5 30 5 30
11008 of 49152 bytes of the cache are live
"""


def test_it_runs():
    done = subprocess.run([sys.executable, "-W", "error", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == PRINTED


def test_cached_rows_are_those_of_one_pass():
    example, memory = SimpleNamespace(**runpy.run_path(SCRIPT)), HostMemory()
    with InferenceSession(example.InductionEngine(memory), KVCacheManager(example.KV, memory=memory), names=example.NAMES) as session:
        tokens = [1, 2, 3, 1, 4, 2, 3, 1, 2, 5, 1]
        whole = session.prefill([tokens, [6, 7]])
        for cut in range(1, len(tokens)):
            session.prefill([tokens[:cut], [6]])
            poison(session.cache)
            np.testing.assert_array_equal(session.append([tokens[cut:], [7]]), whole)
