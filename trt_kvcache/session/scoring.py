"""Scoring prompts: the log-probability of each of their tokens, from the logits of a prefill."""

from collections.abc import Iterator, Sequence

from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.generation.sampling import check_logits
from trt_kvcache.generation.token_logprobs import TokenLogprobs, token_logprobs
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.step_plan import Rows


def score_prompts(batch: Batch, prompts: Rows, *, slots: int, top_logprobs: int) -> list[PromptScore]:
    """Score prompts, as many at a time as there are slots. No slot is active afterwards.

    Prompts of similar length share an enqueue, to save padding. The last token of a prompt does not run: nothing follows it.
    """
    found: list[PromptScore | None] = [None] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    try:
        for first in range(0, len(prompts), slots):
            group = by_length[first : first + slots]
            with batch.finite():
                scores = [*_scores(batch, [prompts[index] for index in group], top_logprobs)]
            for index, score in zip(group, scores, strict=True):
                found[index] = score
    finally:
        batch.clear()
    return [score for score in found if score is not None]


def _scores(batch: Batch, prompts: Rows, top_logprobs: int) -> Iterator[PromptScore]:
    """Score prompts that have one slot each."""
    following: list[list[TokenLogprobs]] = [[] for _ in prompts]
    for slot, logits in batch.start_every_logit([prompt[:-1] for prompt in prompts]):
        known = following[slot]
        for row in logits:
            check_logits(row)
            known.append(token_logprobs(row, prompts[slot][len(known) + 1], top_logprobs))
    for prompt, known in zip(prompts, following, strict=True):
        yield _score(prompt, known, with_top=top_logprobs > 0)


def _score(prompt: Sequence[int], following: Sequence[TokenLogprobs], *, with_top: bool) -> PromptScore:
    return PromptScore(
        tokens=tuple(prompt),
        logprobs=(None, *(one.chosen for one in following)),
        top_logprobs=(None, *(one.top for one in following)) if with_top else None,
    )
