"""``text_perplexity``: how well a model predicts a long text, in windows that overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError, RangeError
from trt_kvcache.session.session import InferenceSession


@dataclass(frozen=True, kw_only=True)
class TextPerplexity:
    """Perplexity of a model on a text.

    Parameters
    ----------
    num_tokens : int
        Tokens of the text, without the special ones that begin it.
    num_scored : int
        Tokens that have a log-probability: all, but for the first one where no special token stands before it.
    logprob : float
        The sum of their log-probabilities, natural logarithms.
    window, stride : int
        Tokens of a window, and between the beginnings of two.
    num_windows : int
        Windows that were run.

    Examples
    --------
    >>> from trt_kvcache import TextPerplexity
    >>> TextPerplexity(num_tokens=3, num_scored=2, logprob=-2.0, window=8, stride=4, num_windows=1).perplexity
    2.718281828459045
    """

    num_tokens: int
    num_scored: int
    logprob: float
    window: int
    stride: int
    num_windows: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability of the tokens that have one; infinity if one was impossible."""
        try:
            return math.exp(-self.logprob / self.num_scored)
        except OverflowError:
            return math.inf


def text_perplexity(
    session: InferenceSession,
    text: str | Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    adapter: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> TextPerplexity:
    """Return how well a model predicts a text that may be longer than a slot.

    The text is encoded as a whole. Each window is the special tokens that begin a text (if the tokenizer adds some) and a run of its other
    tokens; the runs begin ``stride`` tokens apart. A token is scored once, in the first window that has it, so that all but those of
    the first window are predicted from at least ``window - stride`` tokens before them, special ones included.

    Parameters
    ----------
    session : InferenceSession
        On any engine with the logits of several new tokens per slot: see :meth:`InferenceSession.score`. Its slots run together.
    text : str, or sequence of int (n,)
        A text for a model with a tokenizer, or token ids, which get no special tokens.
    window : int, optional
        Tokens of a window, from 2 to ``max_sequence_length``, which is the default.
    stride : int, optional
        Tokens between the beginnings of two windows: at least 1, and less than the tokens of the text in a window. Half of a window if left
        out.
    adapter : str, optional
        Name of an adapter of the session; the base model if left out.
    progress : callable, optional
        Called as ``progress(done, total)`` with windows, after each enqueued batch of them.

    Returns
    -------
    TextPerplexity
        The perplexity, and how it was computed: numbers can be compared where tokens, window and stride are the same.

    Raises
    ------
    RangeError
        Window or stride are out of range, or the text has no token that can be scored. Nothing was changed.
    ConfigError
        Text without a tokenizer, or the engine has the logits of one new token per slot only. Nothing was changed.
    KVCacheError
        As for :meth:`InferenceSession.score`.

    Notes
    -----
    The sum is computed in double precision over log-softmax of the logits in float32. Active sequences are lost, as by ``score``.

    Examples
    --------
    >>> from pathlib import Path
    >>> from trt_kvcache import InferenceSession, text_perplexity
    >>> text = Path("examples/tiny-llama/text.txt").read_text(encoding="utf-8")
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     found = text_perplexity(session, text[:600], window=128)
    >>> found.num_windows, found.stride, f"{found.perplexity:.1f}"
    (3, 63, '1.2')
    """
    length = int_in_range("window", session.max_sequence_length if window is None else window, 2, session.max_sequence_length)
    beginning, tokens = _encoded(session, text)
    capacity = length - len(beginning)
    if capacity < 2:
        raise RangeError(f"window: expected more than the {len(beginning) + 1} tokens that begin a text, got {length}.")
    step = int_in_range("stride", max(1, capacity // 2) if stride is None else stride, 1, capacity - 1)
    if len(tokens) < (1 if beginning else 2):
        raise RangeError(f"text: expected a token with something before it, got {len(tokens)} token(s).")
    starts = [0, *range(step, max(len(tokens) - capacity, 0) + step, step)]
    windows = [[*beginning, *tokens[start : start + capacity]] for start in starts]
    slots = session.cache.max_batch_size
    known: list[float] = []
    scored = 0  # tokens of the text so far
    for first in range(0, len(windows), slots):
        scores = session.score(windows[first : first + slots], adapter=adapter)
        for start, score in zip(starts[first : first + slots], scores, strict=True):
            of_text = score.logprobs[len(beginning) :]
            known += [value for value in of_text[scored - start :] if value is not None]
            scored = start + len(of_text)
        if progress is not None:
            progress(min(first + slots, len(windows)), len(windows))
    return TextPerplexity(
        num_tokens=len(tokens),
        num_scored=len(known),
        logprob=math.fsum(known),
        window=length,
        stride=step,
        num_windows=len(windows),
    )


def _encoded(session: InferenceSession, text: str | Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the special tokens that begin a text, and its other tokens."""
    if not isinstance(text, str):
        return [], list(text)
    tokenizer = session.tokenizer
    if tokenizer is None:
        raise ConfigError("text: expected token ids, got text. The model folder has no tokenizer.json.")
    plain, whole = (tokenizer.encode(text, add_special_tokens=special) for special in (False, True))
    begins = len(whole) - len(plain)
    while begins > 0 and whole[begins : begins + len(plain)] != plain:  # others may follow the text
        begins -= 1
    return whole[:begins], plain
