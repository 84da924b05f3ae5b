"""Saved sequences: another session, or another process, continues them with the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import Unchanged
from tests.helpers.models import write_model
from tests.paths import GOLDEN
from tests.sequences.snapshots import MODEL, TOKENS, host_cache, save
from tests.session.reference_sessions import LONG, OPTIONS, SAMPLED, UNSEEDED, fails, same, tokens
from trt_kvcache import InferenceSession
from trt_kvcache.errors import CapacityError, ConfigError, KVCacheError, ShapeError, SnapshotError
from trt_kvcache.session.resume_snapshots import read_snapshots

GO_ON = """
import json, sys
from trt_kvcache import InferenceSession
folder, path, options, sampling = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
with InferenceSession.from_model(folder, **options) as session:
    print(json.dumps([event.token for event in session.resume(path, **sampling)]))
"""


@pytest.mark.parametrize("sampling", [SAMPLED, {"ignore_eos": True}], ids=["sampled", "greedy"])
def test_a_new_process_continues_with_the_same_tokens(opened, reference_model, tmp_path, sampling):
    session = opened()
    expected = tokens(session.generate([[5, 6], LONG], **sampling, max_new_tokens=16), 1)
    events = session.generate([[5, 6], LONG], **sampling, max_new_tokens=16)
    first = tokens([next(events) for _ in range(2 * 6)], 1)
    session.save_snapshot(tmp_path / "one.kv", 1)
    rest = {name: value for name, value in sampling.items() if name != "seed"} | {"max_new_tokens": 10}
    arguments = [str(reference_model), str(tmp_path / "one.kv"), json.dumps(OPTIONS | {"max_batch_size": 1}), json.dumps(rest)]
    result = subprocess.run([sys.executable, "-c", GO_ON, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (first, json.loads(result.stdout)) == (expected[:6], expected[6:])


def test_sequences_saved_in_the_middle_of_a_step(opened, tmp_path):
    session = opened()
    expected = [tokens(session.generate([[5, 6], LONG], **SAMPLED, max_new_tokens=9), index) for index in range(2)]
    events = session.generate([[5, 6], LONG], **SAMPLED, max_new_tokens=9)
    for _ in range(7):  # slot 0 has handed out 4 tokens, slot 1 has chosen its 4th and not handed it out
        next(events)
    paths = [tmp_path / "0.kv", tmp_path / "1.kv"]
    snapshots = [session.save_snapshot(path, slot) for slot, path in enumerate(paths)]
    assert [one.pending for one in snapshots] == [(expected[0][3],), ()]
    rest = list(opened().resume(paths, **UNSEEDED, max_new_tokens=5))
    assert tokens(rest, 0) == expected[0][4:]
    assert tokens(rest, 1) == expected[1][3:8]


def test_a_sequence_saved_at_its_first_token_and_saved_again(opened, tmp_path):
    session, other = opened(), opened()
    expected = tokens(session.generate([[5, 6], LONG], **SAMPLED, max_new_tokens=6), 1)
    next(session.generate([[5, 6], LONG], **SAMPLED))
    session.save_snapshot(tmp_path / "1.kv", 1)
    other.load_snapshots(tmp_path / "1.kv")
    other.save_snapshot(tmp_path / "again.kv")
    for path in ("1.kv", "again.kv"):
        assert tokens(other.resume(tmp_path / path, **UNSEEDED, max_new_tokens=6)) == expected


def test_the_sampler_state_follows_its_slot_through_a_step_that_fails(opened, tmp_path):
    session = opened(max_batch_size=2)
    session.submit([5, 6], max_new_tokens=1, **SAMPLED)
    other = session.submit(LONG, max_new_tokens=9, seed=22, **UNSEEDED)
    while len(other.tokens) < 2:
        session.step()
    fails(session, session.step)
    [slot] = [slot for slot in range(session.cache.active_batch_size) if len(session.tokens(slot)) >= len(LONG)]
    done = session.save_snapshot(tmp_path / "b.kv", slot)
    assert (done.sampler.seed, done.sampler.counter) == (22, 2)
    expected = tokens(opened().generate([LONG], max_new_tokens=9, seed=22, **UNSEEDED))
    assert [*other.tokens, *tokens(opened().resume(tmp_path / "b.kv", max_new_tokens=7, **UNSEEDED))] == expected


def test_a_given_seed_replaces_the_saved_sampler_state(opened, tmp_path):
    session = opened()
    next(session.generate([LONG], **SAMPLED))
    session.save_snapshot(tmp_path / "one.kv")
    prompt = [*session.tokens(0), *session.pending_tokens(0)]
    own = {**UNSEEDED, "seed": 12, "max_new_tokens": 6}
    assert tokens(session.resume(tmp_path / "one.kv", **own)) == tokens(opened().generate([prompt], **own))


def test_loaded_sequences_can_be_appended_to(opened, tmp_path):
    session, other = opened(), opened(max_batch_size=2)
    list(session.generate([[5, 6], LONG], max_new_tokens=3, ignore_eos=True))
    for slot in range(2):
        session.save_snapshot(tmp_path / f"{slot}.kv", slot)
    other.load_snapshots([tmp_path / "1.kv", tmp_path / "0.kv"])
    assert [other.tokens(slot) for slot in range(2)] == [session.tokens(1), session.tokens(0)]
    assert [other.pending_tokens(slot) for slot in range(2)] == [session.pending_tokens(1), session.pending_tokens(0)]
    same(other.append([[3], [4, 5]])[::-1], session.append([[4, 5], [3]]))


@pytest.mark.parametrize(
    ("options", "paths", "error", "text"),
    [
        ({}, [], ShapeError, "snapshots: expected 1 to max_batch_size=3 files, got 0."),
        ({}, "none.kv", SnapshotError, "none.kv"),
        ({"max_batch_size": 1}, ["a.kv", "a.kv"], ShapeError, "snapshots: expected 1 to max_batch_size=1 files, got 2."),
        ({"max_sequence_length": 11}, "a.kv", CapacityError, "it holds 12 tokens, max_sequence_length is 11. Nothing was changed."),
        ({"max_sequence_length": 12}, "b.kv", CapacityError, "slot 0 holds 12 tokens; adding 1 exceeds max_sequence_length=12."),
        ({"dtype": "float16"}, "a.kv", SnapshotError, "It was saved from another cache."),
    ],
)
def test_snapshots_that_do_not_fit_are_refused_and_change_nothing(opened, tmp_path, options, paths, error, text):
    source, session = opened(), opened(**options)
    source.prefill([LONG])
    source.save_snapshot(tmp_path / "a.kv")
    next(source.generate([LONG]))
    source.save_snapshot(tmp_path / "b.kv")
    session.prefill([[1, 2, 3]])
    files = [tmp_path / path for path in paths] if isinstance(paths, list) else tmp_path / paths
    with pytest.raises(error) as caught:
        session.resume(files)
    assert text in str(caught.value)
    assert isinstance(caught.value, KVCacheError)
    assert session.tokens(0) == (1, 2, 3)


def test_another_model_is_refused(opened, tmp_path):
    other = write_model(tmp_path / "other", seed=5)
    session = opened()
    session.prefill([LONG])
    session.save_snapshot(tmp_path / "a.kv")
    with InferenceSession.from_model(other, **OPTIONS) as changed, pytest.raises(SnapshotError, match="saved with another model"):
        changed.load_snapshots(tmp_path / "a.kv")


def test_a_session_without_a_model_identity_saves_no_snapshots(opened, tmp_path):
    session = opened()
    bare = InferenceSession(session.engine, session.cache)
    bare.prefill([LONG])
    with pytest.raises(ConfigError, match="expected a session that knows its model, got one without identity"):
        bare.save_snapshot(tmp_path / "a.kv")
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("paths", [5, [5], b"a.kv", None])
def test_what_is_no_path_is_refused(opened, paths):
    session = opened()
    with raises(ShapeError, "snapshots", expected="path or a sequence of paths"):
        session.load_snapshots(paths)


def test_an_empty_sequence_cannot_be_resumed(opened, tmp_path):
    session = opened()
    session.prefill([LONG])
    session.rewind(0, 0)
    session.save_snapshot(tmp_path / "empty.kv")
    with pytest.raises(ShapeError, match=r"^snapshot: expected "):
        session.resume(tmp_path / "empty.kv")


class TestPaths:
    """What ``read_snapshots`` accepts: one path, or a sequence of at most as many as the cache has slots."""

    @pytest.fixture
    def cache(self):
        with host_cache("manager", 5) as cache:
            yield cache

    @pytest.fixture
    def path(self, tmp_path, cache):
        save(tmp_path / "a", cache)
        return tmp_path / "a"

    def test_paths_of_both_kinds(self, path, cache):
        assert [one.tokens for one in read_snapshots((path, str(path)), cache, MODEL, {})] == [tuple(TOKENS)] * 2

    @pytest.mark.parametrize(
        "given",
        [lambda path: None, lambda path: 3, lambda path: b"a", lambda path: [], lambda path: [path, 3], lambda path: [path] * 6],
        ids=["None", "a number", "bytes", "nothing", "a number among them", "more than slots"],
    )
    def test_no_paths(self, path, cache, given):
        with Unchanged(cache), pytest.raises(ShapeError):
            read_snapshots(given(path), cache, MODEL, {})


def test_keys_that_longrope_rotated_for_shorter_sequences_are_refused(tmp_path):
    """Caches of up to 80 tokens have the same angles, longer ones have others."""

    def opened(length):
        return InferenceSession.from_model(GOLDEN / "phi3-short-window", engine="reference", dtype="float32", max_sequence_length=length)

    with opened(40) as source, opened(80) as same_angles, opened(81) as others:
        source.prefill([[1, 2, 3]])
        source.save_snapshot(tmp_path / "one.kv")
        same_angles.load_snapshots(tmp_path / "one.kv")
        assert same_angles.tokens(0) == (1, 2, 3)
        with raises(SnapshotError, "rope", expected=("'is_long': True", "as the model has"), got="'is_long': False"):
            others.load_snapshots(tmp_path / "one.kv")
