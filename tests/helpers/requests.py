"""Sessions that requests are submitted to, and what a request should get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.helpers.fakes import kv_config, recorded
from trt_kvcache import InferenceSession, KVLayout, PromptCache, SamplingParams


def make(*, tokenizer: Any = None, profiles: Any = None, reuse: int = 0, combined: bool = False, **kv: Any) -> InferenceSession:
    """Return a session over a recording engine; ``reuse`` bytes are for copies of prompts."""
    layout = KVLayout.COMBINED if combined else KVLayout.SEPARATE
    engine, cache = recorded(kv_config(**kv, layout=layout), profiles=profiles, combined=combined)
    return InferenceSession(engine, cache, tokenizer=tokenizer, prompt_cache=PromptCache(cache, max_bytes=reuse))


def outcome(handle: Any) -> tuple[tuple[int, ...], str, str | None]:
    """Return what became of a request."""
    return handle.tokens, handle.text, handle.finish_reason


def alone(session: InferenceSession, prompt: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], str, str | None]:
    """Return what ``generate`` makes of a prompt, in a session of its own."""
    events = list(session.generate([prompt], params))
    return tuple(event.token for event in events), "".join(event.text for event in events), events[-1].finish_reason


def drain(session: InferenceSession) -> None:
    """Step until every request has ended."""
    while moved := session.step():
        assert [handle.index for handle in moved] == sorted(handle.index for handle in moved)


def sampled(count: int, seed: int = 0) -> SamplingParams:
    """Return parameters with a temperature, a seed and a number of tokens."""
    return SamplingParams(max_new_tokens=count, temperature=1.5, seed=seed)
