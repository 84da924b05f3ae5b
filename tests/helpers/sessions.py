"""Sessions over the recording engine of ``recording``: how they are made, run and paced, their expected answers and their state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.recording import cache_rows, kv_config, logits_after, recorded
from trt_kvcache import InferenceSession, KVLayout, PromptCache, SamplingParams
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.device_sampler import DeviceSampler
from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.session import draft_plan, verify_steps
from trt_kvcache.session.draft_pace import LENGTHS, DraftPace
from trt_kvcache.session.hidden_states import downloaded

MAX_SEQUENCE_LENGTH = 16


def make(
    *,
    slots: int = 3,
    limit: int = MAX_SEQUENCE_LENGTH,
    layers: int = 2,
    combined: bool = False,
    profiles: Any = None,
    reuse: int = 0,
    **options: Any,
) -> InferenceSession:
    """Return a session over a recording engine and cache; ``reuse`` bytes are for copies of prompts, ``options`` for the session."""
    kv = kv_config(slots=slots, limit=limit, layers=layers, layout=KVLayout.COMBINED if combined else KVLayout.SEPARATE)
    engine, cache = recorded(kv, profiles=profiles, combined=combined)
    return InferenceSession(engine, cache, **{"prompt_cache": PromptCache(cache, max_bytes=reuse), **options})


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` greedy tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def by_prompt(events: Iterable[Any]) -> list[tuple[list[int], str, str | None]]:
    """Return the tokens, the text and the reason to finish of each prompt."""
    result: dict[int, list[Any]] = {}
    for event in events:
        entry = result.setdefault(event.index, [[], "", None])
        assert entry[2] is None, "a token came after the last one"
        entry[0].append(event.token)
        entry[1] += event.text
        entry[2] = event.finish_reason
    return [tuple(result[index]) for index in sorted(result)]


def observe(session: InferenceSession) -> tuple[Any, ...]:
    """Return everything that a refused call must leave as it was."""
    slots = range(session.cache.active_batch_size)
    return (
        session.cache.host_kv_cache_lengths,
        session.cache.kv_cache_lengths.numpy().tolist(),
        [session.tokens(slot) for slot in slots],
        [session.pending_tokens(slot) for slot in slots],
        cache_rows(session.cache),
        session.statistics,
        len(session.engine.steps),
    )


def refuse(session: InferenceSession, kind: type[KVCacheError], call: Callable[[], object]) -> str:
    """Call what must fail; nothing is enqueued and nothing changes; return the text of the error."""
    before = observe(session)
    with pytest.raises(kind) as error:
        call()
    assert observe(session) == before
    return str(error.value)


def damage_logits(session: InferenceSession, slot: int) -> Callable[[], None]:
    """Make the engine answer NaN for a slot from now on; return what mends it."""
    run = session.engine._run

    def damaged() -> None:
        run()
        session.cache.memory.array(session.engine.steps[-1].bound["logits"])[slot] = np.nan

    session.engine._run = damaged
    return lambda: setattr(session.engine, "_run", run)


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


def ahead(session: InferenceSession) -> InferenceSession:
    """Let a session choose its tokens where the logits are, and return it."""
    assert session._decode_steps.can_be_on_device
    session._decode_steps.on_device = True
    return session


def always_drafting(session: InferenceSession) -> InferenceSession:
    """Have the steps of a session verify drafts of three tokens, whether they pay or not, and return it."""
    session._decode_steps._pace.limit = lambda running, draftings: 3
    session._decode_steps._pace.pay = lambda running, drafts: True
    return session


def draft_lengths(monkeypatch: pytest.MonkeyPatch, length: Callable[[Drafting], int]) -> None:
    """Have all steps verify drafts, and give each draft of a request the length that the function returns."""
    monkeypatch.setattr(DraftPace, "limit", lambda self, running, draftings: LENGTHS[-1])
    monkeypatch.setattr(DraftPace, "pay", lambda self, running, drafts: True)
    for module in (draft_plan, verify_steps):
        monkeypatch.setattr(module, "draft_limit", lambda request, limit: 0 if request.drafting is None else length(request.drafting))


def hidden_rows(session: InferenceSession, slot: int, count: int) -> Any:
    """Return the hidden states of the first tokens of a slot, as float32."""
    states = session._runner.hidden_states
    assert states is not None
    return downloaded(states.rows(slot, 0, count))


def draft_logits(drafter: Any, monkeypatch: pytest.MonkeyPatch, *, change: float = 1.0) -> list[Any]:
    """Return a list to which the logits of each step of a drafter's model are added, and multiply these by a factor."""
    found: list[Any] = []
    append, sample = drafter._steps._append, DeviceSampler.sample

    def changed_append(rows: Any) -> Any:
        found.append(append(rows) * np.float32(change))
        return found[-1]

    def changed_sample(sampler: DeviceSampler, logits: Any, tokens: Any, *, stream: Any) -> None:
        if drafter._steps.sampler is not None and sampler is drafter._steps.sampler._sampler:
            found.append(logits.numpy() * np.float32(change))
            logits.memory.upload(logits, found[-1], stream=stream)
        sample(sampler, logits, tokens, stream=stream)

    monkeypatch.setattr(drafter._steps, "_append", changed_append)
    monkeypatch.setattr(DeviceSampler, "sample", changed_sample)
    return found


class Pace:
    """Says whether a step may run. One that may not does nothing, so that what comes between two steps goes on.

    Steps run freely before :meth:`hold`.
    """

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._allowed = threading.Semaphore(0)
        self._seconds = 0.0

    def hold(self) -> Pace:
        """Let no step run from now on."""
        self._allowed = threading.Semaphore(0)
        self._free.clear()
        return self

    def allow(self, count: int) -> None:
        """Let so many steps run, while it holds the others."""
        for _ in range(count):
            self._allowed.release()

    def go(self) -> None:
        """Let all steps run."""
        self._free.set()

    def slow(self, seconds: float) -> None:
        """Have each step last so much longer."""
        self._seconds = seconds

    def may_step(self) -> bool:
        """Tell whether a step may run now; take it from those that were allowed."""
        time.sleep(self._seconds)
        if self._free.is_set() or self._allowed.acquire(blocking=False):
            return True
        time.sleep(0.001)
        return False

    def attach(self, session: InferenceSession) -> InferenceSession:
        """Pace this session, and return it."""
        step = session.step

        def paced() -> Any:
            return step() if self.may_step() else []

        session.step = paced  # type: ignore[method-assign]
        return session
