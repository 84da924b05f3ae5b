"""``LogitsEdits``: what one request changes in the logits before a token is chosen: bias, penalties, functions of the caller's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import ProcessorError
from trt_kvcache.generation.sampling import DeferredProcessor, LogitsProcessor, SamplingParams, check_logits, nothing_left
from trt_kvcache.generation.token_counts import TokenCounts
from trt_kvcache.kernels.scratch import scratch


class LogitsEdits:
    """The steps of :class:`SamplingParams` between the logits of the model and the temperature, for one request."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], *, generated: int = 0) -> None:
        self._params = params
        self._generated = generated
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._has_penalties = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        #: Whether there is anything to change.
        self.active = bool(params.logit_bias or params.logits_processors or self._has_penalties)
        self._deferred = tuple(one for one in params.logits_processors if isinstance(one, DeferredProcessor))
        self.set_prompt(prompt)

    @property
    def is_deferred(self) -> bool:
        """Whether logits processors may not be ready."""
        return bool(self._deferred)

    def ready(self, tokens: Sequence[int], seconds: float = 0.0) -> bool:
        """Have logits processors begin with the token behind those generated so far, and tell whether :meth:`apply` would not wait."""
        if not self._deferred:
            return True
        held = (*self._prompt, *tokens)
        found = [processor.ready(held, seconds) for processor in self._deferred]  # each begins, whatever the others say
        return all(found)

    def set_prompt(self, prompt: Sequence[int]) -> None:
        """Take another prompt, before the first token is generated: what the slot holds, if that is more than the request knew."""
        if not self.active:
            return
        self._prompt = tuple(prompt)
        if self._has_penalties:
            self._prompt_ids = np.unique(np.array(self._prompt, np.intp))
            self.count(())

    def count(self, tokens: Sequence[int]) -> None:
        """Count the tokens that were generated so far, in place of those counted before."""
        if self._has_penalties:
            self._counts = TokenCounts((*self._prompt[len(self._prompt) - self._generated :], *tokens))

    def history(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return the different tokens of the prompt, and those that penalties count as generated, in any order: none if nothing asks."""
        if not self._has_penalties:
            return np.empty(0, np.intp), np.empty(0, np.intp)
        return self._prompt_ids, np.repeat(self._counts.ids, self._counts.counts.astype(np.intp))

    def add(self, token: int) -> None:
        """Count one more token that was generated."""
        if self._has_penalties:
            self._counts.add(token)

    def apply(self, logits: npt.NDArray[np.float32], tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], int]:
        """Return the logits to choose from, and the most likely token."""
        if not self.active:
            return logits, check_logits(logits)
        if self._params.logits_processors:
            edited = np.array(logits, np.float32)  # functions of the caller's may keep it
        else:
            edited = scratch.array("edited", "float32", logits.size)
            np.copyto(edited, logits)
        with np.errstate(over="ignore", invalid="ignore"):  # found below
            if self._bias.size:
                edited[self._bias_ids] += self._bias
            if self._has_penalties:
                self._penalise(edited)
        best = int(np.argmax(edited))  # NaN counts as the largest
        if not np.isfinite(edited[best]):
            check_logits(logits)
            raise nothing_left(edited[best])
        if self._params.logits_processors:
            held = (*self._prompt, *tokens)
            for index, processor in enumerate(self._params.logits_processors):
                edited = _processed(f"logits_processors[{index}] ({_name(processor)})", processor, held, edited)
            best = int(np.argmax(edited))
        return edited, best

    def _penalise(self, logits: npt.NDArray[np.float32]) -> None:
        params, ids = self._params, self._counts.ids
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            places = (self._prompt_ids, ids)  # they overlap: both are read before either is written
            values = [logits[place] for place in places]
            for place, value in zip(places, values, strict=True):
                logits[place] = np.where(value < 0, value * penalty, value / penalty)
        if params.frequency_penalty:
            logits[ids] -= np.float32(params.frequency_penalty) * self._counts.counts
        if params.presence_penalty:
            logits[ids] -= np.float32(params.presence_penalty)


def _processed(what: str, processor: LogitsProcessor, tokens: tuple[int, ...], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Call a processor and check what it returns."""
    shape = logits.shape
    try:
        returned: Any = processor(tokens, logits)
    except ProcessorError:
        raise  # says what is wrong with the request
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
    """Return what a reader knows a function or object by."""
    return str(getattr(processor, "__qualname__", None) or type(processor).__qualname__)
