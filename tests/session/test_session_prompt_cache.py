"""Sessions with a prompt cache: what was run before is not run again."""

from __future__ import annotations

import pytest

from tests.helpers.assertions import raises
from tests.session.reference_sessions import LONG, fails, same, tokens
from trt_kvcache import InferenceSession, PromptCache
from trt_kvcache.errors import ConfigError


def test_a_cached_prefix_is_not_run_again(opened):
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
def test_the_longer_of_slot_and_copy_is_reused(opened, copied, held, expected):
    session = opened(prompt_cache_bytes=1 << 20)
    session.prefill([LONG])
    session.prompt_cache.clear()
    session.prompt_cache.insert(LONG[:copied], 0, stream=session.cache.memory.create_stream())
    session.rewind(0, held)
    prompt = [*LONG, 21]
    same(session.prefill([prompt], reuse=True), opened().prefill([prompt]))
    assert session.statistics.reused_tokens == expected


def test_a_finished_request_serves_the_next_turn(opened):
    session = opened(prompt_cache_bytes=1 << 20)
    answer = tokens(session.generate([LONG], max_new_tokens=5, ignore_eos=True))
    session.prefill([[1, 2]])
    turn = [*LONG, *answer, 33]
    same(session.prefill([turn]), opened().prefill([turn]))
    assert session.prompt_cache.reused_tokens == len(LONG) + 4


def test_the_prompt_cache_is_off_by_default(opened):
    session = opened()
    session.prefill([LONG])
    session.prefill([LONG])
    assert (session.prompt_cache.entries, session.statistics.reused_tokens) == ((), 0)


def test_another_cache_is_refused(opened):
    one, other = opened(), opened()
    with raises(ConfigError, "prompt_cache", expected="over the cache of this session"):
        InferenceSession(one.engine, one.cache, prompt_cache=PromptCache(other.cache, max_bytes=1 << 20))


def test_a_step_that_fails_leaves_what_was_restored(opened):
    session, prompt = opened(prompt_cache_bytes=1 << 20), [*LONG, 20]
    session.prefill([LONG])
    fails(session, lambda: session.prefill([prompt]))
    assert session.tokens(0) == tuple(LONG)
    same(session.prefill([prompt], reuse=True), opened().prefill([prompt]))
