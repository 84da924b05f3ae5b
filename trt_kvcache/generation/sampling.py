"""Sampling parameters, and the choice of the next token from logits on the host."""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, option_names
from trt_kvcache.errors import EngineError, ProcessorError, RangeError, ShapeError
from trt_kvcache.kernels.philox import generator_at
from trt_kvcache.kernels.token_choice import choice_params, choose_token
from trt_kvcache.kernels.token_weights import RANDOM_BITS

#: A user function that changes logits: ``f(tokens, logits) -> logits``. ``tokens``: the prompt and the generated tokens. ``logits``: a
#: float32 array ``(vocab,)`` on the host that the function may change and return.
LogitsProcessor = Callable[[Sequence[int], npt.NDArray[np.float32]], npt.NDArray[Any]]


class DeferredProcessor(ABC):
    """A logits processor that works elsewhere while the model computes the logits.

    While one is not ready, the queue of a session keeps the logits and runs the other requests; ``generate`` waits for it.
    """

    @abstractmethod
    def ready(self, tokens: Sequence[int], seconds: float = 0.0) -> bool:
        """Begin the work for the token after ``tokens``, if it has not begun, and return True if a call would not wait.

        Parameters
        ----------
        tokens : sequence of int
            The tokens of the call. After a step that failed, fewer than before.
        seconds : float
            Limit of the wait.

        Returns
        -------
        bool
            True too if the work has failed: then the call raises. Never raises itself.
        """

    @abstractmethod
    def __call__(self, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return changed logits, as each logits processor does. Waits for unfinished work."""


_SEED_BITS = 63

#: Limits of numbers that are added to logits or multiplied with them: float32.
_LARGEST, _TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    Parameters
    ----------
    max_new_tokens : int
        Ends the request with reason ``"length"`` after this many tokens; at least 1.
    temperature : float
        Logits are divided by it. 0 is greedy: always the most likely token, and of equally likely ones the lowest id.
    top_k : int
        Keep the k most likely tokens; 0 keeps all.
    top_p : float
        Keep the most likely tokens until their probabilities sum to p, ``0 < p <= 1``.
    min_p : float
        Drop tokens that are less likely than p times the most likely one, ``0 <= p < 1``.
    seed : int, optional
        The same seed, prompt and model give the same tokens, whatever else is in the batch. Without a seed, each request draws its own.
    counter : int
        Number of tokens already chosen with the seed, for a request that continues an earlier one: see
        :class:`~trt_kvcache.generation.sampler_state.SamplerState`.
    stop_token_ids : sequence of int
        Tokens that end the request, in addition to the model's own end tokens.
    stop : sequence of str
        Texts that end the request. They are not part of the output, and need a tokenizer. One that is a special token of it, such as
        ``"<|im_end|>"``, ends the request with that token.
    ignore_eos : bool
        Continue past the model's own end tokens.
    repetition_penalty : float
        Makes tokens of the prompt and tokens generated so far less likely, however often they occur: a positive logit is divided by it,
        a negative one multiplied. Above 0; 1 changes nothing, below 1 they become more likely.
    presence_penalty : float
        Subtracted from the logits of tokens that were generated so far. 0 changes nothing, a negative number makes them more likely.
    frequency_penalty : float
        Subtracted from the logits of tokens once for each time that they were generated so far. 0 changes nothing.
    logit_bias : mapping of int to float
        Added to the logits of these token ids; ``-inf`` excludes one. Ids may be written as decimal texts, as in JSON.
    logprobs : int, optional
        Report the log-probability of each chosen token, and of this number of most likely tokens (0 for none). Nothing if left out.
        For the tokens of the prompt see :meth:`InferenceSession.score <trt_kvcache.InferenceSession.score>`.
    logits_processors : sequence of callable
        Functions ``f(tokens, logits) -> logits`` that are called for every token, one after another: see the notes.

    Raises
    ------
    RangeError
        A field is out of range.

    Notes
    -----
    The logits of the model go through these steps, in the order of Hugging Face transformers:

    1. ``logit_bias`` is added;
    2. ``repetition_penalty``;
    3. ``frequency_penalty``, then ``presence_penalty`` (as OpenAI and vLLM define them: generated tokens only);
    4. ``logits_processors``;
    5. ``temperature``; greedy decoding (``temperature=0``) takes the largest logit here;
    6. ``top_k``, then ``top_p``, then ``min_p``.

    ``logprobs`` are taken before all of these steps: the log-softmax of the model's own logits, as OpenAI and vLLM report it.

    A logits processor gets the token ids of the prompt and of everything generated so far as a tuple, and the logits as a float32 array
    ``(vocab,)`` on the host. It may change this array and return it, or return another one of that shape. ``-inf`` excludes a token; NaN,
    ``+inf`` and the exclusion of all tokens are errors. A step that failed is repeated with the same arguments.
    A slow processor can be a ``trt_kvcache.generation.sampling.DeferredProcessor``: other requests do not wait for it.

    Examples
    --------
    >>> from trt_kvcache import SamplingParams
    >>> params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop=["."])
    >>> params.stop
    ('.',)
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
        ...
    trt_kvcache.errors.RangeError: SamplingParams.top_p: expected 0 < top_p <= 1, got 0.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    counter: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        int_in_range("SamplingParams.max_new_tokens", self.max_new_tokens, 1)
        int_in_range("SamplingParams.top_k", self.top_k, 0)
        int_in_range("SamplingParams.counter", self.counter, 0)
        _check_number("temperature", self.temperature, "a finite number, at least 0", lambda value: 0 <= value < math.inf)
        _check_number("top_p", self.top_p, "0 < top_p <= 1", lambda value: 0 < value <= 1)
        _check_number("min_p", self.min_p, "0 <= min_p < 1", lambda value: 0 <= value < 1)
        if self.seed is not None:
            int_in_range("SamplingParams.seed", self.seed, 0, 2**_SEED_BITS - 1)
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        _check_number("repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda value: _TINY <= value <= _LARGEST)
        _check_number("presence_penalty", self.presence_penalty, "a finite number", _is_finite)
        _check_number("frequency_penalty", self.frequency_penalty, "a finite number", _is_finite)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.logprobs is not None:
            int_in_range("SamplingParams.logprobs", self.logprobs, 0)
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that the tokens of ``logit_bias`` exist in the vocabulary of a model.

        Parameters
        ----------
        vocab_size : int
            Token ids are from 0 to ``vocab_size - 1``.

        Raises
        ------
        RangeError
            A token id is not one of the model's.
        """
        for token in self.logit_bias:
            int_in_range("SamplingParams.logit_bias", token, 0, vocab_size - 1)


#: Names of fields of :class:`SamplingParams` in OpenAI's API and other projects.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "max_length": "max_new_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
}


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``, ``submit`` and similar methods: the fields of :class:`SamplingParams`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    counter: int
    stop_token_ids: Sequence[int]
    stop: Sequence[str]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    logits_processors: Sequence[LogitsProcessor]


def _check_number(name: str, value: Any, expected: str, good: Callable[[float], bool]) -> None:
    if not _is_number(value) or not good(float(value)):
        raise RangeError(f"SamplingParams.{name}: expected {expected}, got {value!r}.")


def _is_number(value: Any) -> bool:
    """Return True for a real number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_finite(value: float) -> bool:
    """Return True if a number is finite in float32."""
    return abs(value) <= _LARGEST


def _biases(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise RangeError(f"SamplingParams.logit_bias: expected a mapping of token ids to numbers, got {values!r}.")
    biases: dict[int, float] = {}
    for key, bias in values.items():
        decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = int_in_range("SamplingParams.logit_bias", int(key) if decimal else key, 0)
        if not _is_number(bias) or not (_is_finite(bias) or bias == -math.inf):
            raise RangeError(f"SamplingParams.logit_bias[{token}]: expected a finite number or -inf, got {bias!r}.")
        biases[token] = float(bias)
    return biases


def _processors(values: Any) -> tuple[LogitsProcessor, ...]:
    if callable(values):
        return (values,)
    if not isinstance(values, Iterable):
        raise RangeError(f"SamplingParams.logits_processors: expected a sequence of callables, got {values!r}.")
    processors = tuple(values)
    for index, processor in enumerate(processors):
        if not callable(processor):
            raise RangeError(f"SamplingParams.logits_processors[{index}]: expected a callable f(tokens, logits), got {processor!r}.")
    return processors


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


def with_options(params: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return ``params`` with some fields replaced."""
    option_names("generate", options, sorted(one.name for one in fields(SamplingParams)), OTHER_NAMES, error=RangeError)
    return replace(params, **options)


def params_for(
    count: int, defaults: SamplingParams, params: SamplingParams | Sequence[SamplingParams] | None, options: Mapping[str, Any]
) -> list[SamplingParams]:
    """Return the SamplingParams of each of ``count`` prompts: ``defaults`` with ``options``, or ``params`` for all or for each."""
    if params is None:
        return [with_options(defaults, options)] * count
    if options:
        raise RangeError(f"generate: expected params or options, got both ({', '.join(options)}).")
    each = list(params) if isinstance(params, Sequence) else [params] * count
    if len(each) != count or not all(isinstance(one, SamplingParams) for one in each):
        raise ShapeError(f"params: expected SamplingParams, or {count} of them, one per prompt.")
    return each


#: Seed of a :class:`Sampler` and number of tokens chosen with it: all that its next choice depends on. A plain tuple, made for every token.
SamplerPosition = tuple[int, int]


class Sampler:
    """Chooses the tokens of one request. A choice depends on the logits, the seed and the token's number, on nothing else.

    One number of a Philox generator (Salmon et al., 2011) is used per token; the generator is counter-based.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._greedy = params.temperature == 0
        #: The seed in use: the request's, or one drawn for it.
        self.seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self._choice = choice_params(params.temperature, params.top_k, params.top_p, params.min_p)
        # A memo: the generator after the number with index `counter`, and that number. Reaching another index costs more than the next one.
        self._drawn: tuple[np.random.Generator, int, int] | None = None

    def choose(self, logits: np.ndarray[Any, Any], counter: int) -> int:
        """Choose token number ``counter`` of the seed, from 0. The same arguments give the same token."""
        return self.choose_from(logits, check_logits(logits), counter)

    def choose_from(self, logits: np.ndarray[Any, Any], best: int, counter: int) -> int:
        """Choose token number ``counter`` from checked logits, whose largest is at ``best``."""
        return best if self._greedy else choose_token(logits, logits[best], self._random_bits(counter), self._choice)

    def _random_bits(self, counter: int) -> int:
        drawn, self._drawn = self._drawn, None  # an interrupt leaves no generator at an unknown index
        if drawn is None or counter not in (drawn[1], drawn[1] + 1):
            generator = generator_at(self.seed, counter)
        elif counter == drawn[1]:
            self._drawn = drawn
            return drawn[2]
        else:
            generator = drawn[0]
        bits = int(generator.random() * 2.0**RANDOM_BITS)
        self._drawn = generator, counter, bits
        return bits


class NonFiniteLogitsError(EngineError):
    """Logits of the model are not finite. So K, V and states of the slot may not be either."""


def check_logits(logits: np.ndarray[Any, Any]) -> int:
    """Return the most likely token, the first of equal ones. Raises NonFiniteLogitsError if a logit is NaN, or none is finite."""
    best = int(logits.argmax())  # NaN counts as the largest
    if not math.isfinite(logits[best]):
        raise bad_logits(logits[best], best)
    return best


def bad_logits(logit: Any, token: int) -> NonFiniteLogitsError:
    """Return the error for logits whose largest one is not finite."""
    return NonFiniteLogitsError(f"logits: expected finite numbers, got {logit} for token {token}. The engine or its cache is damaged.")


def no_token_left(logit: Any) -> ProcessorError:
    """Return the error for a largest logit, after bias and penalties, that is not finite."""
    return ProcessorError(f"logit_bias and penalties: expected a largest logit that is finite after them, got {logit}.")
