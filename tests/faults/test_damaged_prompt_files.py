"""Files of prompts that are damaged: refused with an error of ours, or read as what the lines say."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest

from tests.faults.mutations import damage_bytes, damaged_json
from tests.faults.watch import Findings
from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.cli.prompt_file import read_prompt_file

LINES = [
    b'"Alice was"',
    b"[5, 6, 7]",
    b'{"prompt": "The rabbit", "max_new_tokens": 2, "temperature": 0.5, "seed": 3, "stop": ["x"]}',
    b'{"prompt": [5, 6, 7], "top_k": 4, "top_p": 0.9, "ignore_eos": true}',
    b'{"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 1}',
]


def run_file(path: Path, session: InferenceSession) -> None:
    """Read a file, and give its prompts to a session, which checks them."""
    found = read_prompt_file(path)
    given = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    if path.suffix == ".jsonl" and b"\r" not in path.read_bytes():
        assert len(found) == len(given)
    for item in found:
        prompt = item.prompt
        if path.suffix == ".jsonl" and isinstance(prompt, str | list):
            value = json.loads(given[int(item.place.rsplit(":", 1)[1]) - 1 - _skipped(path, item.place)].decode("utf-8-sig"))
            said = value.get("prompt") if isinstance(value, dict) else value
            assert prompt == ("" if said is None else said)
        if isinstance(prompt, str | list):
            handle = session.submit(prompt, **({"max_new_tokens": 1} | dict(item.options)))
            handle.cancel()


def _skipped(path: Path, place: str) -> int:
    """How many lines of white space come before a line."""
    number = int(place.rsplit(":", 1)[1])
    return sum(not line.strip() for line in path.read_bytes().split(b"\n")[:number])


def cases(folder: Path, seeds: range) -> None:
    findings = Findings()
    with InferenceSession.from_model(ROOT / "examples" / "tiny-llama", engine="reference", max_sequence_length=64) as session:
        for seed in seeds:
            chance = random.Random(seed)
            lines = [damaged_json(line, chance) if chance.random() < 0.5 else line for line in LINES]
            content = b"\n".join(lines)
            path = folder / ("prompts.txt" if seed % 10 == 0 else "prompts.jsonl")
            path.write_bytes(damage_bytes(content, chance) if chance.random() < 0.2 else content)
            findings.run(seed, partial(run_file, path, session))
    findings.check()
    assert findings.refused


def test_damaged_files(tmp_path: Path) -> None:
    cases(tmp_path, range(60))


@pytest.mark.slow
def test_thousands_of_damaged_files(tmp_path: Path) -> None:
    cases(tmp_path, range(1000, 4000))
