"""``LogitsEdits``: bias, penalties and logits processors of one request."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import ProcessorError
from trt_kvcache.generation.sampling import DeferredProcessor, LogitsProcessor, SamplingParams, check_logits, no_token_left
from trt_kvcache.generation.token_counts import TokenCounts
from trt_kvcache.kernels.scratch import scratch


class LogitsEdits:
    """The steps of :class:`SamplingParams` between the model's logits and the temperature, for one request. No cost without edits.

    ``generated``: number of tokens at the end of ``prompt`` that an earlier part of the request generated; penalties count them.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], *, generated: int = 0) -> None:
        self._params = params
        self._generated = generated
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._has_penalties = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        #: True if there is anything to change.
        self.active = bool(params.logit_bias or params.logits_processors or self._has_penalties)
        self._deferred = tuple(one for one in params.logits_processors if isinstance(one, DeferredProcessor))
        # A memo: the counts, and the number of generated tokens that they have.
        self._counted: tuple[TokenCounts, int] | None = None
        self.set_prompt(prompt)

    @property
    def is_deferred(self) -> bool:
        """True if logits processors may have to be waited for."""
        return bool(self._deferred)

    def ready(self, tokens: Sequence[int], seconds: float = 0.0) -> bool:
        """Let logits processors begin with the token after ``tokens``; return True if :meth:`apply` would not wait.

        ``seconds``: limit of waiting for each.
        """
        if not self._deferred:
            return True
        held = (*self._prompt, *tokens)
        found = [processor.ready(held, seconds) for processor in self._deferred]  # each begins, whatever the others say
        return all(found)

    def set_prompt(self, prompt: Sequence[int]) -> None:
        """Take another prompt, before the first token is generated: the tokens of the slot, if these are more than the request knew."""
        if not self.active:
            return
        self._prompt = tuple(prompt)
        if self._has_penalties:
            self._prompt_ids = np.unique(np.array(self._prompt, np.intp))
        self.recount()

    def recount(self) -> None:
        """Discard the counts of generated tokens: the next tokens need not begin with those that were counted."""
        self._counted = None

    def _count(self, tokens: Sequence[int]) -> TokenCounts:
        counted, self._counted = self._counted, None  # an interrupt leaves no counts of half a token
        if counted is None or counted[1] > len(tokens):
            counted = TokenCounts(self._prompt[len(self._prompt) - self._generated :]), 0
        counts, num_counted = counted
        for token in tokens[num_counted:]:
            counts.add(token)
        self._counted = counts, len(tokens)
        return counts

    def history(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return the distinct tokens of the prompt, and the tokens that penalties count as generated, unordered: none without penalties."""
        if not self._has_penalties:
            return np.empty(0, np.intp), np.empty(0, np.intp)
        counts = self._count(tokens)
        return self._prompt_ids, np.repeat(counts.ids, counts.counts.astype(np.intp))

    def apply(self, logits: npt.NDArray[np.float32], tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], int]:
        """Return the logits to choose from, without NaN, and the most likely token, the first of equal ones. ``logits`` is unchanged.

        The result is valid until the next call of this thread. Raises EngineError or ProcessorError.
        """
        if not self.active:
            return logits, check_logits(logits)
        if self._params.logits_processors:
            edited = np.array(logits, np.float32)  # logits processors may keep the array
        else:
            edited = scratch.array("edited", "float32", logits.size)
            np.copyto(edited, logits)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            if self._bias.size:
                edited[self._bias_ids] += self._bias
            if self._has_penalties:
                self._penalise(edited, self._count(tokens))
        best = int(np.argmax(edited))  # NaN counts as the largest
        if not np.isfinite(edited[best]):
            check_logits(logits)
            raise no_token_left(edited[best])
        if self._params.logits_processors:
            held = (*self._prompt, *tokens)
            for index, processor in enumerate(self._params.logits_processors):
                edited = _processed(f"logits_processors[{index}] ({_name(processor)})", processor, held, edited)
            best = int(np.argmax(edited))
        return edited, best

    def _penalise(self, logits: npt.NDArray[np.float32], counts: TokenCounts) -> None:
        params, ids = self._params, counts.ids
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            places = (self._prompt_ids[self._prompt_ids < logits.size], ids)  # they overlap: both are read before either is written
            values = [logits[place] for place in places]
            for place, value in zip(places, values, strict=True):
                logits[place] = np.where(value < 0, value * penalty, value / penalty)
        if params.frequency_penalty:
            logits[ids] -= np.float32(params.frequency_penalty) * counts.counts
        if params.presence_penalty:
            logits[ids] -= np.float32(params.presence_penalty)


def _processed(what: str, processor: LogitsProcessor, tokens: tuple[int, ...], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Call a processor and check its result."""
    shape = logits.shape
    try:
        returned: Any = processor(tokens, logits)
    except ProcessorError:
        raise  # it describes the request itself
    except Exception as error:
        raise ProcessorError(f"{what}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, np.ndarray):
        raise ProcessorError(f"{what}: expected to get back a NumPy array of shape {shape}, got {type(returned).__name__}.")
    if returned.shape != shape or returned.dtype.kind != "f":
        raise ProcessorError(f"{what}: expected to get back floating point logits of shape {shape}, got {returned.dtype} {returned.shape}.")
    with np.errstate(over="ignore"):  # float64 that float32 cannot hold is found below
        result = np.asarray(returned, np.float32)
    largest = result.max()  # NaN if there is one
    if not np.isfinite(largest):
        found = "excluded all tokens" if largest == -np.inf else f"returned {largest} for token {int(np.argmax(result))}"
        raise ProcessorError(f"{what}: expected at least one finite logit and no NaN or +inf, but it {found}.")
    return result


def _name(processor: LogitsProcessor) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(processor, "__qualname__", None) or type(processor).__qualname__)
