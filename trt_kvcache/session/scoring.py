"""Scoring prompts: the log-probability of each of their tokens, from the logits of a prefill."""

from collections.abc import Iterator

from trt_kvcache.generation.prompt_score import PromptScore, prompt_score, score_tokens
from trt_kvcache.generation.token_logprobs import TokenLogprobs
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.step_plan import Rows


def score_prompts(batch: Batch, prompts: Rows, adapter: str | None, *, slots: int, top_logprobs: int) -> list[PromptScore]:
    """Score prompts, as many at a time as there are slots. No slot is active afterwards.

    Prompts of similar length share an enqueue, to save padding. The last token of a prompt does not run: nothing follows it.
    """
    found: list[PromptScore | None] = [None] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    try:
        for first in range(0, len(prompts), slots):
            group = by_length[first : first + slots]
            with batch.finite():
                scores = [*_scores(batch, [prompts[index] for index in group], adapter, top_logprobs)]
            for index, score in zip(group, scores, strict=True):
                found[index] = score
    finally:
        batch.clear()
    return [score for score in found if score is not None]


def _scores(batch: Batch, prompts: Rows, adapter: str | None, top_logprobs: int) -> Iterator[PromptScore]:
    """Score prompts that have one slot each."""
    following: list[list[TokenLogprobs]] = [[] for _ in prompts]
    for slot, logits in batch.start_every_logit([prompt[:-1] for prompt in prompts], adapter):
        known = following[slot]
        known += score_tokens(logits, prompts[slot][len(known) + 1 :], top_logprobs)
    for prompt, known in zip(prompts, following, strict=True):
        yield prompt_score(prompt, known, with_top=top_logprobs > 0)
