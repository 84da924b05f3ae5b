"""``Guidance``: text that follows a JSON schema or a grammar, by masks over the logits that worker processes compute."""

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
from trt_kvcache.server.guidance.options import GuidanceOptions
from trt_kvcache.server.guidance.pool import GuidedText, Job, WorkerPool
from trt_kvcache.server.guidance.process import Opening


class Guidance(Closable):
    """Makes logits processors that allow only what continues a text of a grammar. Of one model; from any thread.

    Parameters
    ----------
    tokenizer : Tokenizer
        Of the model.
    vocab_size : int
        Width of the logits.
    eos_token_ids : sequence of int
        Tokens that end a text: at least one, because a text that is complete must be able to end.
    options : GuidanceOptions, optional
        What a grammar may cost.
    max_texts : int
        Texts that may be written at a time: the slots of a session.

    Raises
    ------
    ConfigError
        There is no such token.
    ModuleNotFoundError
        llguidance is not installed.

    Notes
    -----
    Grammars come from strangers, and some take minutes, gigabytes, or the process with them. So llguidance runs in worker processes,
    which start with the first grammar, at a low priority.

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
        """The worker processes that run now."""
        return self._pool.pids

    def processor(self, guided: Mapping[str, Any], *, ignore_eos: bool = False) -> GuidedMask:
        """Return a logits processor for one request. Waits until its grammar is compiled.

        Parameters
        ----------
        guided : mapping
            One of ``json`` (a JSON schema), ``json_object`` (True), ``regex``, ``choice`` (texts) and ``grammar`` (Lark).
        ignore_eos : bool
            As for :meth:`begin`.

        Returns
        -------
        GuidedMask
            For ``SamplingParams.logits_processors``, of one request alone.

        Raises
        ------
        ConfigError
            Not one of these, or one that llguidance does not compile, or not within the limits.
        """
        mask = self.begin(Grammar(guided), ignore_eos=ignore_eos)
        mask.compile().result()
        return mask

    def begin(self, grammar: Grammar, *, ignore_eos: bool = False, client: str = "") -> GuidedMask:
        """Return a logits processor for one request without compiling its grammar.

        Parameters
        ----------
        grammar : Grammar
            What its text follows.
        ignore_eos : bool
            Let a text end only where its grammar does not go on.
        client : str
            Whose request it is: clients take turns.
        """
        self._check_open()
        return GuidedMask(self._pool, GuidedText(grammar, client), self._vocab_size, self._eos_token_ids if ignore_eos else ())

    def _release(self) -> None:
        self._pool.close()


class GuidedMask(DeferredProcessor):
    """A logits processor that excludes what cannot continue the text so far. ``Guidance`` makes it.

    Parameters
    ----------
    pool : WorkerPool
        Computes what may come next.
    text : GuidedText
        The text of the request.
    vocab_size : int
        Width of the logits.
    late_token_ids : sequence of int
        Tokens that are excluded as long as there are others.
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
        """Begin with the first mask, and return what has it, or an error, once it is there. If that is cancelled, the work ends."""
        return self._begin(()).result

    def ready(self, tokens: Sequence[int], seconds: float = 0.0) -> bool:
        """Begin with the mask behind these tokens, and tell whether it is there, or why there is none."""
        if self._closed:
            return False  # its request is about to end
        if self._start is None:
            self._start = len(tokens)
        result = self._begin(tuple(tokens[self._start :])).result
        if seconds and not result.done():
            wait([result], timeout=seconds)
        return result.done()

    def __call__(self, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Exclude what cannot continue the text."""
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
        """Say that its request is about to end: work that has begun ends, and it is never ready again."""
        self._closed = True
        if self._job is not None:
            self._pool.cancel(self._job)

    def close(self) -> None:
        """Say that its request has ended."""
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
