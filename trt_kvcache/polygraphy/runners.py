"""Polygraphy runners: sessions for ``Comparator.run`` and ``polygraphy run``.

Each runner has its own cache and keeps it from one inference to the next. Polygraphy's ``TrtRunner`` cannot do that: it uploads
every input again, caches included.

The runners use TensorRT through this package and not through Polygraphy. So they work whatever the value of
``POLYGRAPHY_USE_TENSORRT_RTX`` is, and do not change it. Polygraphy's own TensorRT tools read it when polygraphy is imported.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseLoader, BaseRunner
from polygraphy.backend.base.util import check_inputs as check_feed
from polygraphy.common import TensorMetadata
from polygraphy.logger import G_LOGGER, LogMode

from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.errors import ClosedError, ShapeError
from trt_kvcache.polygraphy.failures import as_polygraphy
from trt_kvcache.polygraphy.feeds import (
    FEED_INPUTS,
    INPUT_IDS,
    MAX_DECODING_STEPS,
    NEW_LENGTHS,
    RESET,
    complete_feed,
    decoding_steps,
    read_feed,
)
from trt_kvcache.polygraphy.live_rows import live_rows
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_source import SessionSource

Arrays = np.ndarray[Any, Any]

#: Most slots whose prompt lengths are logged one by one.
_SHOWN_SLOTS = 4


class SessionRunner(BaseRunner):  # type: ignore[misc]  # polygraphy has no types
    """Runs an :class:`~trt_kvcache.session.session.InferenceSession`. One inference is a prefill, an append or a decode step.

    Parameters
    ----------
    session : InferenceSession or callable
        A callable that returns a session, such as a :class:`~trt_kvcache.session.session_source.SessionSource`, is called at each
        activation, and its session is closed at deactivation. With a loader of Polygraphy
        (:class:`~trt_kvcache.polygraphy.loaders.SessionFromFolder`) errors are ``PolygraphyException``. A session that is passed
        directly is not closed; do not pass it to two runners, since they would share its cache.
    name : str, optional
        Name of the runner; by default Polygraphy makes one from a prefix and the time.
    live_rows : bool
        True if the outputs include the live rows of the cache.
    tokens_only : bool
        True if inferences have only tokens, as with Polygraphy's default data loader, whose random lengths would be 0 and 1. Each
        inference then starts new sequences, prefills a short prompt of each row, and decodes its other tokens one by one
        (``decoding_steps`` in ``feeds.py``).
    adapter : str, or sequence of str or None (n,), optional
        Name of the adapter of all sequences, or one for each, of a session with ``adapters``; the base model if left out.

    Attributes
    ----------
    live_rows : bool
        True if the outputs include the live rows of the cache.

    Notes
    -----
    :func:`~trt_kvcache.polygraphy.feeds.make_feed` describes the inputs. The first inference after activation starts new sequences even
    if ``reset`` is False.

    Outputs are ``logits`` float32 ``[B, vocab]`` at the last token of each slot (for a slot without new tokens, the logits of an earlier
    inference), and with ``live_rows`` the arrays of ``trt_kvcache.polygraphy.live_rows.live_rows``. All are in host memory and are
    not overwritten later. The runner waits for the device. ``inference_time`` is the time of the prefill, append or decode step in
    seconds, without reading the rows.

    Errors are errors of the session, whose state is then as before the step.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession, SessionRunner, make_feed
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
    ...     with SessionRunner(session) as runner:
    ...         outputs = runner.infer(make_feed([[5, 6, 7], [8]], reset=True))
    >>> outputs["logits"].shape
    (2, 320)
    >>> outputs["kvcache_lengths"].tolist()
    [3, 1]
    """

    _PREFIX = "kvcache-session"

    def __init__(
        self,
        session: InferenceSession | Callable[[], InferenceSession],
        name: str | None = None,
        live_rows: bool = True,
        tokens_only: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(name=name, prefix=self._PREFIX)
        self._source = session
        self._tokens_only = tokens_only
        self._adapter = adapter
        #: True if the outputs include the live rows of the cache.
        self.live_rows = live_rows
        self._session: InferenceSession | None = None
        self._last_logits: Arrays | None = None

    @property
    def session(self) -> InferenceSession:
        """The session, while the runner is active.

        Raises
        ------
        ClosedError
            The runner is not active.
        """
        if self._session is None:
            raise ClosedError(f"{self.name}: the runner is not active. Use it in a with block.")
        return self._session

    @property
    def last_logits(self) -> Arrays | None:
        """Logits float32 ``[B, vocab]`` of the last inference; None before the first one."""
        return self._last_logits

    def activate_impl(self) -> None:
        """Open the session if a callable was given."""
        self._session = self._source if isinstance(self._source, InferenceSession) else self._source()

    def deactivate_impl(self) -> None:
        """Close the session if this runner opened it."""
        session, self._session, self._last_logits = self._session, None, None
        if session is not None and session is not self._source:
            session.close()

    def get_input_metadata_impl(self) -> Any:
        """Return the names, dtypes and shapes of the inputs.

        Returns
        -------
        TensorMetadata
            None is a dynamic dimension. The largest shapes are inputs of the default data loader: all slots, each with 32 tokens, or the
            length of a slot if it is less.
        """
        return self._metadata(everything=not self._tokens_only)

    def _metadata(self, *, everything: bool) -> Any:
        largest: dict[str, tuple[int, ...]] = {} if self._session is None else _largest_shapes(self._session)
        metadata = TensorMetadata()
        for name, dtype, shape in FEED_INPUTS:
            if everything or name == INPUT_IDS:
                metadata.add(name, np.dtype(dtype), shape, max_shape=largest.get(name))
        return metadata

    def infer(self, feed_dict: Mapping[str, Any], check_inputs: bool = True, *args: Any, **kwargs: Any) -> dict[str, Arrays]:
        """Run one inference.

        Parameters
        ----------
        feed_dict : mapping of str to array
            See :func:`~trt_kvcache.polygraphy.feeds.make_feed`. ``reset`` may be left out and counts as False then.
        check_inputs : bool
            True if Polygraphy checks names, dtypes and shapes of the inputs.
        *args, **kwargs
            Passed on to ``BaseRunner.infer``.

        Returns
        -------
        dict of str to ndarray
            The outputs: see the notes of the class.

        Raises
        ------
        KVCacheError
            The feed is not valid, or the session rejects the step.
        """
        feed = complete_feed(feed_dict)
        if check_inputs and self.is_active:
            check_feed(feed, self._metadata(everything=True))
        outputs: dict[str, Arrays] = super().infer(feed, False, *args, **kwargs)
        return outputs

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Arrays]:
        """Run one inference with a complete feed. Polygraphy calls it from :meth:`infer`.

        Parameters
        ----------
        feed_dict : mapping of str to ndarray
            All three inputs, with the dtypes that :func:`~trt_kvcache.polygraphy.feeds.make_feed` describes.

        Returns
        -------
        dict of str to ndarray
            The outputs: see the notes of the class.
        """
        with self._errors():
            return self._infer(feed_dict)

    def _errors(self) -> AbstractContextManager[None]:
        """Raise errors of Polygraphy if the session comes from one of its loaders."""
        return as_polygraphy() if isinstance(self._source, BaseLoader) else nullcontext()

    def _infer(self, feed_dict: Mapping[str, Any]) -> dict[str, Arrays]:
        rows, reset = read_feed(feed_dict)
        started = time.perf_counter()
        logits = self._run_whole(decoding_steps(rows)) if self._tokens_only else self._run(rows, reset or self._last_logits is None)
        self.inference_time = time.perf_counter() - started
        self._last_logits = logits
        return {DEFAULT_NAMES.logits: logits, **(live_rows(self.session.cache) if self.live_rows else {})}

    def _run_whole(self, steps: list[list[list[int]]]) -> Arrays:
        """Run new sequences as prefill and decode steps; return the last logits, ``[B, vocab]``."""
        prompts, *tokens = steps
        _log_sizes(prompts, len(tokens))
        logits = self._run(prompts, True)
        for step in tokens:
            logits = self._run(step, False)
        return logits

    def _run(self, rows: list[list[int]], starts: bool) -> Arrays:
        """Run the new tokens of each slot and return the logits, ``[B, vocab]``."""
        if starts:
            return self.session.prefill(rows, adapter=self._adapter)
        if all(len(row) == 1 for row in rows):
            return self.session.decode([token for (token,) in rows])
        logits = self.session.append(rows)
        got_nothing = [not row for row in rows]
        if any(got_nothing) and self._last_logits is not None:
            logits[got_nothing] = self._last_logits[got_nothing]
        return logits


def _log_sizes(prompts: list[list[int]], steps: int) -> None:
    """Log the number of tokens of an inference, once for the same sizes."""
    lengths = ", ".join(str(len(row)) for row in prompts[:_SHOWN_SLOTS]) + (", ..." if len(prompts) > _SHOWN_SLOTS else "")
    total = sum(map(len, prompts)) + steps * len(prompts)
    text = f"each iteration compares {total} tokens in {len(prompts)} slots: prompts of {lengths} tokens, then {steps} decode steps"
    if steps:
        G_LOGGER.info(f"{text}.", mode=LogMode.ONCE)
    else:
        G_LOGGER.warning(f"{text}: nothing is decoded. Give longer rows: --input-shapes input_ids:[1,32].", mode=LogMode.ONCE)


def _largest_shapes(session: InferenceSession) -> dict[str, tuple[int, ...]]:
    """Return the largest shape of each input of a session."""
    slots = session.cache.max_batch_size
    width = min(session.max_sequence_length, 2 * MAX_DECODING_STEPS)
    return {INPUT_IDS: (slots, width), NEW_LENGTHS: (slots,), RESET: (1,)}


class RecomputeRunner(SessionRunner):
    """Runs a session without relying on its cache: every inference starts new sequences with all tokens so far.

    Compared with a :class:`SessionRunner` of the same model, it tests that cached decoding equals one pass over the whole
    sequence. The session splits that pass into chunks if it is longer than ``max_prefill_length``.

    Parameters
    ----------
    session : InferenceSession or callable
        As for :class:`SessionRunner`.
    name : str, optional
        As for :class:`SessionRunner`.
    live_rows : bool
        As for :class:`SessionRunner`.
    tokens_only : bool
        As for :class:`SessionRunner`.
    adapter : str, or sequence of str or None (n,), optional
        As for :class:`SessionRunner`.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession, RecomputeRunner, make_feed
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=1) as session:
    ...     with RecomputeRunner(session) as runner:
    ...         _ = runner.infer(make_feed([[5, 6, 7]], reset=True))
    ...         outputs = runner.infer(make_feed([[8]], reset=False))
    >>> outputs["kvcache_lengths"].tolist()
    [4]
    """

    _PREFIX = "kvcache-recompute"

    def __init__(
        self,
        session: InferenceSession | Callable[[], InferenceSession],
        name: str | None = None,
        live_rows: bool = True,
        tokens_only: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(session, name, live_rows, tokens_only, adapter)
        self._history: list[list[int]] = []

    def _run_whole(self, steps: list[list[list[int]]]) -> Arrays:
        """Run all tokens of the sequences as prompts."""
        return self._run([[*chain(*parts)] for parts in zip(*steps, strict=True)], True)

    def deactivate_impl(self) -> None:
        """Close the session if this runner opened it, and drop the tokens."""
        super().deactivate_impl()
        self._history = []

    def _run(self, rows: list[list[int]], starts: bool) -> Arrays:
        if starts:
            history = rows
        elif len(rows) == len(self._history):
            history = [held + row for held, row in zip(self._history, rows, strict=True)]
        else:
            raise ShapeError(f"`{INPUT_IDS}`: expected one row for each of {len(self._history)} active slots, got {len(rows)}.")
        logits = self.session.prefill(history, adapter=self._adapter)
        self._history = history
        return logits


class ReferenceRunner(SessionRunner):
    """Runs a model on the NumPy reference engine.

    Parameters
    ----------
    folder : path
        A Hugging Face folder, or an engine folder whose checkpoint still exists.
    name : str, optional
        As for :class:`SessionRunner`.
    live_rows : bool
        As for :class:`SessionRunner`.
    request_adapter : str, or sequence of str or None (n,), optional
        As ``adapter`` of :class:`SessionRunner`: here, the option ``adapter`` is one that is merged.
    **options
        Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`.

    Raises
    ------
    ConfigError, RangeError
        An option is out of range.

    Examples
    --------
    >>> from trt_kvcache import ReferenceRunner, make_feed
    >>> with ReferenceRunner("examples/tiny-llama", max_batch_size=2, max_sequence_length=32) as runner:
    ...     outputs = runner.infer(make_feed([[5, 6, 7], [8]], reset=True))
    >>> sorted(outputs)
    ['k_cache_0', 'k_cache_1', 'kvcache_lengths', 'logits', 'v_cache_0', 'v_cache_1']
    """

    _PREFIX = "kvcache-reference"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str | None = None,
        live_rows: bool = True,
        request_adapter: str | Sequence[str | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(SessionSource(folder, engine="reference", **options), name, live_rows, adapter=request_adapter)
