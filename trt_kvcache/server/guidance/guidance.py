"""``Guidance``: texts that follow a JSON schema or a grammar, by logit masks that worker processes compute."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._util.lifetime import Closable
from trt_kvcache.checkpoint.tokenizer import Tokenizer
from trt_kvcache.errors import ConfigError, ProcessorError
from trt_kvcache.generation.sampling import DeferredProcessor
from trt_kvcache.server.guidance.grammar import Grammar
from trt_kvcache.server.guidance.guidance_options import GuidanceOptions
from trt_kvcache.server.guidance.pool import GuidedText, Job, WorkerPool
from trt_kvcache.server.guidance.process import Opening


class Guidance(Closable):
    """Makes logits processors that allow only tokens that a grammar allows, for one model. Any thread may use it.

    Parameters
    ----------
    tokenizer : Tokenizer
        Tokenizer of the model.
    vocab_size : int
        Width of the logits.
    eos_token_ids : sequence of int
        Tokens that end a text: at least one, because a complete text must be able to end.
    options : GuidanceOptions, optional
        Limits of a grammar.
    max_texts : int
        Most texts that are generated at a time: the slots of a session.

    Raises
    ------
    ConfigError
        There is no end token.
    ModuleNotFoundError
        llguidance is not installed.

    Notes
    -----
    Grammars come from clients, and some take minutes or gigabytes, or crash the process. So llguidance runs in worker processes of low
    priority, which start with the first grammar.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> from trt_kvcache.server.guidance import Guidance
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     with Guidance(session.tokenizer, session.vocab_size, [0]) as guidance:
    ...         only = guidance.processor({"choice": ["cat", "hat"]})
    ...         text = "".join(token.text for token in session.generate("A", logits_processors=[only], stop_token_ids=[0]))
    >>> text in ("cat", "hat")
    True
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        options: GuidanceOptions | None = None,
        max_texts: int = 8,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("llguidance") is None:
            with naming_the_extra():
                raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")
        if not eos_token_ids:
            raise ConfigError("guided decoding: expected a model with an end token, got one without: a complete text could not end.")
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        file = tokenizer.to_json().encode()
        self._pool = WorkerPool(Opening(file, vocab_size, self._eos_token_ids, 0), options or GuidanceOptions(), max_texts=max_texts)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers."""
        return self._pool.pids

    def processor(self, guided: Mapping[str, Any], *, ignore_eos: bool = False) -> GuidedMask:
        """Return a logits processor for one request. Waits until its grammar is compiled.

        Parameters
        ----------
        guided : mapping
            One of ``json`` (a JSON schema), ``json_object`` (True), ``regex``, ``choice`` (texts) and ``grammar`` (Lark).
        ignore_eos : bool
            True: a text ends only where the grammar allows no further token.

        Returns
        -------
        GuidedMask
            For ``SamplingParams.logits_processors`` of one request only.

        Raises
        ------
        ConfigError
            None of these or several, or llguidance cannot compile it within the limits.
        """
        mask = self.begin(Grammar(guided), ignore_eos=ignore_eos)
        mask.compile().result()
        return mask

    def begin(self, grammar: Grammar, *, ignore_eos: bool = False, client: str = "") -> GuidedMask:
        """Return a logits processor for one request without compiling its grammar.

        Parameters
        ----------
        grammar : Grammar
            Grammar of the text.
        ignore_eos : bool
            True: the text ends only where the grammar allows no further token.
        client : str
            Name of the client: clients take turns.
        """
        self._check_open()
        return GuidedMask(self._pool, GuidedText(grammar, client), self._vocab_size, self._eos_token_ids if ignore_eos else ())

    def _release(self) -> None:
        self._pool.close()


class GuidedMask(DeferredProcessor):
    """A logits processor that excludes tokens that cannot continue the text. ``Guidance`` makes it.

    Parameters
    ----------
    pool : WorkerPool
        Computes the masks.
    text : GuidedText
        The text of the request.
    vocab_size : int
        Width of the logits.
    late_token_ids : sequence of int
        Tokens that are allowed only if no other token is.
    """

    def __init__(self, pool: WorkerPool, text: GuidedText, vocab_size: int, late_token_ids: Sequence[int]) -> None:
        self._pool = pool
        self._text = text
        self._vocab_size = vocab_size
        self._late = np.array(late_token_ids, np.intp)
        self._start: int | None = None
        self._job: Job | None = None
        self._closed = False
        self._end = weakref.finalize(self, pool.forget, self._text)
        self._end.atexit = False

    def compile(self) -> Future[bytes]:
        """Begin to compile the grammar; return a future of the first mask, or of an error. Cancelling it ends the work."""
        return self._begin(()).result

    def ready(self, tokens: Sequence[int], seconds: float = 0.0) -> bool:
        """Begin with the mask after these tokens; return True if it, or an error, is available."""
        if self._closed:
            return False  # its request is about to end
        if self._start is None:
            self._start = len(tokens)
        result = self._begin(tuple(tokens[self._start :])).result
        if seconds and not result.done():
            wait([result], timeout=seconds)
        return result.done()

    def __call__(self, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Set the logits of all other tokens to -inf."""
        self.ready(tokens)
        assert self._job is not None
        try:
            mask = self._job.result.result()
        except ConfigError as error:
            raise ProcessorError(str(error)) from None
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._late.size:
            without = allowed.copy()
            without[self._late] = False
            allowed = without if without.any() else allowed
        logits[~allowed] = -np.inf
        return logits

    def cancel(self) -> None:
        """End the work, as its request is about to end. It is never ready again."""
        self._closed = True
        if self._job is not None:
            self._pool.cancel(self._job)

    def close(self) -> None:
        """End the work, as its request has ended."""
        self.cancel()
        self._end()

    def _begin(self, tokens: tuple[int, ...]) -> Job:
        job = self._job
        if job is None or job.tokens != tokens:
            if job is not None:
                self._pool.cancel(job)
            self._job = job = Job(self._text, tokens)
            self._pool.submit(job)
        return job
