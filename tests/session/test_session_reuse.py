"""Sessions that start from what was run before: a prompt cache, and snapshots from another process."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.small_model import write_model
from trt_kvcache import InferenceSession, PromptCache
from trt_kvcache.errors import CapacityError, ConfigError, KVCacheError, ShapeError, SnapshotError

OPTIONS = {"engine": "reference", "max_sequence_length": 48, "max_prefill_length": 7, "dtype": "float32"}
UNSEEDED = {"temperature": 0.8, "ignore_eos": True}
SAMPLED = {**UNSEEDED, "seed": 11}
LONG = [*range(3, 15)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def opened(model):
    sessions = []

    def make(**options):
        sessions.append(InferenceSession.from_model(model, **(OPTIONS | {"max_batch_size": 3} | options)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def tokens(events, index=0):
    return [event.token for event in events if event.index == index]


def same(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def fails(session, call):
    """Run a call whose step fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.engine, "enqueue", lambda stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call()


class TestPromptCache:
    def test_a_cached_prefix_is_not_run_again(self, opened):
        session, fresh = opened(prompt_cache_bytes=1 << 20), opened()
        session.prefill([LONG])
        prompts = [[9, 9, 9], [*LONG, 20, 21], [*LONG[:5], 30]]
        same(session.prefill(prompts), fresh.prefill(prompts))
        assert [session.tokens(slot) for slot in range(3)] == [tuple(prompt) for prompt in prompts]
        assert session.statistics.reused_tokens == session.prompt_cache.reused_tokens == 12 + 5
        assert session.statistics.prefill_tokens == 12 + 3 + 2 + 1
        assert (session.prompt_cache.hits, session.prompt_cache.misses) == (2, 2)
        same(session.decode([1, 2, 3]), fresh.decode([1, 2, 3]))

    @pytest.mark.parametrize(("copied", "held", "expected"), [(6, 9, 9), (6, 2, 6)])
    def test_the_longer_of_slot_and_copy_is_reused(self, opened, copied, held, expected):
        session = opened(prompt_cache_bytes=1 << 20)
        session.prefill([LONG])
        session.prompt_cache.clear()
        session.prompt_cache.insert(LONG[:copied], 0, stream=session.cache.memory.create_stream())
        session.rewind(0, held)
        prompt = [*LONG, 21]
        same(session.prefill([prompt], reuse=True), opened().prefill([prompt]))
        assert session.statistics.reused_tokens == expected

    def test_a_finished_request_serves_the_next_turn(self, opened):
        session = opened(prompt_cache_bytes=1 << 20)
        answer = tokens(session.generate([LONG], max_new_tokens=5, ignore_eos=True))
        session.prefill([[1, 2]])
        turn = [*LONG, *answer, 33]
        same(session.prefill([turn]), opened().prefill([turn]))
        assert session.prompt_cache.reused_tokens == len(LONG) + 4

    def test_the_prompt_cache_is_off_by_default(self, opened):
        session = opened()
        session.prefill([LONG])
        session.prefill([LONG])
        assert (session.prompt_cache.entries, session.statistics.reused_tokens) == ((), 0)

    def test_another_cache_is_refused(self, opened):
        one, other = opened(), opened()
        with pytest.raises(ConfigError, match="prompt_cache: expected one over the cache of this session"):
            InferenceSession(one.engine, one.cache, prompt_cache=PromptCache(other.cache, max_bytes=1 << 20))

    def test_a_step_that_fails_leaves_what_was_restored(self, opened):
        session, prompt = opened(prompt_cache_bytes=1 << 20), [*LONG, 20]
        session.prefill([LONG])
        fails(session, lambda: session.prefill([prompt]))
        assert session.tokens(0) == tuple(LONG)
        same(session.prefill([prompt], reuse=True), opened().prefill([prompt]))


class TestSnapshots:
    GO_ON = """
import json, sys
from trt_kvcache import InferenceSession
folder, path, options, sampling = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
with InferenceSession.from_model(folder, **options) as session:
    print(json.dumps([event.token for event in session.resume(path, **sampling)]))
"""

    @pytest.mark.parametrize("sampling", [SAMPLED, {"ignore_eos": True}], ids=["sampled", "greedy"])
    def test_a_new_process_continues_with_the_same_tokens(self, opened, model, tmp_path, sampling):
        session = opened()
        expected = tokens(session.generate([[5, 6], LONG], **sampling, max_new_tokens=16), 1)
        events = session.generate([[5, 6], LONG], **sampling, max_new_tokens=16)
        first = tokens([next(events) for _ in range(2 * 6)], 1)
        session.save_snapshot(tmp_path / "one.kv", 1)
        rest = {name: value for name, value in sampling.items() if name != "seed"} | {"max_new_tokens": 10}
        arguments = [str(model), str(tmp_path / "one.kv"), json.dumps(OPTIONS | {"max_batch_size": 1}), json.dumps(rest)]
        result = subprocess.run([sys.executable, "-c", self.GO_ON, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert (first, json.loads(result.stdout)) == (expected[:6], expected[6:])

    def test_sequences_saved_in_the_middle_of_a_step(self, opened, tmp_path):
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

    def test_a_sequence_saved_at_its_first_token_and_saved_again(self, opened, tmp_path):
        session, other = opened(), opened()
        expected = tokens(session.generate([[5, 6], LONG], **SAMPLED, max_new_tokens=6), 1)
        next(session.generate([[5, 6], LONG], **SAMPLED))
        session.save_snapshot(tmp_path / "1.kv", 1)
        other.load_snapshots(tmp_path / "1.kv")
        other.save_snapshot(tmp_path / "again.kv")
        for path in ("1.kv", "again.kv"):
            assert tokens(other.resume(tmp_path / path, **UNSEEDED, max_new_tokens=6)) == expected

    def test_the_sampler_state_follows_its_slot_through_a_step_that_fails(self, opened, tmp_path):
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

    def test_a_given_seed_replaces_the_saved_sampler_state(self, opened, tmp_path):
        session = opened()
        next(session.generate([LONG], **SAMPLED))
        session.save_snapshot(tmp_path / "one.kv")
        prompt = [*session.tokens(0), *session.pending_tokens(0)]
        own = {**UNSEEDED, "seed": 12, "max_new_tokens": 6}
        assert tokens(session.resume(tmp_path / "one.kv", **own)) == tokens(opened().generate([prompt], **own))

    def test_loaded_sequences_can_be_appended_to(self, opened, tmp_path):
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
    def test_snapshots_that_do_not_fit_are_refused_and_change_nothing(self, opened, tmp_path, options, paths, error, text):
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

    def test_another_model_is_refused(self, opened, tmp_path):
        other = write_model(tmp_path / "other", seed=5)
        session = opened()
        session.prefill([LONG])
        session.save_snapshot(tmp_path / "a.kv")
        with InferenceSession.from_model(other, **OPTIONS) as changed, pytest.raises(SnapshotError, match="saved with another model"):
            changed.load_snapshots(tmp_path / "a.kv")

    def test_a_session_without_a_model_identity_saves_no_snapshots(self, opened, tmp_path):
        session = opened()
        bare = InferenceSession(session.engine, session.cache)
        bare.prefill([LONG])
        with pytest.raises(ConfigError, match="expected a session that knows its model, got one without identity"):
            bare.save_snapshot(tmp_path / "a.kv")
        assert not list(Path(tmp_path).iterdir())
