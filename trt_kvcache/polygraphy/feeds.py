"""Feeds of our Polygraphy runners: what one inference is given, as plain NumPy arrays.

input_ids     int32 [B, s]   new tokens of each slot, right-padded
new_lengths   int32 [B]      how many of them are real; 0 for a slot that gets nothing
reset         bool  [1]      start new sequences; False or left out: go on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_kvcache.errors import ConfigError, DTypeError, EngineError, RangeError, ShapeError

if TYPE_CHECKING:
    from trt_kvcache.generation.prompts import Prompt
    from trt_kvcache.polygraphy.runners import SessionRunner

INPUT_IDS, NEW_LENGTHS, RESET = "input_ids", "new_lengths", "reset"

#: Name, dtype and shape of each input; None where the size is given at run time.
FEED_INPUTS: tuple[tuple[str, type[np.generic], tuple[int | None, ...]], ...] = (
    (INPUT_IDS, np.int32, (None, None)),
    (NEW_LENGTHS, np.int32, (None,)),
    (RESET, np.bool_, (1,)),
)

Feed = dict[str, np.ndarray[Any, Any]]


def make_feed(rows: Sequence[Sequence[int]], *, reset: bool) -> Feed:
    """Return the feed of one inference.

    ``rows``: sequence of sequences of int (B,). New tokens of each slot.
    ``reset``: Start new sequences with them.
    """
    input_ids = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for place, row in zip(input_ids, rows, strict=True):
        place[: len(row)] = row
    return {INPUT_IDS: input_ids, NEW_LENGTHS: np.array([len(row) for row in rows], np.int32), RESET: np.array([reset])}


def complete_feed(feed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a feed with ``reset`` where it was left out, int64 as int32, and a scalar ``reset`` as an array.

    Raises RangeError: a value does not fit in int32.
    """
    complete = {RESET: np.array([False]), **feed}
    for name in (INPUT_IDS, NEW_LENGTHS):
        if name in feed:
            complete[name] = _as_int32(name, np.asarray(feed[name]))
    if np.ndim(complete[RESET]) == 0:
        complete[RESET] = np.reshape(complete[RESET], (1,))
    return complete


def _as_int32(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if values.dtype == np.int32:
        return values
    if values.dtype.kind not in "iu":
        raise DTypeError(f"`{name}`: expected int32 or int64, got {values.dtype}.")
    limits = np.iinfo(np.int32)
    if values.size and not limits.min <= values.min() <= values.max() <= limits.max:
        raise RangeError(f"`{name}`: expected values that int32 holds, got {values.min()} to {values.max()}.")
    return values.astype(np.int32)


def read_feed(feed: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
    """Return the new tokens of each slot, and whether to start new sequences.

    ``feed``: mapping. As :func:`complete_feed` returns it.

    Raises ShapeError or RangeError: the arrays disagree.
    """
    input_ids, new_lengths = feed[INPUT_IDS], feed[NEW_LENGTHS]
    slots, width = input_ids.shape
    if new_lengths.shape != (slots,):
        raise ShapeError(f"`{NEW_LENGTHS}`: expected shape ({slots},), one per row of `{INPUT_IDS}`, got {new_lengths.shape}.")
    for slot, length in enumerate(new_lengths.tolist()):
        if not 0 <= length <= width:
            raise RangeError(f"`{NEW_LENGTHS}`[{slot}]: expected 0 to {width}, the width of `{INPUT_IDS}`, got {length}.")
    rows = [row[:length].tolist() for row, length in zip(input_ids, new_lengths, strict=True)]
    return rows, bool(feed[RESET][0])


def greedy_feeds(runner: SessionRunner, prompts: Sequence[Prompt], steps: int) -> Iterator[Feed]:
    """Yield a prefill of ``prompts``, then ``steps`` feeds of one token each: the most likely one by ``runner``'s last logits.

    Each feed must have been run through ``runner`` before the next one is asked for. End tokens do not end it; a NaN counts as
    the largest logit.

    ``runner``: Active.
    ``prompts``: sequence of prompts (n,). Token ids, or text where the model has a tokenizer.

    Raises ConfigError: a text without a tokenizer. EngineError: a feed was not run before the next one was asked for.
    """
    yield make_feed([_tokens(runner, prompt) for prompt in prompts], reset=True)
    before = None
    for step in range(steps):
        logits = runner.last_logits
        if logits is None or logits is before:
            raise EngineError(f"greedy_feeds: feed {step} was not run through {runner.name} before the next one was asked for.")
        yield make_feed(np.argmax(logits, axis=-1)[:, np.newaxis].tolist(), reset=False)
        before = logits


def _tokens(runner: SessionRunner, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = runner.session.tokenizer
    if tokenizer is None:
        raise ConfigError("prompts: expected token ids, got text. The model folder has no tokenizer.json.")
    return tokenizer.encode(prompt)
