"""Processes that write files over and over, to be killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.paths import ROOT

#: What each process begins with. It prints a line when it begins to write.
BEGIN = """
import itertools, sys
from pathlib import Path
place, mark = Path(sys.argv[1]), int(sys.argv[2])
"""

SNAPSHOTS = (
    BEGIN
    + """
from tests.sequences.snapshots import host_cache, save
with host_cache("manager", 5, 0) as cache:
    print("ready", flush=True)
    for number in itertools.count():
        save(place / "a.kv", cache, tokens=[mark, number, 2, 3, 4])
"""
)

#: Of a session: the first token of its prompt says which process wrote the file.
SESSION_SNAPSHOTS = (
    BEGIN
    + """
from tests.faults.sessions import GREEDY
from trt_kvcache import InferenceSession
with InferenceSession.from_model(place / "model", engine="reference", dtype="float32", max_batch_size=2, max_sequence_length=32) as session:
    print("ready", flush=True)
    for number in itertools.count():
        list(session.generate([[3, 4], [mark, number % 70, 5, 6]], **GREEDY))
        session.save_snapshot(place / "a.kv", 1)
"""
)

ENGINE_FOLDERS = (
    BEGIN
    + """
from tests.helpers.engine_files import make_engine_folder
model = place / "model"
print("ready", flush=True)
for number in itertools.count():
    make_engine_folder(model, place / "engine", plan=f"plan {mark} {number} ".encode() * 100)
"""
)


def start(program: str, place: Path, mark: int) -> subprocess.Popen[str]:
    """Start a process, and wait until it writes."""
    command = [sys.executable, "-c", program, str(place), str(mark)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()[1]
    return process


def kill_at_random(process: subprocess.Popen[str], chance: random.Random, longest: float = 0.3) -> None:
    """Let a process go on for a moment, and kill it. It must not have ended by itself."""
    time.sleep(chance.uniform(0, longest))
    ended = process.poll()
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert ended is None, errors
