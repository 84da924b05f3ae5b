"""Operations of a session of the reference engine, and what must hold after one of them failed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.interrupts import lengths
from tests.paths import GOLDEN, ROOT
from trt_kvcache import InferenceSession

MODEL = ROOT / "examples" / "tiny-llama"

#: Models that keep K and V, K and V and states, and states alone.
MODELS = {"attention": MODEL, "hybrid": GOLDEN / "lfm2", "states": GOLDEN / "mamba2"}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 3}


@contextmanager
def prepared(folder: Path, model: Path = MODEL) -> Iterator[InferenceSession]:
    """A session of two slots whose sequences have some tokens; ``folder`` has a snapshot of the first one."""
    sizes = {"max_batch_size": 2, "max_sequence_length": 32, "max_prefill_length": 4, "max_logits_per_slot": 3}
    options = {**sizes, "prompt_cache_bytes": 1 << 16}
    with InferenceSession.from_model(model, engine="reference", dtype="float32", **options) as session:  # type: ignore[arg-type]
        list(session.generate(PROMPTS, **GREEDY))
        session.save_snapshot(folder / "saved.kv")
        yield session


def _serve(session: InferenceSession) -> None:
    handles = [session.submit(prompt, **GREEDY) for prompt in (*PROMPTS, [12, 13, 14])]
    session.step()
    handles[1].cancel()
    while session.step():
        pass


def _verify(session: InferenceSession) -> None:
    session.verify([[40, 41, 42], [43]])
    session.accept([2, 1])


#: What is done to a prepared session.
OPERATIONS: dict[str, Callable[[InferenceSession, Path], Any]] = {
    "prefill": lambda session, _: session.prefill([[21, 22, 23, 24, 25, 26], [27]]),
    "prefill of what is there": lambda session, _: session.prefill([[5, 6, 7, 8, 9, 10], [10, 11, 12]], reuse=True),
    "append": lambda session, _: session.append([[30, 31], []]),
    "decode": lambda session, _: session.decode([40, 41]),
    "generate": lambda session, _: list(session.generate([[5, 6, 7], [50, 51, 52, 53, 54]], **GREEDY)),
    "submit and step": lambda session, _: _serve(session),
    "verify and accept": lambda session, _: _verify(session),
    "score": lambda session, _: session.score([[21, 22, 23, 24, 25, 26], [27], [28, 29]], top_logprobs=1),
    "rewind": lambda session, _: session.rewind(0, 0 if session.cache.states else 2),
    "save": lambda session, folder: session.save_snapshot(folder / "again.kv"),
    "resume": lambda session, folder: list(session.resume(folder / "saved.kv", **GREEDY)),
}


def answers(session: InferenceSession) -> list[int]:
    """Tokens that a session that works gives, whatever it was used for before."""
    return [event.token for event in session.generate([[3, 4, 5], [60, 61]], **GREEDY)]


def check_usable(session: InferenceSession, expected: list[int]) -> None:
    """What a session says about its sequences agrees, on host and device, and it gives the tokens that it should."""
    lengths(session)
    while session.step():
        pass
    assert answers(session) == expected
    lengths(session)


def check_goes_on(session: InferenceSession) -> None:
    """Finish what was submitted, then :func:`check_contents`."""
    while session.step():
        pass
    check_contents(session)


def check_contents(session: InferenceSession) -> None:
    """Every slot goes on from the tokens that it says it holds: K, V and states are those of them."""
    held = [session.tokens(slot) + session.pending_tokens(slot) for slot in range(session.cache.active_batch_size)]
    turns = [(33,) if 0 < len(tokens) < session.max_sequence_length else () for tokens in held]
    if any(turns):
        for tokens, turn, logits in zip(held, turns, session.append(turns), strict=True):
            if turn:
                assert_close(logits, session.prefill([(*tokens, *turn)])[0])


def live_nbytes(session: InferenceSession) -> int:
    """Bytes that are held in the memory of a session. What only the garbage collector would release counts as released."""
    gc.collect()
    return session.cache.memory.live_nbytes
