"""The peak of a process."""

import subprocess
import sys

import numpy as np
import pytest

from trt_kvcache._util.peak_memory import peak_memory_nbytes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the system does not say")

_MIB = 2**20
PEAK = "from trt_kvcache._util.peak_memory import peak_memory_nbytes; print(peak_memory_nbytes())"


def test_what_was_given_back_counts():
    np.ones(100 * _MIB, np.uint8)
    assert 100 * _MIB < peak_memory_nbytes() < 2**40


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not inherit it")
def test_what_the_process_that_started_it_had_does_not_count():
    held = np.ones(400 * _MIB, np.uint8)
    done = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert int(done.stdout) < held.nbytes
