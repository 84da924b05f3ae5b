"""Polygraphy runners: sessions that ``Comparator.run`` and ``polygraphy run`` can drive.

They keep their cache from one inference to the next, and each has its own. Polygraphy's ``TrtRunner`` cannot: it uploads
every input anew, the caches among them.

They run TensorRT through this package and not through Polygraphy, so they work whatever ``POLYGRAPHY_USE_TENSORRT_RTX``
says, and leave it as it is. Polygraphy's own TensorRT tools read it when polygraphy is imported.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.errors import ClosedError, ShapeError
from trt_kvcache.polygraphy.feeds import FEED_INPUTS, INPUT_IDS, complete_feed, read_feed
from trt_kvcache.polygraphy.live_rows import live_rows
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_source import SessionSource

Arrays = np.ndarray[Any, Any]


class SessionRunner(BaseRunner):  # type: ignore[misc]  # polygraphy has no types
    """Runs an :class:`~trt_kvcache.session.session.InferenceSession`: one inference is one or more enqueues with their commits.

    Parameters
    ----------
    session : InferenceSession, or callable that returns one
        A callable is called at each activation, and what it returns is closed at deactivation. A session stays the
        caller's, who must not give it to two runners: they would share its cache.
    name : str, optional
    live_rows : bool
        Return the live rows of the cache too.

    Notes
    -----
    Feed: see :mod:`trt_kvcache.polygraphy.feeds`. The first inference after activation starts new sequences, whatever ``reset`` says.

    Outputs: ``logits`` float32 ``[B, vocab]`` at the last token of each slot (those of an earlier inference for a slot that
    got nothing), and with ``live_rows`` the arrays of ``live_rows`` (``trt_kvcache/polygraphy/live_rows.py``). All are on the host, and not
    overwritten later. ``inference_time`` is that of prefill or decode, in seconds; reading the rows is not in it.

    Errors are those of the session, which leave it as before the step.
    """

    _PREFIX = "kvcache-session"

    def __init__(self, session: InferenceSession | Callable[[], InferenceSession], name: str | None = None, live_rows: bool = True) -> None:
        super().__init__(name=name, prefix=self._PREFIX)
        self._source = session
        #: Whether the live rows of the cache are among the outputs.
        self.live_rows = live_rows
        self._session: InferenceSession | None = None
        self._last_logits: Arrays | None = None

    @property
    def session(self) -> InferenceSession:
        """The session, while the runner is active. Raises :class:`ClosedError` otherwise."""
        if self._session is None:
            raise ClosedError(f"{self.name}: the runner is not active. Use it in a with block.")
        return self._session

    @property
    def last_logits(self) -> Arrays | None:
        """The logits of the last inference; None before the first one."""
        return self._last_logits

    def activate_impl(self) -> None:
        """Open the session, if it came as a callable."""
        self._session = self._source if isinstance(self._source, InferenceSession) else self._source()

    def deactivate_impl(self) -> None:
        """Close the session, if it was opened here."""
        session, self._session, self._last_logits = self._session, None, None
        if session is not None and session is not self._source:
            session.close()

    def get_input_metadata_impl(self) -> Any:
        """Return the inputs of a feed."""
        metadata = TensorMetadata()
        for name, dtype, shape in FEED_INPUTS:
            metadata.add(name, np.dtype(dtype), shape)
        return metadata

    def infer(self, feed_dict: Mapping[str, Any], check_inputs: bool = True, *args: Any, **kwargs: Any) -> dict[str, Arrays]:
        """Run one inference. ``reset`` may be left out of the feed."""
        outputs: dict[str, Arrays] = super().infer(complete_feed(feed_dict), check_inputs, *args, **kwargs)
        return outputs

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Arrays]:
        """Run one inference on a complete feed."""
        rows, reset = read_feed(feed_dict)
        started = time.perf_counter()
        logits = self._run(rows, reset or self._last_logits is None)
        self.inference_time = time.perf_counter() - started
        self._last_logits = logits
        return {DEFAULT_NAMES.logits: logits, **(live_rows(self.session.cache) if self.live_rows else {})}

    def _run(self, rows: list[list[int]], starts: bool) -> Arrays:
        """Run new tokens of each slot and return the logits, ``[B, vocab]``."""
        if starts:
            return self.session.prefill(rows)
        if all(len(row) == 1 for row in rows):
            return self.session.decode([token for (token,) in rows])
        logits = self.session.append(rows)
        got_nothing = [not row for row in rows]
        if any(got_nothing) and self._last_logits is not None:
            logits[got_nothing] = self._last_logits[got_nothing]
        return logits


class RecomputeRunner(SessionRunner):
    """Runs a session without relying on what its cache holds: every inference starts anew with all tokens so far.

    Beside a :class:`SessionRunner` of the same model it shows whether cached decoding computes what one pass over the
    whole sequence computes. The session cuts that pass where its engine takes no more (``max_prefill_length``).

    Parameters
    ----------
    session, name, live_rows
        As for :class:`SessionRunner`.
    """

    _PREFIX = "kvcache-recompute"

    def __init__(self, session: InferenceSession | Callable[[], InferenceSession], name: str | None = None, live_rows: bool = True) -> None:
        super().__init__(session, name, live_rows)
        self._history: list[list[int]] = []

    def deactivate_impl(self) -> None:
        """Close the session, if it was opened here, and forget the tokens."""
        super().deactivate_impl()
        self._history = []

    def _run(self, rows: list[list[int]], starts: bool) -> Arrays:
        if starts:
            history = rows
        elif len(rows) == len(self._history):
            history = [held + row for held, row in zip(self._history, rows, strict=True)]
        else:
            raise ShapeError(f"`{INPUT_IDS}`: expected one row for each of {len(self._history)} active slots, got {len(rows)}.")
        logits = self.session.prefill(history)
        self._history = history
        return logits


class ReferenceRunner(SessionRunner):
    """Runs a model in NumPy.

    Parameters
    ----------
    folder : path
        A Hugging Face folder, or an engine folder whose checkpoint is still there.
    name : str, optional
    live_rows : bool
    **options
        See :class:`~trt_kvcache.session.session_source.SessionSource`.
    """

    _PREFIX = "kvcache-reference"

    def __init__(self, folder: str | os.PathLike[str], name: str | None = None, live_rows: bool = True, **options: Any) -> None:
        super().__init__(SessionSource(folder, engine="reference", **options), name, live_rows)
