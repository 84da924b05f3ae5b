"""``InferenceSession``: prefill, decode and generate on a KV cache, with any engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import as_sequence, int_in_range, slot_index
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache._util.progress import Progress
from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.cache.plot import draw_cache
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.engine.embedding_rows import EmbeddingRows, finite_rows
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine
from trt_kvcache.engine.slot_adapters import SlotAdapters
from trt_kvcache.errors import ClosedError, ConfigError, RangeError, ShapeError
from trt_kvcache.generation.chat_prompt import ChatPrompt
from trt_kvcache.generation.drafter import DraftChoice, Drafter
from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.generation.ngram_drafter import NgramDrafter
from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.generation.prompts import AnyPrompt, Prompt, PromptReader, as_prompts
from trt_kvcache.generation.request import Request
from trt_kvcache.generation.sampler_state import SamplerState
from trt_kvcache.generation.sampling import SamplingParams, params_for
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.plot import Plot
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.decode_steps import DecodeSteps
from trt_kvcache.session.draft_heads import with_located_draft
from trt_kvcache.session.generate_tokens import generate_queued, generate_tokens
from trt_kvcache.session.head_drafter import HeadDrafter
from trt_kvcache.session.model_drafter import ModelDrafter
from trt_kvcache.session.model_location import expanded
from trt_kvcache.session.open_draft import with_draft
from trt_kvcache.session.open_model import SessionParts, open_engine_folder, open_model
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.request_queue import RequestQueue
from trt_kvcache.session.resume_snapshots import Paths, next_tokens, read_snapshots, resumed_params
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.scoring import score_prompts
from trt_kvcache.session.session_options import DEFAULT_PREFILL_CHUNK, SessionOptions
from trt_kvcache.session.single_user import SingleUser, exclusive
from trt_kvcache.session.statistics import SessionStatistics
from trt_kvcache.session.step_plan import StepPlan
from trt_kvcache.session.timeline import Timeline
from trt_kvcache.session.token_stream import TokenStream
from trt_kvcache.session.tree_checks import checked_parents

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trt_kvcache.generation.sampling import SamplingOptions
    from trt_kvcache.session.session_options import ModelOptions, OpenOptions

_LOGGER = logging.getLogger("trt_kvcache.session")


class InferenceSession(Uncopyable):
    """Sequences that are generated together on one cache and one engine. Not thread-safe: a concurrent call raises ``ThreadError``.

    Most callers open one with :meth:`open` or :meth:`from_model`; the constructor joins an engine and a cache of your own.

    Parameters
    ----------
    engine : Engine
        Closed with the session.
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        In the engine's memory and layout; states have two buffers (``ping_pong``). Closed with the session; only the session may change
        its lengths.
    names : TensorNames
        Names of the engine's tensors.
    tokenizer : Tokenizer, optional
        Without one, everything works on token ids.
    eos_token_ids : sequence of int
        Tokens that end a request.
    defaults : SamplingParams, optional
        Sampling options of ``generate`` that a call does not give; greedy if left out.
    prompt_cache : PromptCache, optional
        Prefix cache over ``cache``: of a prompt that begins like an earlier one, only the rest is run. Closed with the session. If left
        out, prefix caching is off.
    identity : callable, optional
        Returns the :class:`~trt_kvcache.sequences.model_identity.ModelIdentity` that snapshots carry. Without one, the session
        neither writes nor reads snapshots.
    model : ModelConfig, optional
        Description of the decoder, layer by layer, for tools that name layers.
    weights : WeightsSummary, optional
        Storage of the weights, for tools that report it.
    draft : "ngram", "off" or Drafter, optional
        Default of speculative decoding, for requests without ``draft``: see :meth:`generate`. Off if left out. For ``"mtp"`` use
        :meth:`from_model` or :meth:`open`, which open the head.
    prefill_chunk : int
        Most prompt tokens that :meth:`step` runs together with requests that decode (chunked prefill).
    on_close : callable, optional
        Called once by ``close``, after engine and cache are closed.

    Raises
    ------
    BindingError, LayoutError, PlaceError
        Engine and cache do not fit: see :class:`~trt_kvcache.engine.bindings.BindingPlan`.
    ConfigError
        ``prompt_cache`` is over another cache, or the engine cannot verify drafts.
    RangeError
        ``prefill_chunk`` is no integer >= 1.

    Notes
    -----
    If a step fails or is interrupted, lengths and tokens are as before that step, and it can be repeated. Recurrent states can be taken
    back by one step only. So if a call of several steps fails on a model with recurrent layers, no slot is active afterwards.

    A call while another thread is in one raises :class:`ThreadError` and changes nothing. Between calls, and between the tokens of a
    :class:`TokenStream`, a session may pass to another thread. :class:`AsyncSession` serves many callers.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
    ...     for token in session.generate([[5, 6, 7], [8, 9]], max_new_tokens=2, ignore_eos=True):
    ...         print(token.index, token.finish_reason)
    0 None
    1 None
    0 length
    1 length
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        *,
        names: TensorNames = DEFAULT_NAMES,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        defaults: SamplingParams | None = None,
        prompt_cache: PromptCache | None = None,
        identity: Callable[[], ModelIdentity] | None = None,
        model: ModelConfig | None = None,
        weights: WeightsSummary | None = None,
        draft: DraftChoice | None = None,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self._user = SingleUser("this InferenceSession")
        self._runner = Runner(engine, cache, names=names)
        self._engine = engine
        self._cache = cache
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._defaults = SamplingParams() if defaults is None else defaults
        self._model = model
        self._weights = weights
        self._on_close = on_close
        self._closed = False
        self._prompt_cache = PromptCache(cache) if prompt_cache is None else prompt_cache
        if self._prompt_cache.cache is not cache:
            raise ConfigError("prompt_cache: expected one over the cache of this session, got one over another.")
        self._identity = identity
        self._batch = Batch(self._runner, self._prompt_cache)
        self._prompts = PromptReader(tokenizer, self._runner.plan.vocab_size)
        self._decode_steps = DecodeSteps(self._runner, self._batch)
        self._prefill_chunk = int_in_range("prefill_chunk", prefill_chunk, 1)
        self._queue = RequestQueue(self._runner, self._batch, self._decode_steps, prefill_chunk=self._prefill_chunk)
        self._drafter: Drafter | None = None
        self._drafter = self._chosen_drafter(draft)
        if isinstance(self._drafter, ModelDrafter):
            self._drafter.run_on(self._runner.stream)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, progress: Progress | None = None, **options: Unpack[OpenOptions]) -> InferenceSession:
        """Open an engine folder.

        Parameters
        ----------
        folder : path
            Made by ``trt-kvcache build`` or :func:`trt_kvcache.build_engine`.
        progress : callable, optional
            Called as ``progress(stage, fraction)`` during long work.
        **options
            ``engine``, ``flavour``, ``device``, ``prompt_cache_bytes``, ``cuda_graphs``, ``draft``, ``prefill_chunk``, ``adapters``: see
            :class:`~trt_kvcache.session.session_options.SessionOptions`.

        Returns
        -------
        InferenceSession
            Close it, or use it in a ``with`` block.

        Raises
        ------
        ConfigError
            An option is out of range or fixed by the build, or the folder is damaged or newer than this package.
        CheckpointError, EngineError, CudaError
            The checkpoint is gone or changed, or the engine cannot run.

        Warns
        -----
        EngineFallbackWarning
            ``engine="auto"`` falls back to PyTorch or the NumPy reference engine.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> InferenceSession.open("examples/tiny-llama")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        trt_kvcache.errors.EngineError: examples/tiny-llama: expected an engine folder, but it has no engine.plan...
        """
        chosen = with_located_draft(SessionOptions.of(options))
        return cls._of(with_draft(open_engine_folder(folder, chosen, progress=progress), chosen, folder, progress=progress))

    @classmethod
    def from_model(
        cls, folder: str | os.PathLike[str], *, progress: Progress | None = None, **options: Unpack[ModelOptions]
    ) -> InferenceSession:
        """Open a Hugging Face folder, without an engine folder.

        Parameters
        ----------
        folder : path
            ``config.json``, ``model.safetensors`` and, for text, ``tokenizer.json``.
        progress : callable, optional
            Called as ``progress(stage, fraction)`` during long work.
        **options
            Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`.

        Returns
        -------
        InferenceSession
            Close it, or use it in a ``with`` block.

        Raises
        ------
        ConfigError
            An option is out of range, or the model is not supported with it.
        CheckpointError, BuildError, EngineError, CudaError
            The checkpoint is damaged or not supported, or an engine cannot be built or run.

        Warns
        -----
        EngineFallbackWarning
            ``engine="auto"`` falls back to PyTorch or the NumPy reference engine.

        Notes
        -----
        To run TensorRT, an engine is built first, into a temporary folder that is removed with the session. That takes a while: build
        an engine folder once with :func:`trt_kvcache.build_engine` and use :meth:`open`.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_sequence_length=64) as session:
        ...     session.max_sequence_length, session.vocab_size
        (64, 320)
        """
        chosen = with_located_draft(SessionOptions.of(options))
        return cls._of(with_draft(open_model(folder, chosen, progress=progress), chosen, folder, progress=progress))

    @classmethod
    def _of(cls, parts: SessionParts) -> InferenceSession:
        """Return a session that owns the parts. If that fails, they are closed."""
        try:
            return cls(**parts.arguments())
        except BaseException:
            parts.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"active={len(self._batch)}"
        engine, limit = type(self._engine).__name__, self._batch.max_sequence_length
        slots = self._cache.max_batch_size
        return f"InferenceSession(engine={engine}, slots={slots}, max_sequence_length={limit}, vocab_size={self.vocab_size}, {state})"

    # --- what it is ---

    @property
    def cache(self) -> Cache:
        """The cache manager of the session."""
        return self._cache

    @property
    def cache_config(self) -> DecoderCacheConfig:
        """Sizes, dtype and layers of the cache."""
        return self._cache.config

    @property
    def engine(self) -> Engine:
        """The engine of the session."""
        return self._engine

    @property
    def model(self) -> ModelConfig | None:
        """Description of the decoder, layer by layer, if the session was given one."""
        return self._model

    @property
    def weights(self) -> WeightsSummary | None:
        """Storage of the weights, if the session opened a checkpoint; None for an engine with weights of its own."""
        return self._weights

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template, so that it takes conversations: :meth:`chat` and :class:`ChatPrompt`."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    @property
    def defaults(self) -> SamplingParams:
        """Sampling options of ``generate`` that are not given in a call."""
        return self._defaults

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens."""
        return self._eos_token_ids

    @property
    def prompt_cache(self) -> PromptCache:
        """Copies of earlier prompts, with counters of hits and misses; off unless ``prompt_cache_bytes`` was given."""
        return self._prompt_cache

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose, in the order in which they were given; empty without."""
        known = self._slot_adapters
        return () if known is None else known.names

    @property
    def adapters_nbytes(self) -> int:
        """Bytes of the updates of all adapters, which a step with an adapter reads."""
        known = self._slot_adapters
        return 0 if known is None else known.updates_nbytes

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._runner.plan.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens a slot can hold, S."""
        return self._batch.max_sequence_length

    @property
    def max_logits_per_slot(self) -> int:
        """New tokens of a slot whose logits one enqueue returns; more than 1 for :meth:`score` and :meth:`verify`."""
        return self._runner.plan.max_logits_per_slot

    @property
    def statistics(self) -> SessionStatistics:
        """Times, tokens and bytes so far."""
        return self._batch.statistics

    def tokens(self, slot: int) -> tuple[int, ...]:
        """Return the tokens whose K and V an active slot holds.

        Raises
        ------
        SlotError
            The slot is not active.
        """
        return tuple(self._batch[self._slot(slot)].tokens)

    def pending_tokens(self, slot: int) -> tuple[int, ...]:
        """Return the tokens that were generated for an active slot but are not in the cache yet: usually the last one.

        Raises
        ------
        SlotError
            The slot is not active.
        """
        return self._batch[self._slot(slot)].pending

    def record(self) -> Timeline:
        """Record from now on what the slots do in :meth:`step`, and in :meth:`generate` of more prompts than there are slots.

        Returns
        -------
        Timeline
            The recording, readable at any time; ``plot`` draws it. As a context manager it records until the end of the block. An
            earlier recording of this session ends.

        Raises
        ------
        ClosedError
            The session is closed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     with session.record() as timeline:
        ...         _ = session.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True)
        ...         while session.step():
        ...             pass
        >>> [(span.slot, span.request, span.activity) for span in timeline.spans]
        [(0, 0, 'prefill'), (0, 0, 'decode')]
        """
        self._check_open()
        self._queue.timeline = Timeline()
        return self._queue.timeline

    def plot(self, path: str | os.PathLike[str] | None = None, *, title: str = "KV cache") -> Plot:
        """Draw the cache: per slot the tokens that were reused, are live and are free; per layer its bytes.

        Parameters
        ----------
        path : path, optional
            Save the picture there too: a name that ends with ``.svg``, ``.png`` or ``.pdf``.
        title : str
            The title.

        Returns
        -------
        Plot
            The picture, which a notebook shows.

        Raises
        ------
        ClosedError
            The session is closed.
        ModuleNotFoundError
            matplotlib is not installed.
        ConfigError, OSError
            The file cannot be written, or its name has another ending.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     _ = session.prefill([[5, 6, 7]])
        ...     plot = session.plot()
        >>> "in 1 of 1 slots" in plot.svg
        True
        """
        self._check_open()
        plot = draw_cache(self.cache_config, self._cache.lengths.upper_bounds, self._batch.reused, title=title)
        if path is not None:
            plot.save(expanded(path))
        return plot

    # --- rows in place of tokens ---

    @exclusive
    def add_embeddings(self, rows: npt.ArrayLike) -> tuple[int, ...]:
        """Store rows that prompts may have in place of rows of the embedding, and return their token ids.

        Parameters
        ----------
        rows : array_like float ``[n, hidden_size]``
            On the host, such as the features of an image that a vision tower made. They are rounded to the dtype of the engine, and are
            not multiplied by the embedding multiplier of a model.

        Returns
        -------
        tuple of int (n,)
            Ids from ``vocab_size`` on, for prompts of :meth:`prefill`, :meth:`append`, :meth:`generate` and :meth:`submit`. Rows that are
            equal after rounding have one id, so that prefix caching finds them again.

        Raises
        ------
        ConfigError
            The session was opened without ``max_embeddings``. Or the model needs more for images than rows, such as positions of three
            axes. Or rows are not finite.
        CapacityError
            There are more than ``max_embeddings`` different rows.
        ShapeError, DTypeError, ClosedError
            Nothing was changed.

        Notes
        -----
        The ids are of this session alone: its sequences with rows cannot be saved as snapshots. Logits processors get these ids among the
        tokens of the prompt, and so do drafters of the caller; penalties leave them out. Prompt lookup matches no rows, and draft models
        and heads read another token in their places.

        Examples
        --------
        >>> import numpy as np
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_embeddings=8) as session:
        ...     rows = session.add_embeddings(np.ones((2, session.model.hidden_size)))
        ...     logits = session.prefill([[5, *rows, 6]])
        ...     rows, session.tokens(0)
        ((320, 320), (5, 320, 320, 6))
        """
        self._check_open()
        stored = self._embeddings
        if stored is None or self._model is None:
            raise ConfigError("add_embeddings: expected a session that was opened with max_embeddings, got another.")
        needed = FAMILIES[self._model.family].images_need
        if needed:
            raise ConfigError(f"add_embeddings: expected a model whose images are rows alone, got {self._model.family}: it needs {needed}.")
        return stored.add(finite_rows("rows", rows, *stored.table.shape[1:], dtype=stored.table.dtype), stream=self._runner.stream)

    @property
    def _embeddings(self) -> EmbeddingRows | None:
        found: EmbeddingRows | None = getattr(self._engine, "embeddings", None)
        return found

    @property
    def _end(self) -> int | None:
        """First token id without a meaning in a prompt; None without rows."""
        return None if self._embeddings is None else self._embeddings.end

    # --- prefill and decode ---

    @exclusive
    def prefill(
        self, prompts: Sequence[AnyPrompt], *, reuse: bool = False, adapter: str | Sequence[str | None] | None = None
    ) -> np.ndarray[Any, Any]:
        """Start new sequences and run their prompts.

        Parameters
        ----------
        prompts : sequence of prompts (n,)
            Token ids or text, ``1 <= n <= B``. Their lengths may differ.
        reuse : bool
            Keep what slot i already holds of prompt i, compared token by token; at least one token is run. Needs as many prompts as
            there are active slots.
        adapter : str, or sequence of str or None (n,), optional
            Name of the adapter of all sequences, or one for each: see :meth:`generate`.

        Returns
        -------
        ndarray float32 ``[n, vocab]``
            On the host: the logits at the last token of each prompt.

        Raises
        ------
        CapacityError
            A prompt is longer than ``max_sequence_length``. Nothing was changed.
        RangeError, ShapeError, ConfigError, BindingError, ClosedError
            Nothing was changed.

        Notes
        -----
        If an enqueue fails, the slots hold the tokens of the enqueues before it: continue with ``reuse=True``.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
        ...     logits = session.prefill([[5, 6, 7], [8]])
        ...     logits.shape, session.tokens(0), session.tokens(1)
        ((2, 320), (5, 6, 7), (8,))
        """
        self._check_open()
        rows = self._prompts.rows(prompts, end=self._end)
        adapters = self._adapters_of(adapter, len(rows))
        self._batch.check_prompts(rows)
        return self._batch.start(rows, adapters, reuse=reuse)

    @exclusive
    def append(self, turns: Sequence[Prompt]) -> np.ndarray[Any, Any]:
        """Add tokens to the active sequences, after those that ``generate`` left pending.

        Parameters
        ----------
        turns : sequence of prompts (A,)
            One per active slot; empty for a slot that gets nothing. Text is encoded without the special tokens that begin a text.

        Returns
        -------
        ndarray float32 ``[A, vocab]``
            On the host: the logits at the last new token of each slot; NaN for a slot that got nothing.

        Raises
        ------
        CapacityError
            A sequence would exceed ``max_sequence_length``. Nothing was changed.
        RangeError, ShapeError, ConfigError, BindingError, ClosedError
            Nothing was changed.
        LayoutError
            A slot cannot be reached, because one before it is full and no view between them is aligned. Nothing was changed.

        Notes
        -----
        If an enqueue fails, lengths and tokens are as before the call.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
        ...     _ = session.prefill([[5, 6, 7], [8]])
        ...     logits = session.append([[9, 10], []])
        ...     session.tokens(0), session.tokens(1), bool((logits[1] != logits[1]).all())
        ((5, 6, 7, 9, 10), (8,), True)
        """
        self._check_open()
        return self._batch.append(self._prompts.rows(turns, add_special_tokens=False, end=self._end))

    @exclusive
    def decode(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Run one token for every active sequence.

        Parameters
        ----------
        tokens : sequence of int (A,)
            They replace pending tokens.

        Returns
        -------
        ndarray float32 ``[A, vocab]``
            On the host; a new array.

        Raises
        ------
        CapacityError
            A sequence is at ``max_sequence_length``. Nothing was changed.
        RangeError, ShapeError, ClosedError
            Nothing was changed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     logits = session.prefill([[5, 6, 7]])
        ...     logits = session.decode([int(logits[0].argmax())])
        ...     logits.shape, len(session.tokens(0))
        ((1, 320), 4)
        """
        self._check_open()
        row = self._prompts.tokens("tokens", tokens)
        if not len(self._batch):
            raise ShapeError("tokens: there are no active slots. Call prefill first.")
        return np.array(self._batch.decode(row))

    @exclusive
    def verify(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None) -> np.ndarray[Any, Any]:
        """Run several tokens of every active sequence in one enqueue, and return the logits of all of them.

        This is the verification step of speculative decoding: run the token that was chosen last and a draft of the next tokens, compare
        the draft with the tokens that the logits choose, and :meth:`accept` the tokens that agree. A draft may be a tree, in which several
        tokens are proposed for a position.

        Parameters
        ----------
        tokens : sequence of sequence of int (A,)
            For each active slot the token that was chosen last and a draft, which may be empty. An empty row for a slot that is idle.
        parents : sequence of sequence of int (A,), optional
            For trees: for each token the index in its row of the token that it follows, -1 for the first one. A parent comes before its
            children, and a tree has at most 64 tokens. The logits after a token are those after its ancestors and itself. If left out, each
            token follows the one before it.

        Returns
        -------
        ndarray float32 ``[A, m, vocab]``
            On the host, a new array; m is the length of the longest row. ``[slot, i]`` are the logits after ``tokens[slot][i]``; NaN where
            a row has ended.

        Raises
        ------
        ConfigError
            The engine returns the logits of fewer tokens per slot, or takes no trees: a TensorRT engine that was built without
            ``draft_tree``, or an engine of a model with recurrent states. Nothing was changed.
        CapacityError, RangeError, ShapeError, LayoutError, BindingError, ClosedError
            Nothing was changed.

        Notes
        -----
        The tokens do not belong to the sequences until :meth:`accept`. If it is not called, or if an enqueue fails, the sequences are
        unchanged: :meth:`verify` or :meth:`decode` can be called again.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     token = int(session.prefill([[5, 6, 7]])[0].argmax())
        ...     row = [token, 8, 9]
        ...     chosen = session.verify([row])[0].argmax(axis=-1)
        ...     agree = [int(one) for one in chosen[:-1]] == row[1:]
        ...     session.accept([3 if agree else 1])
        ...     agree, session.tokens(0) == (5, 6, 7, token)
        (False, True)

        A tree: 9 and 10 are proposed after 8, and 11 after 10.

        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     _ = session.prefill([[5, 6, 7]])
        ...     logits = session.verify([[8, 9, 10, 11]], parents=[[-1, 0, 0, 2]])
        ...     session.accept(paths=[[0, 2, 3]])
        ...     logits.shape, session.tokens(0)
        ((1, 4, 320), (5, 6, 7, 8, 10, 11))
        """
        self._check_open()
        rows = [self._prompts.tokens(f"tokens[{slot}]", row) for slot, row in enumerate(as_sequence("tokens", tokens))]
        if not any(rows):
            raise ShapeError("tokens: expected at least one token of an active slot, got none.")
        trees = None if parents is None else checked_parents(parents, rows)
        if trees is not None and not self._runner.takes_trees:
            if self._runner.has_states:
                raise ConfigError("parents: expected chains with a model with recurrent states, got a tree. Leave parents out.")
            name = type(self._engine).__name__
            raise ConfigError(f"parents: expected chains with a {name} built without draft_tree, got a tree. Leave parents out.")
        self._check_logits_per_slot("verify", max(map(len, rows)))
        return self._batch.verify(rows, trees)

    @exclusive
    def accept(self, counts: Sequence[int] | None = None, *, paths: Sequence[Sequence[int]] | None = None) -> None:
        """Keep tokens that the last :meth:`verify` has run of each sequence. The others are dropped.

        Parameters
        ----------
        counts : sequence of int (A,), optional
            Number of first tokens of each row to keep, from 0 to all: the token that was chosen before, and the tokens of the draft that
            agree. They replace pending tokens.
        paths : sequence of sequence of int (A,), optional
            Instead of ``counts``, for trees: indices of the tokens of each row to keep, from 0, the root, to a child, a child of it, and so
            on; empty to keep none.

        Raises
        ------
        RangeError
            A count is out of range, or indices are no path; both or neither are given; or another call has changed the sequences since
            :meth:`verify`. Nothing was changed.
        ShapeError, ClosedError
            Nothing was changed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     _ = session.prefill([[5, 6, 7]])
        ...     _ = session.verify([[8, 9, 10]])
        ...     session.accept([2])
        ...     session.tokens(0)
        (5, 6, 7, 8, 9)
        """
        self._check_open()
        if paths is None and counts is not None:
            self._batch.accept(counts)
        elif counts is None and paths is not None:
            self._batch.accept_paths(paths)
        else:
            raise RangeError(f"accept: expected counts or paths, got {'neither' if counts is None else 'both'}.")

    @exclusive
    def rewind(self, slot: int, length: int) -> None:
        """Shorten an active sequence to its first tokens. Pending tokens are dropped.

        Parameters
        ----------
        slot : int
            An active slot.
        length : int
            Tokens to keep, at most as many as the slot holds. A model with states keeps all of them or none.

        Raises
        ------
        SlotError, RangeError, ClosedError
            Nothing was changed.
        ConfigError
            The model has states, which cannot go back to an earlier token. Nothing was changed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     _ = session.prefill([[5, 6, 7]])
        ...     session.rewind(0, 1)
        ...     session.tokens(0)
        (5,)
        """
        self._check_open()
        self._batch.rewind(slot, length)

    # --- score ---

    @exclusive
    def score(self, prompts: AnyPrompt | Sequence[AnyPrompt], *, top_logprobs: int = 0, adapter: str | None = None) -> list[PromptScore]:
        """Return the log-probability of each token of texts, given the tokens before it.

        Parameters
        ----------
        prompts : prompt, or sequence of prompts (n,)
            Token ids, text, or a :class:`ChatPrompt`; any number, of any lengths up to ``max_sequence_length``.
        top_logprobs : int
            Number of most likely tokens to report at each position; 0 for none.
        adapter : str, optional
            Name of the adapter, one of :attr:`adapters`; the base model if left out.

        Returns
        -------
        list of PromptScore (n,)
            In the order of the prompts: token ids and their log-probabilities, None for the first token of each. :func:`perplexity` makes
            one number of them.

        Raises
        ------
        ConfigError
            An engine of TensorRT was built for the logits of one new token per slot; the message names the option. Nothing was changed.
        CapacityError, RangeError, ShapeError, BindingError, ClosedError
            Nothing was changed.
        EngineError
            The engine failed, or its logits are NaN. No slot is active.

        Notes
        -----
        The texts are prefilled, in chunks of up to ``max_logits_per_slot`` tokens. As with :meth:`prefill`, they take the place of the
        active sequences; afterwards no slot is active. The prompt cache is neither read, as it holds no logits, nor written.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     [score] = session.score("Alice was beginning to get very tired.", top_logprobs=1)
        >>> score.logprobs[0], round(score.logprobs[1], 1), round(score.perplexity)
        (None, -4.9, 5)
        """
        self._check_open()
        count = int_in_range("top_logprobs", top_logprobs, 0)
        self._check_logits_per_slot("score", 2)
        name = self._known_adapter(adapter)
        rows = self._prompts.rows(as_prompts(prompts))
        self._batch.check_prompts(rows, queued=True)
        return score_prompts(self._batch, rows, name, slots=self._cache.max_batch_size, top_logprobs=count)

    def _chosen_drafter(self, draft: DraftChoice | None) -> Drafter | None:
        """Return the drafter of a choice; that of the session if there is none."""
        if draft is None:
            return self._drafter
        if draft == "off":
            return None
        if draft == "mtp":
            if not (isinstance(self._drafter, HeadDrafter) and self._drafter.is_mtp):
                raise ConfigError("draft: expected 'mtp' in a session that was opened with draft='mtp', got it in another.")
            return self._drafter
        if draft != "ngram" and not isinstance(draft, Drafter):
            raise ConfigError(f"draft: expected 'ngram', 'mtp', 'off' or an object with a method propose, got {draft!r}.")
        self._check_logits_per_slot("draft", 2)
        return NgramDrafter() if draft == "ngram" else draft

    def _check_logits_per_slot(self, what: str, count: int) -> None:
        known = self.max_logits_per_slot
        if count > known:
            raise ConfigError(
                f"{what}: expected an engine with the logits of {count} new tokens per slot or more, got one with those of {known}. "
                "Build it with max_logits_per_slot (trt-kvcache build --max-logits-per-slot all), or open a model folder with it. "
                "The NumPy and PyTorch engines have up to 64, but not more than max_prefill_length."
            )

    # --- generate ---

    @exclusive
    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        append: bool = False,
        reuse: bool = False,
        draft: DraftChoice | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Continue prompts, token by token.

        Parameters
        ----------
        prompts : prompt, or sequence of prompts (n,)
            Token ids, text, or a :class:`ChatPrompt`.
        params : SamplingParams, or sequence of SamplingParams (n,), optional
            For all prompts, or one for each. Not together with ``options``.
        append : bool
            The prompts are next turns of the active sequences, one for each.
        reuse : bool
            Keep what slot i already holds of prompt i.
        draft : "ngram", "mtp", "off" or Drafter, optional
            Speculative decoding. A draft proposes the next tokens, and one enqueue verifies them: the tokens are those without drafts, and
            come faster where a draft is right. ``"ngram"`` looks the last tokens up in the prompt and in what was generated (prompt
            lookup): for texts that repeat parts of the prompt. ``"mtp"`` is for a session that was opened with it. If left out, the
            drafter of the session, such as a draft model.
        adapter : str, or sequence of str or None (n,), optional
            Name of the adapter of all prompts, or one for each: of :attr:`adapters`, or None for the base model. With ``append``, each
            sequence keeps the adapter with which it began.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        TokenStream
            ``text`` (for several prompts ``texts``) is the whole generated text. The stream is also an iterator of :class:`GeneratedToken`:
            one per prompt and step, until each prompt has a ``finish_reason``. A sequence at ``max_sequence_length`` ends with ``"length"``
            while the others continue. Arguments are checked at once; steps run as the iterator is read. You can stop reading at any token:
            the returned tokens are then in the cache or pending. After another call has changed the sequences, reading on raises
            :class:`ClosedError`.

            If there are more prompts than slots, prompts get slots in their order, as soon as one is free, as with :meth:`submit`. Tokens
            still come step by step, within a step in the order of the prompts; ``index`` is the number of the prompt. No slot is active at
            the end.

        Raises
        ------
        CapacityError, RangeError, ShapeError, ConfigError, ClosedError
            Nothing was changed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     first = [token.token for token in session.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)]
        ...     again = [token.token for token in session.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)]
        ...     first == again, session.pending_tokens(0) == tuple(first[-1:])
        (True, True)
        """
        self._check_open()
        if append and reuse:
            raise RangeError("generate: expected append or reuse, got both. A next turn keeps what its slot holds.")
        rows = self._prompts.rows(as_prompts(prompts), add_special_tokens=not append, end=self._end)
        per_request = params_for(len(rows), self._defaults, params, options)
        adapters = self._adapters_of(adapter, len(rows))
        if append:
            self._batch.check_turns(rows)
            if adapter is not None:
                raise ConfigError(f"adapter: expected none with append, as each sequence keeps its own, got {adapter!r}.")
            adapters = [slot.adapter for slot in self._runner.slots]
        else:
            self._batch.check_prompts(rows, reuse=reuse, queued=not reuse)
        requests = self._requests(rows, per_request, adapters, draft=draft)
        if not append and len(rows) > self._cache.max_batch_size:
            queue = RequestQueue(self._runner, self._batch, self._decode_steps, prefill_chunk=self._prefill_chunk)
            queue.timeline = self._queue.timeline
            return TokenStream(requests, generate_queued(self._runner, queue, requests, check_open=self._check_open), user=self._user)
        return self._generate(requests, lambda: self._batch.append(rows) if append else self._batch.start(rows, adapters, reuse=reuse))

    @exclusive
    def complete(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        append: bool = False,
        reuse: bool = False,
        draft: DraftChoice | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[str]:
        """Continue prompts, and return the texts once all are there.

        Parameters
        ----------
        prompts : prompt, or sequence of prompts (n,)
            As for :meth:`generate`.
        params : SamplingParams, or sequence of SamplingParams (n,), optional
            Not together with ``options``.
        append, reuse : bool
            ``append``: the prompts are next turns. ``reuse``: keep the tokens of each prompt that its slot already holds.
        draft : "ngram", "mtp", "off" or Drafter, optional
            Speculative decoding.
        adapter : str, or sequence of str or None (n,), optional
            Name of the adapter of all prompts, or one for each.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        list of str (n,)
            In the order of the prompts, without the prompts; a list of one for one prompt.

        Raises
        ------
        ConfigError
            The model has no tokenizer. Nothing was changed.
        CapacityError, RangeError, ShapeError, ClosedError
            Nothing was changed.
        EngineError, CudaError, ProcessorError
            A step failed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
        ...     session.complete(["Alice was", "Down the"], max_new_tokens=4)
        [' beginn', ' Rabbit-Hole']
        """
        return self.generate(prompts, params, append=append, reuse=reuse, draft=draft, adapter=adapter, **options).texts

    @exclusive
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        draft: DraftChoice | None = None,
        adapter: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Answer a conversation. Tokens that slot 0 already holds from the last answer do not run again.

        Parameters
        ----------
        messages : str, or sequence of mapping
            A text is one message of the user. A conversation is a sequence of ``{"role": ..., "content": ...}``, oldest first, in the
            format of OpenAI's API: see :class:`ChatPrompt`.
        params : SamplingParams, optional
            Not together with ``options``.
        tools : sequence of mapping, optional
            Descriptions of the functions that the model may call, in the format of OpenAI's API.
        template_args : mapping of str to object, optional
            Further variables of the chat template, such as ``{"enable_thinking": False}``.
        draft : "ngram", "mtp", "off" or Drafter, optional
            Speculative decoding, as for :meth:`generate`.
        adapter : str, optional
            Name of the adapter, one of :attr:`adapters`; the base model if left out.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        TokenStream
            As of :meth:`generate`.

        Raises
        ------
        ConfigError
            The model has no tokenizer or no chat template (:attr:`has_chat_template`), or the template refuses the messages.
        CapacityError, RangeError, ShapeError, ClosedError
            Nothing was changed.

        Notes
        -----
        For several conversations at once, or in a queue, pass a :class:`ChatPrompt` for each to :meth:`generate` or :meth:`submit`.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     session.chat("Hello").text  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        trt_kvcache.errors.ConfigError: prompts[0]: expected a model with a chat template for a conversation, got one without...
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = ChatPrompt(messages, tools, {} if template_args is None else template_args)
        return self.generate(prompt, params, reuse=len(self._batch) == 1, draft=draft, adapter=adapter, **options)

    def _generate(self, requests: list[Request], prefill: Callable[[], np.ndarray[Any, Any]]) -> TokenStream:
        if _LOGGER.isEnabledFor(logging.INFO):
            for request in requests:
                seed = f", seed {request.sampler[0]}" if request.sampled else ""
                _LOGGER.info("prompt %d: %d tokens%s", request.index, len(request.prompt), seed)
        tokens = generate_tokens(self._runner, self._batch, self._decode_steps, requests, prefill, check_open=self._check_open)
        return TokenStream(requests, tokens, user=self._user)

    def _requests(
        self,
        rows: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        adapters: Sequence[str | None],
        *,
        draft: DraftChoice | None,
        generated: Sequence[int] | None = None,
    ) -> list[Request]:
        for one in params:
            one.check_vocabulary(self.vocab_size)
        counts = [0] * len(rows) if generated is None else generated
        drafter = self._chosen_drafter(draft)
        return [
            Request(
                index,
                row,
                one,
                tokenizer=self._tokenizer,
                eos_token_ids=self._eos_token_ids,
                generated=count,
                drafting=None if drafter is None else Drafting(drafter),
                adapter=adapter,
            )
            for index, (row, one, adapter, count) in enumerate(zip(rows, params, adapters, counts, strict=True))
        ]

    # --- serving a queue ---

    @exclusive
    def submit(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        *,
        prompt_logprobs: int | None = None,
        client: str = "",
        draft: DraftChoice | None = None,
        adapter: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> RequestHandle:
        """Put a prompt in the queue, to be continued by :meth:`step` as soon as a slot is free.

        Parameters
        ----------
        prompt : prompt
            Token ids, text, or a :class:`ChatPrompt`.
        params : SamplingParams, optional
            Not together with ``options``.
        prompt_logprobs : int, optional
            Score the prompt too, as :meth:`score` does, with this number of most likely tokens at each position: ``prompt_score`` of the
            handle. The engine must return the logits of several tokens per slot, and the prompt cache is not read.
        client : str
            Name of the client. A free slot goes to the client with the fewest slots. Requests of one client are first in, first out.
        draft : "ngram", "mtp", "off" or Drafter, optional
            Speculative decoding, as for :meth:`generate`.
        adapter : str, optional
            Name of the adapter, one of :attr:`adapters`; the base model if left out.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        RequestHandle
            With ``tokens``, ``text``, ``finish_reason`` and ``cancel()``.

        Raises
        ------
        CapacityError, RangeError, ShapeError, ConfigError, BindingError, ClosedError
            Nothing was changed.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
        ...     handles = [session.submit([token], max_new_tokens=2, ignore_eos=True) for token in (5, 6, 7)]
        ...     while session.step():
        ...         pass
        >>> [len(handle.tokens) for handle in handles]
        [2, 2, 2]
        """
        self._check_open()
        if prompt_logprobs is not None:
            int_in_range("prompt_logprobs", prompt_logprobs, 0)
            self._check_logits_per_slot("prompt_logprobs", 2)
        if not isinstance(client, str):
            raise ConfigError(f"client: expected a text, got {type(client).__name__}.")
        rows = self._prompts.rows([prompt], end=self._end if prompt_logprobs is None else None)
        self._batch.check_prompts(rows)
        adapters = [self._known_adapter(adapter)]
        [request] = self._requests(rows, params_for(1, self._defaults, params, options), adapters, draft=draft)
        return self._queue.submit(request, prompt_logprobs=prompt_logprobs, client=client)

    @property
    def running_requests(self) -> list[RequestHandle]:
        """The submitted requests that have a slot, by slot. Those that have ended leave it in the next :meth:`step`."""
        return self._queue.running

    @property
    def num_waiting_requests(self) -> int:
        """Number of submitted requests that wait for a slot."""
        return self._queue.scheduler.num_waiting

    @property
    def num_waiting_clients(self) -> int:
        """Number of clients with requests that wait for their first slot."""
        return self._queue.scheduler.waiting.num_clients

    @exclusive
    def step(self) -> list[RequestHandle]:
        """Advance the submitted requests: new prompts by one chunk, all others together, by one token or their drafts.

        If some requests decode, only the oldest prompt runs with them, and prompts in the slots after it if they fit: at most
        ``prefill_chunk`` tokens together (chunked prefill). The other prompts wait.

        Before that, compaction frees the slots of requests that have ended, and the next requests in the queue get the free slots. The
        tokens of a request do not depend on other requests: they equal those of :meth:`generate`.

        Returns
        -------
        list of RequestHandle
            Requests that have advanced or wait for a logits processor, in the order of their submission; empty if all have ended.

        Raises
        ------
        EngineError, CudaError, RangeError, ClosedError
            Requests and queue are as before the step, which can be repeated.

        Notes
        -----
        The slots belong to the requests. After another call has changed the sequences, requests that had begun are run again from
        their prompt and tokens.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     handle = session.submit([5, 6, 7], max_new_tokens=1)
        ...     session.step() == [handle], handle.state, session.step()
        (True, 'finished', [])
        """
        self._check_open()
        return self._queue.step()

    # --- snapshots ---

    @exclusive
    def save_snapshot(self, path: str | os.PathLike[str], slot: int = 0) -> Snapshot:
        """Write an active sequence to a file, with its pending tokens and the state of its sampler. Waits for the device.

        Parameters
        ----------
        path : path
            An existing file is replaced. The file appears complete or not at all.
        slot : int
            An active slot.

        Returns
        -------
        Snapshot
            The written snapshot.

        Raises
        ------
        ConfigError
            The session was made without ``identity``.
        SlotError, RangeError, CapacityError, ClosedError, OSError
            Nothing was changed.

        Notes
        -----
        A request of the queue that is still prefilling is saved with the tokens that have run so far: the rest of its prompt is
        not in the file.

        Examples
        --------
        >>> import os, tempfile
        >>> from trt_kvcache import InferenceSession
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "saved.safetensors")
        ...     with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...         _ = list(session.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True))
        ...         snapshot = session.save_snapshot(path)
        ...         held = session.tokens(0)
        ...     with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as other:
        ...         _ = other.load_snapshots(path)
        ...         other.tokens(0) == held == snapshot.tokens
        True
        """
        model = self._known_identity()
        self._runner.checked_lengths()
        state = self._batch[self._slot(slot)]
        if max((*state.tokens, *state.pending), default=0) >= self.vocab_size:
            raise ConfigError(f"slot {slot}: expected a sequence of tokens alone for a snapshot, got one with embeddings.")
        snapshot = Snapshot.of_slot(
            self._cache,
            slot,
            tokens=state.tokens,
            pending=state.pending,
            model=model if state.adapter is None else replace(model, adapter=self._hashes[state.adapter]),
            sampler=None
            if state.sampler is None
            else SamplerState(seed=state.sampler[0], counter=state.sampler[1], generated=state.generated),
            stream=self._runner.stream,
        )
        snapshot.write(expanded(path))
        return snapshot

    @exclusive
    def load_snapshots(self, paths: Paths) -> list[Snapshot]:
        """Start new sequences from files, one each. Continue with ``append``, ``decode`` or ``generate(..., append=True)``.

        Parameters
        ----------
        paths : path, or sequence of paths (n,)
            ``1 <= n <= B``.

        Returns
        -------
        list of Snapshot (n,)
            The snapshots that were read.

        Raises
        ------
        SnapshotError
            Damaged, foreign or newer files. Nothing was changed.
        ShapeError, CapacityError, ConfigError, ClosedError
            Nothing was changed.
        """
        adapters = self._adapters_by_hash
        snapshots = read_snapshots(paths, self._cache, self._known_identity(), adapters)
        self._batch.load(snapshots, [None if one.model.adapter is None else adapters[one.model.adapter] for one in snapshots])
        return snapshots

    @exclusive
    def resume(
        self,
        paths: Paths,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft: DraftChoice | None = None,
        **options: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Start new sequences from files and continue them, each with its own seed and counter unless a seed is given.

        Parameters
        ----------
        paths : path, or sequence of paths (n,)
            Of :meth:`save_snapshot`; ``1 <= n <= B``.
        params : SamplingParams, or sequence of SamplingParams (n,), optional
            As for :meth:`generate`. ``max_new_tokens`` counts from here. Snapshots do not carry sampling options.
        draft : "ngram", "mtp", "off" or Drafter, optional
            Speculative decoding, as for :meth:`generate`.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        TokenStream
            As :meth:`generate`: the tokens that would have come next. Files are read before it is returned.

        Raises
        ------
        SnapshotError, ShapeError, CapacityError, RangeError, ConfigError, ClosedError
            Nothing was changed.

        Examples
        --------
        >>> import os, tempfile
        >>> from trt_kvcache import InferenceSession
        >>> options = {"temperature": 1.0, "ignore_eos": True}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "saved.safetensors")
        ...     with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...         whole = [token.token for token in session.generate([5, 6, 7], max_new_tokens=4, seed=7, **options)]
        ...         _ = list(session.generate([5, 6, 7], max_new_tokens=2, seed=7, **options))
        ...         _ = session.save_snapshot(path)
        ...         resumed = [token.token for token in session.resume(path, max_new_tokens=2, **options)]
        >>> whole[2:] == resumed
        True
        """
        adapters = self._adapters_by_hash
        snapshots = read_snapshots(paths, self._cache, self._known_identity(), adapters)
        per_request = [
            resumed_params(*pair) for pair in zip(params_for(len(snapshots), self._defaults, params, options), snapshots, strict=True)
        ]
        kept, rows = zip(*map(next_tokens, snapshots), strict=True)
        self._batch.check_room(kept, rows)
        generated = [0 if one.sampler is None else one.sampler.generated for one in snapshots]
        own = [None if one.model.adapter is None else adapters[one.model.adapter] for one in snapshots]
        requests = self._requests([[*one.tokens, *one.pending] for one in snapshots], per_request, own, draft=draft, generated=generated)
        plan = StepPlan.of(rows)
        chunks = self._runner.chunks(kept, plan)
        return self._generate(requests, lambda: self._batch.resume(snapshots, own, kept, plan, chunks))

    def _known_identity(self) -> ModelIdentity:
        self._check_open()
        if self._identity is None:
            raise ConfigError(
                "snapshots: expected a session that knows its model, got one without identity. Pass identity= when the session is made."
            )
        return self._identity()

    # --- adapters ---

    @property
    def _slot_adapters(self) -> SlotAdapters | None:
        found: SlotAdapters | None = getattr(self._engine, "slot_adapters", None)
        return found

    @property
    def _hashes(self) -> Mapping[str, str]:
        """Hashes of the adapters by name."""
        known = self._slot_adapters
        return {} if known is None else known.fingerprints

    @property
    def _adapters_by_hash(self) -> dict[str, str]:
        return {one: name for name, one in self._hashes.items()}

    def _known_adapter(self, name: str | None) -> str | None:
        """Return the name of an adapter of the session, or None for the base model."""
        if name is not None and (not isinstance(name, str) or name not in self.adapters):
            expected = f"one of {', '.join(self.adapters)}, or None" if self.adapters else "None, as the session has no adapters"
            raise ConfigError(f"adapter: expected {expected}, got {name!r}. Open the session with it (adapters=).")
        return name

    def _adapters_of(self, adapter: str | Sequence[str | None] | None, count: int) -> list[str | None]:
        """Return the adapter of each of ``count`` prompts."""
        if adapter is None or isinstance(adapter, str):
            return [self._known_adapter(adapter)] * count
        if not isinstance(adapter, Sequence) or len(adapter) != count:
            raise ShapeError(f"adapter: expected a name, None, or one of these for each of {count} prompts, got {adapter!r}.")
        return [self._known_adapter(name) for name in adapter]

    # --- checks ---

    def _slot(self, slot: int) -> int:
        return slot_index(slot, len(self._batch), of="active slots")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this InferenceSession is closed.")

    # --- life ---

    @exclusive
    def close(self) -> None:
        """Wait for the device, then close engine and cache. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # from the last to the first, each even if one before it raised
            if self._on_close is not None:
                stack.callback(self._on_close)
            closed_first = (self._decode_steps.close, self._runner.close, self._engine.close, self._runner.synchronize)
            for close in (self._cache.close, self._prompt_cache.close, *closed_first):
                stack.callback(close)

    def __enter__(self) -> InferenceSession:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
