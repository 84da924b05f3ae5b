"""``GraphEngine``: the step that ``TensorRTEngine`` and ``SegmentedEngine`` share: checked once, eager first, then a CUDA graph.

Calls of TensorRT follow its documentation and are tested against a recording stand-in; no engine has run on a GPU yet (see docs/gpu.md).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from trt_kvcache.engine.bound_engine import BoundEngine
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.trt.cuda_graphs import CudaGraphCache
from trt_kvcache.trt.engine_bindings import EngineBindings, ProfileBindings, stream_handle
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.runtime_cache import RuntimeCache, RuntimeCacheFile, gpu_identity

#: Names of profiles whose steps repeat.
_REPEATED = ("decode", "verify")


@dataclass(frozen=True, eq=False)
class _PreparedStep:
    """A step with its current addresses and shapes; ``graph_key`` identifies its CUDA graph, None where it is not captured."""

    enqueue: Callable[[Any, int], None]
    graph_key: Hashable
    repeats: bool
    refusal: Callable[[Any], str | None]

    def run(self, stream: Any) -> None:
        """Enqueue it eagerly."""
        self.enqueue(stream, stream_handle(stream))


class GraphEngine(BoundEngine):
    """Base of the engines that run TensorRT. A decode step, or a verification, becomes a CUDA graph when it is run again."""

    names: TensorNames
    # Few of them: TensorRT for RTX compiles kernels for each new shape, and TensorRT tunes to shapes.
    width_buckets = tuple(1 << exponent for exponent in range(MAX_DIMENSION.bit_length()))
    _bindings: EngineBindings

    def __init__(self, memory: Memory, tensorrt: TensorRT, *, network: str, cuda_graphs: bool) -> None:
        self.memory = memory
        self._resources = EngineResources(tensorrt, memory)
        self._runtime_cache: RuntimeCache | None = None
        self._has_saved = False
        self._network, self._tensorrt = network, tensorrt
        self._graphs = CudaGraphCache(memory) if cuda_graphs else None
        self._prepared: dict[int, _PreparedStep] = {}

    @property
    def graph_refusals(self) -> Sequence[str]:
        """Reasons why steps ran without a CUDA graph, in TensorRT's or CUDA's words, each once."""
        return () if self._graphs is None else tuple(self._graphs.refusals)

    def enqueue(self, stream: Any) -> None:
        """Enqueue one step on ``stream`` in the profile in use, eagerly or as a CUDA graph.

        Does not wait, except when the cache of graphs is full: see ``CudaGraphCache``.

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
        if self._graphs is None or step.graph_key is None:
            step.run(stream)
        elif self._graphs.run(step.graph_key, stream, step.run, step.refusal):
            active.is_warm = True
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
        for plan in plans:
            plan.create_contexts(address, nbytes, cache=self._runtime_cache, stream=stream, repeats=repeats, num_sets=num_sets)
        if self._runtime_cache is not None:
            self._resources.callback(self._runtime_cache.close)  # before the contexts are released
        if self._graphs is not None:
            self._resources.callback(self._graphs.close)  # before the contexts, whose memory the graphs use

    def _prepared_step(self, active: ProfileBindings) -> _PreparedStep:
        def refusal(stream: Any) -> str | None:
            if not active.is_warm:
                return "the step has not run eagerly with its current shapes"
            return self._capture_refusal(active.context, stream_handle(stream))

        return _PreparedStep(self._step(active), self._graph_key(active), repeats_steps(self.profiles)[active.profile], refusal)

    def _graph_key(self, active: ProfileBindings) -> Hashable:
        """Return the key of the graph of a step, None for one that is not captured: a prefill."""
        profile = self.profiles[active.profile]
        _, width = self._bindings.shape(self.names.input_ids)
        verifies = profile.name == "verify" and self._bindings.shape(self.names.last_token_ids)[1] > 1
        if not repeats_steps(self.profiles)[active.profile] or (width > 1 and not verifies):
            return None
        shapes = [self._bindings.shape(name) for name, spec in self.tensors.items() if spec.mode is TensorMode.INPUT and -1 in spec.shape]
        addresses = [active.tensors[name].ptr for name in self.tensors]
        return repr((active.context, shapes, addresses))  # a string keeps its hash: a look-up costs the same for any number of layers

    @abstractmethod
    def _step(self, active: ProfileBindings) -> Callable[[Any, int], None]:
        """Return the function that enqueues a step whose bindings are checked, given the stream and its ``cudaStream_t``."""

    @abstractmethod
    def _capture_refusal(self, context: int, stream: int) -> str | None:
        """Return why TensorRT does not let an enqueue be captured with the current addresses and shapes, None if it does."""

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
