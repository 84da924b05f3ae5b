"""Snapshots that are damaged, or written by somebody else with a right hash: refused, or with the same contents."""

from __future__ import annotations

import hashlib
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.mutations import damage_bytes, damage_value, damaged_json
from tests.faults.sessions import GREEDY, answers, check_usable, every_model, prepared
from tests.faults.watch import Findings
from tests.sequences.snapshots import MODEL, SAMPLER, host_cache, load, save
from trt_kvcache.sequences.snapshot import Snapshot


def damaged(content: bytes, seed: int) -> bytes:
    """Damage any bytes; or the header or description, and give the file a hash that is right."""
    chance = random.Random(seed)
    if seed % 4 == 0:
        return damage_bytes(content, chance)
    start = 8 + int.from_bytes(content[:8], "little")
    header, payload = content[8:start], content[start:-32]
    if seed % 4 == 1:
        header = damaged_json(header, chance)
    else:
        data = json.loads(header)
        description = json.loads(data["__metadata__"]["description"])
        for _ in range(chance.choice([1, 1, 2])):
            damage_value(description, chance)
        data["__metadata__"]["description"] = json.dumps(description)
        header = json.dumps(data).encode()
    if seed % 7 == 0:
        payload = damage_bytes(payload, chance)
    body = len(header).to_bytes(8, "little") + header + payload
    return body + hashlib.sha256(body).digest()


def check(path: Path, cache: Any, before: Snapshot, *, payload_was_changed: bool) -> None:
    """Read a file. If it is accepted, it says what it said before."""
    found = Snapshot.read(path)
    found.check_fits(cache, MODEL)
    if not payload_was_changed:
        check_same(found, before)


def check_same(found: Snapshot, before: Snapshot) -> None:
    assert [array.tobytes() for array in found.contents.arrays] == [array.tobytes() for array in before.contents.arrays]
    assert (found.tokens, found.pending) == (before.tokens, before.pending)


def cases(path: Path, kind: str, seeds: range) -> None:
    findings = Findings()
    with host_cache(kind, 5, 0) as cache:
        save(path, cache, pending=[1], sampler=SAMPLER)
        original, before = path.read_bytes(), Snapshot.read(path)
        for seed in seeds:
            path.write_bytes(damaged(original, seed))
            findings.run(seed, partial(check, path, cache, before, payload_was_changed=seed % 7 == 0))
    findings.check()
    assert findings.refused


@pytest.mark.parametrize("kind", ["manager", "hybrid"])
def test_damaged_snapshots(tmp_path: Path, kind: str) -> None:
    cases(tmp_path / "a.kv", kind, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
def test_thousands_of_damaged_snapshots(tmp_path: Path, kind: str) -> None:
    cases(tmp_path / "a.kv", kind, range(1000, 3000))


@every_model
def test_sessions_resume_damaged_snapshots(tmp_path: Path, model: Path) -> None:
    """They go on as before the damage, or not at all; and are as usable as before."""
    findings, path = Findings(), tmp_path / "saved.kv"
    with prepared(tmp_path, model) as session:
        original, expected, before = path.read_bytes(), answers(session), Snapshot.read(path)
        wanted = [event.token for event in session.generate([(*before.tokens, *before.pending)], **GREEDY)]

        def resume(*, payload_was_changed: bool) -> None:
            try:
                found = [event.token for event in session.resume(path, **GREEDY)]
                if not payload_was_changed:
                    assert found == wanted
                    check_same(Snapshot.read(path), before)
            finally:
                check_usable(session, expected)

        for seed in range(60):
            path.write_bytes(damaged(original, seed))
            findings.run(seed, partial(resume, payload_was_changed=seed % 7 == 0))
    findings.check()
    assert findings.refused


def test_the_undamaged_one_is_loaded(tmp_path: Path) -> None:
    with host_cache("hybrid", 5, 0) as cache:
        save(tmp_path / "a.kv", cache, pending=[1], sampler=SAMPLER)
        assert load(tmp_path / "a.kv", cache).reused_tokens == 5
