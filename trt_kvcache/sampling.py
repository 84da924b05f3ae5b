"""Choosing the next token from logits, on the host: greedy, temperature, top-k, top-p, min-p, one seed per request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from trt_kvcache.checks import int_in_range
from trt_kvcache.errors import EngineError, RangeError

_SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Parameters
    ----------
    max_new_tokens : int
        Ends the request with reason ``"length"``.
    temperature : float
        Logits are divided by it. 0 is greedy: always the most likely token, ties to the lowest id.
    top_k : int
        Keep the k most likely tokens; 0 keeps all.
    top_p : float
        Keep the most likely tokens until their probabilities sum to p, ``0 < p <= 1``.
    min_p : float
        Drop tokens less likely than p times the most likely one, ``0 <= p < 1``.
    seed : int, optional
        The same seed, prompt and model give the same tokens, whatever runs beside. Without, each request draws its own.
    stop_token_ids : sequence of int
        Tokens that end the request, beside the model's own end tokens.
    stop : sequence of str
        Texts that end the request; they are not part of the output.
    ignore_eos : bool
        Go on past the model's own end tokens.

    Raises
    ------
    RangeError
        A field is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        int_in_range("SamplingParams.max_new_tokens", self.max_new_tokens, 1)
        int_in_range("SamplingParams.top_k", self.top_k, 0)
        _check_number("temperature", self.temperature, "a finite number, at least 0", lambda value: 0 <= value < math.inf)
        _check_number("top_p", self.top_p, "0 < top_p <= 1", lambda value: 0 < value <= 1)
        _check_number("min_p", self.min_p, "0 <= min_p < 1", lambda value: 0 <= value < 1)
        if self.seed is not None:
            int_in_range("SamplingParams.seed", self.seed, 0, 2**_SEED_BITS - 1)
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "stop", _stop_texts(self.stop))


def _check_number(name: str, value: Any, expected: str, good: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not good(float(value)):
        raise RangeError(f"SamplingParams.{name}: expected {expected}, got {value!r}.")


def _token_ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise RangeError(f"SamplingParams.stop_token_ids: expected a sequence of token ids, got {values!r}.")
    return tuple(int_in_range("SamplingParams.stop_token_ids", value, 0) for value in values)


def _stop_texts(values: Any) -> tuple[str, ...]:
    texts = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (values,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RangeError(f"SamplingParams.stop: expected texts that are not empty, got {text!r}.")
    return texts


class Sampler:
    """Chooses the tokens of one request. Its randomness depends on the seed and on how many tokens it chose, on nothing else.

    Parameters
    ----------
    params : SamplingParams

    Notes
    -----
    One number of a Philox generator is used per token, so seed and ``counter`` are the whole state.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        #: The seed in use: the request's, or one drawn for it.
        self.seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        #: Tokens chosen so far.
        self.counter = 0
        self._generator = np.random.Generator(np.random.Philox(key=self.seed))

    def choose(self, logits: np.ndarray[Any, Any]) -> int:
        """Return the next token.

        Parameters
        ----------
        logits : ndarray (vocab,) float32
            Not changed.

        Raises
        ------
        EngineError
            A logit is NaN, or no logit is finite.
        """
        best = int(np.argmax(logits))  # NaN counts as the largest
        if not np.isfinite(logits[best]):
            raise EngineError(f"logits: expected finite numbers, got {logits[best]} for token {best}. The engine or its cache is damaged.")
        self.counter += 1
        if self._params.temperature == 0:
            return best
        uniform = self._generator.random()
        tokens, probabilities = self._distribution(logits)
        place = int(np.searchsorted(np.cumsum(probabilities), uniform * probabilities.sum(), side="right"))
        return int(tokens[min(place, len(tokens) - 1)])

    def _distribution(self, logits: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the tokens that are left, most likely first, and their probabilities before renormalisation."""
        params = self._params
        below = logits.max() - logits.astype(np.float64)
        tokens = np.arange(len(below))
        if 0 < params.top_k < len(below):
            tokens = np.flatnonzero(below <= np.partition(below, params.top_k - 1)[params.top_k - 1])
        tokens = tokens[np.argsort(below[tokens], kind="stable")][: params.top_k or None]
        with np.errstate(over="ignore"):  # a tiny temperature leaves nothing but the most likely token
            probabilities = np.exp(-below[tokens] / params.temperature)
        probabilities /= probabilities.sum()
        count = len(tokens)
        if params.top_p < 1:
            count = min(count, int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1)
        if params.min_p > 0:
            count = min(count, int(np.count_nonzero(probabilities >= params.min_p * probabilities[0])))
        return tokens[:count], probabilities[:count]
