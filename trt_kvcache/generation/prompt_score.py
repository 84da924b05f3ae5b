"""``PromptScore``: log-probabilities of a text's tokens, and ``perplexity`` of one or more scores."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.generation.sampling import check_logits
from trt_kvcache.generation.token_logprobs import TokenLogprobs, token_logprobs


@dataclass(frozen=True)
class PromptScore:
    """The log-probability of each token of a text, given the tokens before it.

    Log-probabilities are natural logarithms of the softmax of the model's own logits, as in ``generate``.

    Parameters
    ----------
    tokens : tuple of int (n,)
        The token ids of the text, with the special tokens that begin it.
    logprobs : tuple of float or None (n,)
        None for the first token: nothing comes before it.
    top_logprobs : tuple of (tuple of (int, float), or None) (n,), or None
        For each position the most likely tokens with their log-probabilities, the most likely one first, of equally likely ones the lowest
        id first; None at the first position. The token of the text need not be among them. The field is None if none were requested.

    Examples
    --------
    >>> from trt_kvcache.generation.prompt_score import PromptScore
    >>> score = PromptScore(tokens=(1, 5, 7), logprobs=(None, -0.5, -1.5))
    >>> score.logprob, round(score.perplexity, 3)
    (-2.0, 2.718)
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...] | None, ...] | None = None

    @property
    def num_scored(self) -> int:
        """Tokens that have a log-probability: all but the first."""
        return sum(value is not None for value in self.logprobs)

    @property
    def logprob(self) -> float:
        """The log-probability of the text after its first token: the sum over its tokens."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """As :func:`perplexity` of this text alone."""
        return perplexity([self])


def perplexity(scores: Iterable[PromptScore]) -> float:
    """Return the perplexity of texts: the exponential of the mean negative log-probability of their tokens.

    Parameters
    ----------
    scores : iterable of PromptScore
        Results of ``InferenceSession.score``. All tokens of all texts count equally; first tokens do not count.

    Returns
    -------
    float
        1 for a model that was certain of every token; NaN if no token has a log-probability, infinity if one was impossible.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession, perplexity
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     round(perplexity(session.score(["Alice was beginning to get very tired.", "Down the rabbit hole."])), 1)
    15.5
    """
    known = [value for score in scores for value in score.logprobs if value is not None]
    if not known:
        return math.nan
    try:
        return math.exp(-math.fsum(known) / len(known))
    except OverflowError:
        return math.inf


def score_tokens(logits: Iterable[npt.NDArray[np.float32]], tokens: Iterable[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probability of each token from the logits of the token before it; surplus logits or tokens are ignored."""
    found = []
    for row, token in zip(logits, tokens, strict=False):
        check_logits(row)
        found.append(token_logprobs(row, token, count))
    return found


def prompt_score(tokens: Sequence[int], following: Sequence[TokenLogprobs], *, with_top: bool) -> PromptScore:
    """Return the score of a prompt from the log-probabilities of all tokens after the first."""
    return PromptScore(
        tokens=tuple(tokens),
        logprobs=(None, *(one.chosen for one in following)),
        top_logprobs=(None, *(one.top for one in following)) if with_top else None,
    )
