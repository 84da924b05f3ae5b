"""Drafters of known quality: each token that they propose is right with a probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from tests.helpers.recording import logits_after
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.drafter import DraftedSequence

#: Returns so many tokens that will follow a sequence, or fewer.
Truth = Callable[[DraftedSequence, int], list[int]]


class Drafter:
    """Proposes what will follow; each token is replaced by another with the probability ``1 - right``. Shorter drafts unless it is 1."""

    def __init__(self, truth: Truth, right: float, *, seed: int = 0, vocab_size: int = 30) -> None:
        self.truth, self.right, self.random, self.vocab_size = truth, right, Random(seed), vocab_size
        self.calls: list[list[tuple[int, ...]]] = []

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[list[int]]:
        drafts = [self._draft(one) for one in sequences]
        self.calls.append([tuple(draft) for draft in drafts])
        return drafts

    def _draft(self, sequence: DraftedSequence) -> list[int]:
        assert sequence.limit >= 1
        count = sequence.limit if self.right == 1 else self.random.randint(0, sequence.limit)
        known = self.truth(sequence, count)
        known += [0] * (count - len(known) if self.right < 1 else 0)
        return [token if self.random.random() < self.right else (token + 1) % self.vocab_size for token in known]


def chosen(sequence: DraftedSequence, count: int) -> list[int]:
    """Return the tokens that a request over the recording engine will choose."""
    request, tokens, before = sequence.request, sequence.tokens, sequence.request.progress
    found: list[int] = []
    try:
        while len(found) < count:
            choice = request.choose(logits_after([*tokens, *found]), full=False)
            request.take(choice)
            assert choice.token is not None
            found.append(choice.token.token)
            if choice.token.finish_reason is not None:
                break
    except KVCacheError:
        pass  # what comes after an error does not matter
    finally:
        request.restore(before)
    return found


def recorded(events: Iterable[Any], prompts: Sequence[Sequence[int]]) -> Truth:
    """Return the truth of requests that have been run without drafts, from their tokens, by the index of the request."""
    rows = [list(prompt) for prompt in prompts]
    for event in events:
        rows[event.index].append(event.token)

    def truth(sequence: DraftedSequence, count: int) -> list[int]:
        row, tokens = rows[sequence.request.index], sequence.tokens
        return row[len(tokens) : len(tokens) + count] if row[: len(tokens)] == tokens else []

    return truth
