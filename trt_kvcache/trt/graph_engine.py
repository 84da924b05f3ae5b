"""``GraphEngine``: the step that ``TensorRTEngine`` and ``SegmentedEngine`` share: checked once, eager first, then a CUDA graph.

Calls of TensorRT follow its documentation and are tested against a recording stand-in; no engine has run on a GPU yet (see docs/gpu.md).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from trt_kvcache.engine.bound_engine import BoundEngine
from trt_kvcache.engine.embedding_rows import EmbeddingRows
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.memory.base import Memory
from trt_kvcache.trt.cuda_graphs import CudaGraphCache
from trt_kvcache.trt.engine_bindings import EngineBindings, ProfileBindings, stream_handle
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.runtime_cache import RuntimeCache, RuntimeCacheFile, gpu_identity
from trt_kvcache.trt.width_buckets import WIDTH_BUCKETS

#: Names of profiles whose steps repeat.
_REPEATED = ("decode", "verify")

#: Most graphs of prefills that are kept: one for each width of a single slot, in an engine of the default prefill length. Prefills have
#: more shapes than decode steps, and the wider ones gain less.
MAX_PREFILL_GRAPHS = 32
#: Eager runs of a prefill before it gets a graph: TensorRT for RTX compiles kernels of its shape in the meantime, which a graph waits for.
RUNS_OF_A_PREFILL = 16

#: Enqueues a step, given the execution context, the stream and its ``cudaStream_t``.
Enqueue = Callable[[int, Any, int], None]


@dataclass(frozen=True, eq=False)
class _Step:
    """A step in an execution context (implements :class:`~trt_kvcache.trt.cuda_graphs.WorkCopy`)."""

    engine: GraphEngine
    enqueue: Enqueue
    context: int

    def run(self, stream: Any) -> None:
        """Enqueue it eagerly."""
        self.enqueue(self.context, stream, stream_handle(stream))

    def refusal(self, stream: Any) -> str | None:
        """Return why TensorRT does not let it be captured, None if it does."""
        return self.engine._capture_refusal(self.context, stream_handle(stream))

    def close(self) -> None:
        """Release the context."""
        self.engine._release_context(self.context)


@dataclass(frozen=True, eq=False)
class _PreparedStep(_Step):
    """A step with the current addresses and shapes of its profile (implements :class:`~trt_kvcache.trt.cuda_graphs.Work`)."""

    graphs: CudaGraphCache | None  # of steps of its kind; None where they are off
    graph_key: Hashable
    repeats: bool

    def copy(self, stream: Any) -> _Step:
        """Return the step in a context of its own."""
        return _Step(self.engine, self.enqueue, self.engine._copy_context(self.context, stream_handle(stream)))


class GraphEngine(BoundEngine):
    """Base of the engines that run TensorRT. A decode step, a verification, or a frequent prefill becomes a CUDA graph."""

    names: TensorNames
    width_buckets = WIDTH_BUCKETS
    _bindings: EngineBindings

    def __init__(self, memory: Memory, tensorrt: TensorRT, *, network: str, cuda_graphs: bool) -> None:
        self.memory = memory
        #: Rows of token ids past the vocabulary; None for an engine that was built without ``max_embeddings``.
        self.embeddings: EmbeddingRows | None = None
        self._resources = EngineResources(tensorrt, memory)
        self._runtime_cache: RuntimeCache | None = None
        self._has_saved = False
        self._network, self._tensorrt = network, tensorrt
        self._graphs = CudaGraphCache(memory) if cuda_graphs else None
        self._prefill_graphs = CudaGraphCache(memory, max_graphs=MAX_PREFILL_GRAPHS, eager_runs=RUNS_OF_A_PREFILL) if cuda_graphs else None
        self._prepared: dict[int, _PreparedStep] = {}
        self._loaded_plans: Sequence[LoadedPlan] = ()
        self._copies = count()

    @property
    def graph_refusals(self) -> Sequence[str]:
        """Reasons why steps ran without a CUDA graph, in TensorRT's or CUDA's words, each once."""
        caches = [one for one in (self._graphs, self._prefill_graphs) if one is not None]
        return tuple(dict.fromkeys(refusal for cache in caches for refusal in cache.refusals))

    def enqueue(self, stream: Any) -> None:
        """Enqueue one step on ``stream`` in the profile in use, eagerly or as a CUDA graph.

        Does not wait, except for kernels to be compiled, and when the cache of graphs is full: see ``CudaGraphCache``.

        Parameters
        ----------
        stream : cuda.core.Stream or cuda.core.GraphBuilder
            Of the engine's device.

        Raises
        ------
        BindingError
            Something is not bound, has no shape or is too small for its shape, an output is not bound where the input is that it shares
            memory with, or (engines in segments) the shapes of the inputs do not fit each other. Nothing was enqueued.
        ClosedError
            The engine is closed, or something that is bound. Nothing was enqueued.
        PlaceError
            ``stream`` is no CUDA stream. Nothing was enqueued.
        EngineError
            TensorRT failed; the text is what it logged.
        CudaError
            A kernel or a graph could not be launched.
        """
        active = self._bindings.active
        stream_handle(stream)  # a stream of host memory is refused before anything else
        active.require_open()
        if not active.is_checked:
            self._bindings.check()
            self._prepared[active.context] = self._prepared_step(active)
            active.is_checked = True
        self._resources.note_enqueue(stream)
        step = self._prepared[active.context]
        if step.graphs is None:
            step.run(stream)
        else:
            step.graphs.run(step.graph_key, stream, step)
        if step.repeats and not self._has_saved and not self.memory.is_capturing(stream):
            self._has_saved = True  # a process that is killed later has compiled its decode kernels for the next one
            self._save_compiled()

    def _save_compiled(self) -> None:
        if self._runtime_cache is not None:
            self._runtime_cache.save()

    def _create_contexts(self, plans: Sequence[LoadedPlan], *, num_sets: int, stream: Any) -> None:
        """Create the contexts of all plans over one context memory."""
        if self._tensorrt.is_rtx:
            key = (self._network, *gpu_identity(self.memory.device), self._tensorrt.flavour, self._tensorrt.version)
            self._runtime_cache = RuntimeCache(RuntimeCacheFile(key), self.memory)
        nbytes = max(plan.context_memory_nbytes for plan in plans)
        address = self._resources.allocate(nbytes, stream=stream).ptr
        repeats = [self._graphs is not None and one for one in repeats_steps(self.profiles)]
        self._loaded_plans, self._copies = plans, count(num_sets * len(self.profiles))
        for plan in plans:
            plan.create_contexts(address, nbytes, cache=self._runtime_cache, stream=stream, repeats=repeats, num_sets=num_sets)
        if self._runtime_cache is not None:
            self._resources.callback(self._runtime_cache.close)  # before the contexts are released
        for graphs in (self._graphs, self._prefill_graphs):
            if graphs is not None:
                self._resources.callback(graphs.close)  # before the contexts, whose memory the graphs use

    def _make_embeddings(self, config: EngineFolderConfig) -> EmbeddingRows:
        """Allocate the rows of an engine with an input for them, which every context reads at one address."""
        rows = EmbeddingRows(
            self.memory,
            capacity=config.max_embeddings,
            hidden_size=config.model.hidden_size,
            vocab_size=config.model.vocab_size,
            dtype=config.dtype,
        )
        self._resources.callback(rows.close)
        return rows

    def _copy_context(self, context: int, stream: int) -> int:
        """Copy a context of every plan, with its addresses and shapes; return the number of the copy."""
        copy = next(self._copies)
        try:
            for plan in self._loaded_plans:
                plan.copy_context(context, copy, stream)
        except BaseException:
            self._release_context(copy)
            raise
        return copy

    def _release_context(self, copy: int) -> None:
        """Release the copies of a context."""
        for plan in self._loaded_plans:
            plan.release_context(copy)

    def _capture_refusal(self, context: int, stream: int) -> str | None:
        """Return why TensorRT does not let an enqueue in a context be captured, None if it does."""
        refusals = (plan.capture_refusal(context, stream) for plan in self._loaded_plans)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _prepared_step(self, active: ProfileBindings) -> _PreparedStep:
        profile, repeats = self.profiles[active.profile], repeats_steps(self.profiles)[active.profile]
        _, width = self._bindings.shape(self.names.input_ids)
        verifies = profile.name == "verify" and self._bindings.shape(self.names.last_token_ids)[1] > 1
        graphs = self._graphs if repeats and (width == 1 or verifies) else self._prefill_graphs
        return _PreparedStep(self, self._step(active), active.context, graphs, self._graph_key(active), repeats)

    def _graph_key(self, active: ProfileBindings) -> Hashable:
        """Return the key of the graph of a step: all that the graph depends on."""
        shapes = [self._bindings.shape(name) for name, spec in self.tensors.items() if spec.mode is TensorMode.INPUT and -1 in spec.shape]
        addresses = [active.tensors[name].ptr for name in self.tensors]
        return repr((active.context, shapes, addresses))  # a string keeps its hash: a look-up costs the same for any number of layers

    @abstractmethod
    def _step(self, active: ProfileBindings) -> Enqueue:
        """Return the function that enqueues a step whose bindings are checked."""

    def close(self) -> None:
        """Wait for the last enqueue, save what TensorRT for RTX compiled, and release everything. Idempotent."""
        try:
            self._resources.close()
        finally:
            self._bindings.release()
            self._prepared.clear()


def repeats_steps(profiles: Sequence[EngineProfile]) -> list[bool]:
    """Return for each profile whether steps of equal shapes repeat in it: decode and verify, or all where there is no such profile."""
    repeated = [profile.name in _REPEATED for profile in profiles]
    return repeated if any(repeated) else [True] * len(profiles)
