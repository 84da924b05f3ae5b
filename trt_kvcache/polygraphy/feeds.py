"""Feeds of our Polygraphy runners: the inputs of one inference, as plain NumPy arrays.

============= ============== ===================================================================
input_ids     int32 [B, s]   new tokens of each slot, padded on the right
new_lengths   int32 [B]      number of real tokens; 0 for a slot without new tokens; all if left out
reset         bool [1]       True: start new sequences; False or left out: continue the sequences
============= ============== ===================================================================
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

#: Name, dtype and shape of each input; None for a dynamic dimension.
FEED_INPUTS: tuple[tuple[str, type[np.generic], tuple[int | None, ...]], ...] = (
    (INPUT_IDS, np.int32, (None, None)),
    (NEW_LENGTHS, np.int32, (None,)),
    (RESET, np.bool_, (1,)),
)

#: Most decode steps of :func:`decoding_steps`, and number of different lengths of its prompts.
MAX_DECODING_STEPS = 16
_NUM_LENGTHS = 4

Feed = dict[str, np.ndarray[Any, Any]]


def make_feed(rows: Sequence[Sequence[int]], *, reset: bool = False) -> Feed:
    """Return the feed of one inference.

    Parameters
    ----------
    rows : sequence of sequence of int
        New tokens of each slot.
    reset : bool
        True: start new sequences. False: continue the current ones. The first inference of a runner always starts new ones.

    Returns
    -------
    dict of str to ndarray
        ``input_ids`` int32 ``[B, s]``, padded with 0 on the right; ``new_lengths`` int32 ``[B]``; ``reset`` bool ``[1]``.

    Examples
    --------
    >>> from trt_kvcache import make_feed
    >>> feed = make_feed([[5, 6, 7], [8]], reset=True)
    >>> feed["input_ids"].tolist()
    [[5, 6, 7], [8, 0, 0]]
    >>> feed["new_lengths"].tolist()
    [3, 1]
    """
    input_ids = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for place, row in zip(input_ids, rows, strict=True):
        place[: len(row)] = row
    return {INPUT_IDS: input_ids, NEW_LENGTHS: np.array([len(row) for row in rows], np.int32), RESET: np.array([reset])}


def complete_feed(feed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete feed: ``reset`` as an array, ``new_lengths`` of all tokens if left out, int32 instead of int64."""
    complete = {RESET: np.array([False]), **feed}
    if NEW_LENGTHS not in feed and INPUT_IDS in feed and np.ndim(feed[INPUT_IDS]) == 2:
        slots, width = np.shape(feed[INPUT_IDS])
        complete[NEW_LENGTHS] = np.full(slots, width, np.int32)
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
    """Return the new tokens of each slot without padding, and True if they start new sequences."""
    input_ids, new_lengths = feed[INPUT_IDS], feed[NEW_LENGTHS]
    slots, width = input_ids.shape
    if new_lengths.shape != (slots,):
        raise ShapeError(f"`{NEW_LENGTHS}`: expected shape ({slots},), one per row of `{INPUT_IDS}`, got {new_lengths.shape}.")
    for slot, length in enumerate(new_lengths.tolist()):
        if not 0 <= length <= width:
            raise RangeError(f"`{NEW_LENGTHS}`[{slot}]: expected 0 to {width}, the width of `{INPUT_IDS}`, got {length}.")
    rows = [row[:length].tolist() for row, length in zip(input_ids, new_lengths, strict=True)]
    return rows, bool(feed[RESET][0])


def decoding_steps(rows: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Split sequences into steps: a prompt for each slot, of different lengths, then up to 16 times a single token for each slot."""
    shortest = min(map(len, rows), default=0)
    steps = min(shortest // 2, MAX_DECODING_STEPS)
    ends = [max(len(row) - steps - slot % _NUM_LENGTHS, min(len(row), 1)) for slot, row in enumerate(rows)]
    prompts = [list(row[:end]) for row, end in zip(rows, ends, strict=True)]
    return [prompts, *([[row[end + step]] for row, end in zip(rows, ends, strict=True)] for step in range(steps))]


def greedy_feeds(runner: SessionRunner, prompts: Sequence[Prompt], steps: int) -> Iterator[Feed]:
    """Yield the feeds of greedy decoding: a prefill of the prompts, then one token per slot and step.

    Each token is the most likely one by the last logits of ``runner``, so each feed must be run through ``runner`` before the next one
    is requested. End-of-sequence tokens do not end a sequence. NaN counts as the largest logit.

    Parameters
    ----------
    runner : SessionRunner
        An active runner.
    prompts : sequence of str or sequence of int
        One prompt per slot: token ids, or text if the model has a tokenizer.
    steps : int
        Decode steps after the prefill.

    Yields
    ------
    dict of str to ndarray
        As :func:`make_feed` returns it.

    Raises
    ------
    ConfigError
        A prompt is a text and the model has no tokenizer.
    EngineError
        A feed was not run before the next one was requested.

    Examples
    --------
    >>> from trt_kvcache import ReferenceRunner, greedy_feeds
    >>> with ReferenceRunner("examples/tiny-llama", max_batch_size=2) as runner:
    ...     for feed in greedy_feeds(runner, [[0, 54, 100], [0, 42]], steps=2):
    ...         outputs = runner.infer(feed)
    ...         print(feed["new_lengths"], outputs["kvcache_lengths"])
    [3 2] [3 2]
    [1 1] [4 3]
    [1 1] [5 4]
    """
    yield make_feed([_tokens(runner, prompt) for prompt in prompts], reset=True)
    before = None
    for step in range(steps):
        logits = runner.last_logits
        if logits is None or logits is before:
            raise EngineError(f"greedy_feeds: feed {step} was not run through {runner.name} before the next feed was requested.")
        yield make_feed(np.argmax(logits, axis=-1)[:, np.newaxis].tolist(), reset=False)
        before = logits


def _tokens(runner: SessionRunner, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = runner.session.tokenizer
    if tokenizer is None:
        raise ConfigError("prompts: expected token ids, got text. The model folder has no tokenizer.json.")
    return tokenizer.encode(prompt)
