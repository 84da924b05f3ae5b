"""kill -9 at any moment of a write: the file or folder is there and whole, the old one or the new one, never a part of one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.processes import ENGINE_FOLDERS, SESSION_SNAPSHOTS, SNAPSHOTS, kill_at_random, start
from tests.faults.sessions import GREEDY, every_model
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.paths import ROOT
from tests.sequences.snapshots import host_cache, save
from trt_kvcache import InferenceSession
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.sequences.snapshot import Snapshot

TIMES = pytest.mark.parametrize("times", [1, pytest.param(40, marks=pytest.mark.slow)])


def read_engine(place: Path) -> bytes:
    folder = EngineFolder.open(place / "engine")
    with folder.read_plan() as plan:
        return bytes(plan[:])


@TIMES
def test_while_snapshots_are_saved(tmp_path: Path, times: int) -> None:
    with host_cache("manager", 5, 0) as cache:
        save(tmp_path / "a.kv", cache, tokens=[99, 0, 2, 3, 4])
    chance, marks = random.Random(0), {99}
    for mark in range(times):
        process = start(SNAPSHOTS, tmp_path, mark)
        kill_at_random(process, chance)
        marks.add(mark)
        found = Snapshot.read(tmp_path / "a.kv")
        assert found.tokens[0] in marks
        assert found.tokens[2:] == (2, 3, 4)


@TIMES
@every_model
def test_while_sessions_save_theirs(tmp_path: Path, model: Path, times: int) -> None:
    """What is there goes on as the sequence that it says it is: K, V and states are of its tokens."""
    (tmp_path / "model").symlink_to(model)
    chance = random.Random(4)
    with InferenceSession.from_model(model, engine="reference", dtype="float32", max_sequence_length=32) as session:
        for mark in range(3, 3 + times):
            process = start(SESSION_SNAPSHOTS, tmp_path, mark)
            while not (tmp_path / "a.kv").exists():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.005)
            kill_at_random(process, chance)
            found = Snapshot.read(tmp_path / "a.kv")
            assert found.tokens[0] in range(3, mark + 1)
            expected = [event.token for event in session.generate([(*found.tokens, *found.pending)], **GREEDY)]
            assert [event.token for event in session.resume(tmp_path / "a.kv", **GREEDY)] == expected


@TIMES
def test_while_engine_folders_are_written(tmp_path: Path, times: int) -> None:
    make_engine_folder(write_model(tmp_path / "model", num_hidden_layers=1), tmp_path / "engine", plan=b"plan 99 0 " * 100)
    chance = random.Random(1)
    for mark in range(times):
        process = start(ENGINE_FOLDERS, tmp_path, mark)
        kill_at_random(process, chance)
        plan = read_engine(tmp_path)  # whole, and what its config.json records
        assert int(plan.split()[1]) in (99, *range(mark + 1))


@pytest.mark.slow
@pytest.mark.parametrize("times", [20])
def test_two_processes_on_one_snapshot(tmp_path: Path, times: int) -> None:
    both = [start(SNAPSHOTS, tmp_path, mark) for mark in (1, 2)]
    until = time.monotonic() + times * 0.2
    seen = set()
    while time.monotonic() < until or not (tmp_path / "a.kv").exists():
        if (tmp_path / "a.kv").exists():
            seen.add(Snapshot.read(tmp_path / "a.kv").tokens[0])
    for process in both:
        kill_at_random(process, random.Random(0), 0)
    assert seen <= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("times", [20])
def test_two_processes_on_one_engine_folder(tmp_path: Path, times: int) -> None:
    write_model(tmp_path / "model", num_hidden_layers=1)
    both = [start(ENGINE_FOLDERS, tmp_path, mark) for mark in (1, 2)]
    time.sleep(times * 0.2)
    for process in both:
        kill_at_random(process, random.Random(0), 0)
    assert int(read_engine(tmp_path).split()[1]) in (1, 2)


@pytest.mark.trt
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_while_an_engine_is_built(tmp_path: Path, times: int) -> None:
    model, sizes = write_model(tmp_path / "model"), {"max_sequence_length": 32, "max_prefill_length": 8}
    build_engine(model, tmp_path / "engine", **sizes, flavour="tensorrt_rtx")
    command = [sys.executable, "-m", "trt_kvcache", "build", str(model), "-o", str(tmp_path / "engine"), "--flavour", "tensorrt_rtx"]
    command += ["--max-batch-size", "2", "--max-sequence-length", "32", "--max-prefill-length", "8"]
    chance = random.Random(3)
    for _ in range(times):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        time.sleep(chance.uniform(0, 6))
        process.kill()
        process.wait()
        assert read_engine(tmp_path)  # whole, and what its config.json records: that of before, or that of this build
    assert EngineFolder.open(tmp_path / "engine").config.cache.max_batch_size in (1, 2)


def serve(place: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trt_kvcache", "serve-file", str(ROOT / "examples" / "tiny-llama"), str(place / "prompts.jsonl")]
    command += ["-o", str(place / "answers.jsonl"), "--engine", "reference", "--max-new-tokens", "12", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("times", [12])
def test_while_a_file_is_served(tmp_path: Path, times: int) -> None:
    """Answers that were written are kept, a half one is not taken for one, and the rest follows."""
    prompts = [f"Alice was {number}" for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    output = tmp_path / "answers.jsonl"
    finish(serve(tmp_path))
    expected = _answers(output)
    assert sorted(expected) == list(range(len(prompts)))
    chance = random.Random(2)
    for _ in range(times):
        output.unlink()
        process = serve(tmp_path)
        while not output.exists() or not output.stat().st_size:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kept = _answers(output)
        assert kept.items() <= expected.items()
        finish(serve(tmp_path, "--continue"))
        assert _answers(output) == expected


def _answers(path: Path) -> dict[int, str]:
    """The text of each answer in a file. A last line without its end is none."""
    lines = path.read_text().split("\n")[:-1]
    return {answer["index"]: answer["text"] for answer in map(json.loads, lines)}


def test_nothing_but_the_target_is_left_where_nothing_was_killed(tmp_path: Path) -> None:
    make_engine_folder(write_model(tmp_path / "model", num_hidden_layers=1), tmp_path / "engine")
    assert sorted(os.listdir(tmp_path)) == ["engine", "model"]
