"""``InferenceSession``: prefill, decode and generate on a KV cache, with any engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache._util.checks import slot_index
from trt_kvcache.builder.build_engine import Progress
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.plot import draw_cache
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine
from trt_kvcache.errors import ClosedError, ConfigError, RangeError, ShapeError
from trt_kvcache.generation.prompts import Prompt, PromptReader, as_prompts
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.generation.sampler_state import SamplerState
from trt_kvcache.generation.sampling import SamplingParams, params_for
from trt_kvcache.generation.token_ids import common_prefix
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.session import open_model
from trt_kvcache.session.batch import ActiveSequences
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.generate_tokens import generate_tokens
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.request_queue import RequestQueue
from trt_kvcache.session.resume_snapshots import Paths, next_tokens, read_snapshots, resumed_params
from trt_kvcache.session.slot_checks import SlotChecks
from trt_kvcache.session.statistics import SessionStatistics
from trt_kvcache.session.step_executor import StepExecutor


class InferenceSession:
    """Sequences being generated together on one cache and one engine. Not thread-safe.

    Parameters
    ----------
    engine : Engine
        Closed with the session.
    cache : KVCacheManager or LinearKVCache
        In the engine's memory and layout. Closed with the session; its lengths are the session's to change.
    names : TensorNames
        What the engine calls its tensors.
    tokenizer : Tokenizer, optional
        Without one, everything works on token ids.
    eos_token_ids : sequence of int
        Tokens that end a request.
    defaults : SamplingParams
        What ``generate`` uses where nothing else is said.
    prompt_cache : PromptCache, optional
        Over ``cache``: prompts that begin like earlier ones are not run from their start. Closed with the session.
    identity : callable, optional
        Returns the :class:`~trt_kvcache.sequences.model_identity.ModelIdentity` that snapshots carry. Without one there are none.
    on_close : callable, optional
        Called once by ``close``, after engine and cache are closed.

    Raises
    ------
    BindingError, LayoutError, PlaceError
        Engine and cache do not fit: see :class:`~trt_kvcache.engine.bindings.BindingPlan`.

    Notes
    -----
    If a step fails or is interrupted, lengths and tokens are as before that step, and it can be repeated.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KVCacheBase,
        *,
        names: TensorNames = DEFAULT_NAMES,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        defaults: SamplingParams | None = None,
        prompt_cache: PromptCache | None = None,
        identity: Callable[[], ModelIdentity] | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self._steps = StepExecutor(engine, cache, names=names)
        self._engine = engine
        self._cache = cache
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._defaults = SamplingParams() if defaults is None else defaults
        self._on_close = on_close
        self._closed = False
        self._prompt_cache = PromptCache(cache) if prompt_cache is None else prompt_cache
        if self._prompt_cache.cache is not cache:
            raise ConfigError("prompt_cache: expected one over the cache of this session, got one over another.")
        self._identity = identity
        self._sequences = ActiveSequences(self._steps, self._prompt_cache)
        self._checks = SlotChecks(self._sequences, cache)
        self._prompts = PromptReader(tokenizer, self._steps.plan.vocab_size)
        self._queue = RequestQueue(self._steps, self._sequences)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        engine: open_model.EngineChoice = "auto",
        flavour: str = "auto",
        device: int = 0,
        prompt_cache_bytes: int = 0,
        cuda_graphs: bool = True,
        progress: Progress | None = None,
    ) -> InferenceSession:
        """Open an engine folder.

        Parameters
        ----------
        folder : path
            Made by ``trt-kvcache build`` or :func:`trt_kvcache.build_engine`.
        engine : {"auto", "reference", "tensorrt"}
            ``"auto"`` takes TensorRT, or the NumPy reference engine with a warning that says why TensorRT cannot run here.
        flavour : {"auto", "tensorrt", "tensorrt_rtx"}
            Which TensorRT; ``"auto"`` is the one that built the engine.
        device : int
            CUDA device, where one is used.
        prompt_cache_bytes : int
            Most bytes of copies of earlier prompts, in the cache's memory: see :class:`~trt_kvcache.sequences.prompt_cache.PromptCache`.
        cuda_graphs : bool
            Whether decode steps of an engine in segments become CUDA graphs.
        progress : callable, optional
            Called as ``progress(stage, fraction)`` during long work.

        Raises
        ------
        ConfigError, CheckpointError, EngineError, CudaError
            The folder is damaged or newer, its checkpoint is gone or changed, or the engine cannot run.
        """
        parts = open_model.open_engine_folder(
            folder, engine=engine, flavour=flavour, device=device, keep_bytes=prompt_cache_bytes, cuda_graphs=cuda_graphs, progress=progress
        )
        return cls._of(parts, prompt_cache_bytes)

    @classmethod
    def from_model(
        cls,
        folder: str | Path,
        *,
        engine: open_model.EngineChoice = "auto",
        max_batch_size: int = 1,
        max_sequence_length: int | None = None,
        max_prefill_length: int | None = None,
        dtype: str | None = None,
        attention: str = "native",
        flavour: str = "auto",
        device: int = 0,
        prompt_cache_bytes: int = 0,
        cuda_graphs: bool = True,
        progress: Progress | None = None,
    ) -> InferenceSession:
        """Open a Hugging Face folder, without an engine folder.

        Parameters
        ----------
        folder : path
            ``config.json``, ``model.safetensors`` and, for text, ``tokenizer.json``.
        engine : {"auto", "reference", "tensorrt"}
            ``"tensorrt"`` builds an engine into a temporary folder first.
        max_batch_size, max_sequence_length, max_prefill_length : int, optional
            B, S (the model's ``max_position_embeddings``, at most 2048) and the widest prefill enqueue (S, at most 512).
        dtype : {"float16", "bfloat16", "float32"}, optional
            Of K, V and weights; the checkpoint's if left out.
        attention : {"native", "mask", "plugin"}
        flavour : {"auto", "tensorrt", "tensorrt_rtx"}
        device : int
        prompt_cache_bytes, cuda_graphs
            As for :meth:`open`.
        progress : callable, optional
            Called as ``progress(stage, fraction)`` during long work.

        Raises
        ------
        ConfigError, CheckpointError, BuildError, EngineError, CudaError
        """
        parts = open_model.open_model(
            folder,
            engine=engine,
            max_batch_size=max_batch_size,
            max_sequence_length=max_sequence_length,
            max_prefill_length=max_prefill_length,
            dtype=dtype,
            attention=attention,
            flavour=flavour,
            device=device,
            keep_bytes=prompt_cache_bytes,
            cuda_graphs=cuda_graphs,
            progress=progress,
        )
        return cls._of(parts, prompt_cache_bytes)

    @classmethod
    def _of(cls, parts: open_model.SessionParts, prompt_cache_bytes: int) -> InferenceSession:
        try:
            return cls(**parts.arguments(), prompt_cache=PromptCache(parts.cache, max_bytes=prompt_cache_bytes))
        except BaseException:
            parts.close()
            raise

    # --- what it is ---

    @property
    def cache(self) -> KVCacheBase:
        """The manager behind the session."""
        return self._cache

    @property
    def engine(self) -> Engine:
        """The engine behind the session."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._tokenizer

    @property
    def defaults(self) -> SamplingParams:
        """What ``generate`` uses where nothing else is said."""
        return self._defaults

    @property
    def prompt_cache(self) -> PromptCache:
        """Copies of earlier prompts, with counters of hits and misses; off unless bytes were given for it."""
        return self._prompt_cache

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._steps.plan.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens a slot can hold, S."""
        return self._sequences.max_sequence_length

    def tokens(self, slot: int) -> tuple[int, ...]:
        """Return the tokens whose K and V an active slot holds."""
        return tuple(self._sequences.cached[self._slot(slot)])

    def pending_tokens(self, slot: int) -> tuple[int, ...]:
        """Return the tokens that were generated for an active slot but are not in the cache yet: usually the last one."""
        return tuple(self._sequences.pending[self._slot(slot)])

    @property
    def statistics(self) -> SessionStatistics:
        """Times, tokens and bytes so far."""
        return self._sequences.statistics

    def plot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a picture of the cache, SVG: per slot the tokens that are reused, live and free; per layer its bytes.

        Parameters
        ----------
        path : path, optional
            Write it there too.

        Raises
        ------
        ClosedError, OSError
        """
        self._check_open()
        svg = draw_cache(self._cache.kv_config, self._cache.lengths.upper_bounds, self._sequences.reused)
        if path is not None:
            Path(path).write_text(svg, encoding="utf-8")
        return svg

    # --- prefill and decode ---

    def prefill(self, prompts: Sequence[Prompt], *, reuse: bool = False) -> np.ndarray[Any, Any]:
        """Start new sequences and run their prompts.

        Parameters
        ----------
        prompts : sequence of prompts (n,)
            Token ids or text, ``1 <= n <= B``; of different length as they come.
        reuse : bool
            Keep what slot i already holds of prompt i, token by token; at least one token is run. Needs as many prompts as
            there are active slots.

        Returns
        -------
        ndarray float32 ``[n, vocab]`` on the host
            The logits at each prompt's last token.

        Raises
        ------
        CapacityError
            A prompt is longer than ``max_sequence_length``. Nothing was changed.
        RangeError, ShapeError, ConfigError, BindingError, ClosedError
            Nothing was changed.

        Notes
        -----
        If an enqueue fails, the slots hold what the ones before it have run: go on with ``reuse=True``.
        """
        self._check_open()
        rows = self._prompts.rows(prompts)
        self._checks.new_sequences(rows, reuse=reuse)
        kept = [0] * len(rows)
        if reuse:
            kept = [common_prefix(row[:-1], held) for row, held in zip(rows, self._sequences.cached, strict=True)]
        found = {slot: match for slot, row in enumerate(rows) if (match := self._sequences.find(row)) and match.length > kept[slot]}
        reused = [found[slot].length if slot in found else count for slot, count in enumerate(kept)]
        new = [row[count:] for row, count in zip(rows, reused, strict=True)]
        chunks = self._steps.plan_prefill(reused, [len(row) for row in new])
        self._sequences.start(kept)
        self._sequences.restore(found)
        logits = self._sequences.prefill(new, chunks)
        self._sequences.remember(range(len(rows)))
        return logits

    def append(self, turns: Sequence[Prompt]) -> np.ndarray[Any, Any]:
        """Add tokens to the active sequences, after the ones that ``generate`` left pending.

        Parameters
        ----------
        turns : sequence of prompts (A,)
            One per active slot; empty for a slot that gets nothing. Text is encoded without the special tokens that begin a text.

        Returns
        -------
        ndarray float32 ``[A, vocab]`` on the host
            The logits at each slot's last new token; NaN for a slot that got nothing.

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
        """
        self._check_open()
        rows = self._prompts.rows(turns, add_special_tokens=False)
        self._checks.one_per_slot("turns", len(rows))
        rows = [self._sequences.pending[slot] + row if row else [] for slot, row in enumerate(rows)]
        lengths = self._sequences.lengths
        self._checks.room(lengths, rows)
        chunks = self._steps.plan_prefill(lengths, [len(row) for row in rows])
        return self._sequences.append(rows, chunks)

    def decode(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Run one token for every active sequence.

        Parameters
        ----------
        tokens : sequence of int (A,)
            They take the place of pending ones.

        Returns
        -------
        ndarray float32 ``[A, vocab]`` on the host

        Raises
        ------
        CapacityError
            A sequence is at ``max_sequence_length``. Nothing was changed.
        RangeError, ShapeError, ClosedError
            Nothing was changed.
        """
        self._check_open()
        row = self._prompts.tokens("tokens", tokens)
        if not self._sequences.cached:
            raise ShapeError("tokens: there are no active slots. Call prefill first.")
        self._checks.one_per_slot("tokens", len(row))
        self._checks.room(self._sequences.lengths, [row[:1]] * len(row))
        return np.array(self._sequences.decode(row))

    def rewind(self, slot: int, length: int) -> None:
        """Shorten an active sequence to its first ``length`` tokens; pending tokens are dropped.

        Raises
        ------
        SlotError, RangeError, ClosedError
            Nothing was changed.
        """
        self._check_open()
        self._sequences.check_lengths()
        self._sequences.rewind(slot, length)

    # --- generate ---

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        append: bool = False,
        reuse: bool = False,
        **options: Any,
    ) -> Iterator[GeneratedToken]:
        """Continue prompts, token by token.

        Parameters
        ----------
        prompts : prompt, or sequence of prompts (n,)
            Token ids or text.
        params : SamplingParams, or one per prompt
            Instead of ``options``.
        append : bool
            The prompts are next turns of the active sequences, one each.
        reuse : bool
            Keep what slot i already holds of prompt i.
        **options
            Fields of :class:`SamplingParams`, over the model's defaults.

        Returns
        -------
        iterator of GeneratedToken
            One per prompt and step, until each has a ``finish_reason``. A sequence at ``max_sequence_length`` ends with
            ``"length"`` while the others go on. Work is done as the iterator is read; arguments are checked before. It can be
            left at any token: what it has handed out is then cached or pending. Once another call has changed the sequences,
            reading on raises :class:`ClosedError`.

        Raises
        ------
        CapacityError, RangeError, ShapeError, ConfigError, ClosedError
            Nothing was changed.
        """
        self._check_open()
        if append and reuse:
            raise RangeError("generate: expected append or reuse, got both. A next turn keeps what its slot holds.")
        rows = self._prompts.rows(as_prompts(prompts), add_special_tokens=not append)
        per_request = params_for(len(rows), self._defaults, params, options)
        if append:
            self._checks.next_turns(rows)
        else:
            self._checks.new_sequences(rows, reuse=reuse)
        requests = self._requests(rows, per_request)
        return self._generate(requests, (lambda: self.append(rows)) if append else (lambda: self.prefill(rows, reuse=reuse)))

    def _generate(self, requests: list[Request], prefill: Callable[[], np.ndarray[Any, Any]]) -> Iterator[GeneratedToken]:
        return generate_tokens(self._sequences, requests, prefill, check_open=self._check_open)

    def _requests(self, rows: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
        return [
            Request(index, row, one, tokenizer=self._tokenizer, eos_token_ids=self._eos_token_ids)
            for index, (row, one) in enumerate(zip(rows, params, strict=True))
        ]

    # --- serving a queue ---

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> RequestHandle:
        """Put a prompt in the queue, to be continued by :meth:`step` as soon as a slot is free.

        Parameters
        ----------
        prompt : prompt
            Token ids or text.
        params, **options
            As for :meth:`generate`.

        Returns
        -------
        RequestHandle
            With ``tokens``, ``text``, ``finish_reason`` and ``cancel()``.

        Raises
        ------
        CapacityError, RangeError, ShapeError, ConfigError, BindingError, ClosedError
            Nothing was changed.
        """
        self._check_open()
        rows = self._prompts.rows([prompt])
        self._checks.new_sequences(rows, reuse=False)
        [one] = params_for(1, self._defaults, params, options)
        return self._queue.submit(rows[0], one, lambda params: self._requests(rows, [params])[0])

    def step(self) -> list[RequestHandle]:
        """Move the submitted requests on: one chunk of each new prompt, and one token of all others together.

        Before, slots of requests that have ended are compacted away, and the first in the queue get the free ones. What a
        request generates does not depend on the others: it is what :meth:`generate` would.

        Returns
        -------
        list of RequestHandle
            Those that have moved, in the order in which they were submitted; empty if all have ended.

        Raises
        ------
        EngineError, CudaError, RangeError, ClosedError
            Requests and queue are as before the step, which can be repeated.

        Notes
        -----
        The slots are the requests'. After another call has changed the sequences, requests that had begun are run again from
        their prompt and tokens.
        """
        self._check_open()
        return self._queue.step()

    # --- snapshots ---

    def save_snapshot(self, path: str | os.PathLike[str], slot: int = 0) -> Snapshot:
        """Write an active sequence to a file, with its pending tokens and the state of its sampler. Waits for the device.

        Parameters
        ----------
        path : path
            Replaced if it is there; it appears complete or not at all.
        slot : int

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
        """
        model = self._model()
        self._sequences.check_lengths()
        tokens, pending = self.tokens(slot), self.pending_tokens(slot)
        state = self._sequences.samplers[slot]
        sampler = state and SamplerState(seed=state[0], counter=state[1])
        stream = self._steps.stream
        snapshot = Snapshot.of_slot(self._cache, slot, tokens=tokens, pending=pending, model=model, sampler=sampler, stream=stream)
        snapshot.write(path)
        return snapshot

    def load_snapshots(self, paths: Paths) -> list[Snapshot]:
        """Start new sequences from files, one each. Go on with ``append``, ``decode`` or ``generate(..., append=True)``.

        Parameters
        ----------
        paths : path, or sequence of paths (n,)
            ``1 <= n <= B``.

        Raises
        ------
        SnapshotError
            Damaged, foreign or newer files. Nothing was changed.
        ShapeError, CapacityError, ConfigError, ClosedError
            Nothing was changed.
        """
        snapshots = read_snapshots(paths, self._cache, self._model())
        self._sequences.load(snapshots)
        return snapshots

    def resume(
        self, paths: Paths, params: SamplingParams | Sequence[SamplingParams] | None = None, **options: Any
    ) -> Iterator[GeneratedToken]:
        """Start new sequences from files and continue them, each with its own seed and counter unless a seed is given.

        Parameters
        ----------
        paths : path, or sequence of paths (n,)
        params, **options
            As for :meth:`generate`; ``max_new_tokens`` counts from here. Snapshots do not carry them.

        Returns
        -------
        iterator of GeneratedToken
            As :meth:`generate`: the tokens that would have come next. Files are read before it is returned.

        Raises
        ------
        SnapshotError, ShapeError, CapacityError, RangeError, ConfigError, ClosedError
            Nothing was changed.
        """
        snapshots = read_snapshots(paths, self._cache, self._model())
        per_request = [
            resumed_params(*pair) for pair in zip(params_for(len(snapshots), self._defaults, params, options), snapshots, strict=True)
        ]
        kept, rows = zip(*map(next_tokens, snapshots), strict=True)
        self._checks.room(kept, rows)
        requests = self._requests([[*one.tokens, *one.pending] for one in snapshots], per_request)
        chunks = self._steps.plan_prefill(kept, [len(row) for row in rows])
        return self._generate(requests, lambda: self._resumed(snapshots, kept, rows, chunks))

    def _resumed(
        self, snapshots: list[Snapshot], kept: Sequence[int], rows: Sequence[list[int]], chunks: list[Chunk]
    ) -> np.ndarray[Any, Any]:
        self._check_open()
        self._sequences.load(snapshots)
        for slot, length in enumerate(kept):
            if length < len(snapshots[slot].tokens):
                self._sequences.rewind(slot, length)
        return self._sequences.append(rows, chunks)

    def _model(self) -> ModelIdentity:
        self._check_open()
        if self._identity is None:
            raise ConfigError("snapshots: expected a session that knows its model, got one without identity. Give identity= to it.")
        return self._identity()

    # --- checks ---

    def _slot(self, slot: int) -> int:
        return slot_index(slot, len(self._sequences.cached), of="active slots")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this InferenceSession is closed.")

    # --- life ---

    def close(self) -> None:
        """Close engine and cache. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # from the last to the first, each even if one before it raised
            if self._on_close is not None:
                stack.callback(self._on_close)
            for close in (self._cache.close, self._prompt_cache.close, self._steps.close, self._engine.close, self._steps.synchronize):
                stack.callback(close)

    def __enter__(self) -> InferenceSession:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
