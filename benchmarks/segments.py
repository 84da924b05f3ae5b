"""Host time that segments cost in a step: what Python takes per layer, apart from TensorRT and the driver.

    python benchmarks/segments.py [--out benchmarks/results/segments.json] [--steps 2000]

``SegmentedEngine`` enqueues steps of 8 slots. Its segments are stand-ins for TensorRT contexts, which do nothing: no GPU that was at hand
takes engines of TensorRT for RTX. On a GPU the operations are launched, and replaying the graph of a decode step is timed too;
without one, a launch does nothing. The layer counts take turns, and the cost of a layer is the slope between them.

Then the part of ``TensorRTEngine`` in such a step, eagerly and as a graph, over one plan that does nothing. It grows with the bound
allocations, of which a cache has one and these stand-ins one for each tensor. Times are the median of a round, in the best of many rounds:
on a busy machine, the others tell how busy it was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from environment import describe_environment, write_result

from trt_kvcache import CudaMemory, HostMemory
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.decoder_cache import cache_config
from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.engine.decoder_tensors import decoder_tensors, shape_at
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.engine_folder.decoder_segments import decoder_constants, decoder_stages
from trt_kvcache.memory.cuda_memory import find_gpu
from trt_kvcache.memory.host_memory import HostAllocation, HostStream
from trt_kvcache.model import ModelConfig
from trt_kvcache.ops.segments import Segment
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.segmented_engine import SegmentedEngine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine
from trt_kvcache.trt.tensors import ProfileRanges

BATCH, LAYERS, ROUNDS = 8, (16, 32, 64), 100

#: Longest part of an engine in one piece in a step, in microseconds.
LIMIT_MICROSECONDS = 20.0


def nothing(*arguments: Any, **options: Any) -> bool:
    """Succeed."""
    return True


class HostStandIn(HostMemory):
    """Host memory that says it is a GPU's, with streams that have an address."""

    is_host = False
    multiprocessor_count, arch = 132, "sm_90"

    def create_stream(self) -> Any:
        """Return a stream of host memory with an address."""
        stream = HostStream()
        methods = {"__cuda_stream__": lambda self: (0, 1), "create_graph_builder": lambda self: NullGraph(self)}
        stream.__class__ = type("AddressedStream", (HostStream,), methods)
        return stream


class NullGraph:
    """A graph of host memory, and its builder: it does nothing."""

    is_building = False
    begin_building = launch = close = nothing

    def __init__(self, stream: Any) -> None:
        self.__cuda_stream__ = stream.__cuda_stream__

    def end_building(self) -> NullGraph:
        """Return itself."""
        return self

    complete = end_building


class NullPlan(LoadedPlan):
    """A segment that does nothing, by the calls of a real one."""

    def __init__(self, segment: Segment, profiles: Any, messages: Messages) -> None:
        self._messages = messages
        self.tensors = {spec.name: spec for spec in segment.tensors}
        sizes = [((p.min_batch, p.min_width), (p.max_batch, p.max_width)) for p in profiles]
        inputs = [spec for spec in segment.tensors if spec.mode is TensorMode.INPUT]
        self.ranges = [ProfileRanges({one.name: (shape_at(one.shape, *a), shape_at(one.shape, *b)) for one in inputs}) for a, b in sizes]
        calls = ("set_tensor_address", "set_input_shape", "execute_async_v3", "is_stream_capturable")
        context = SimpleNamespace(**dict.fromkeys(calls, nothing))
        self._contexts, self._tensorrt = dict.fromkeys(range(len(profiles)), context), SimpleNamespace(is_rtx=True)  # type: ignore[assignment]

    context_memory_nbytes = 256  # type: ignore[assignment]

    def create_contexts(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def copy_context(self, context: int, copy: int, stream: int) -> None:
        """Add the context again."""
        self._contexts[copy] = self._contexts[context]

    def tensor_shape(self, context: int, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in a decode step."""
        return shape_at(self.tensors[name].shape, BATCH, 1)


def model_of(layers: int) -> ModelConfig:
    """Return a model with the given number of layers."""
    return ModelConfig.from_dict(
        {
            **{"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": layers},
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 64, "torch_dtype": "float16", "tie_word_embeddings": True},
        }
    )


def open_engine(layers: int, memory: Any, *, cuda_graphs: bool) -> tuple[SegmentedEngine, Any]:
    """Return an engine that is bound and shaped for decode steps, and a stream."""
    model = model_of(layers)
    cache = cache_config(model, max_batch_size=BATCH, max_sequence_length=64, dtype="float16", attention="plugin")
    stages, tensors = decoder_stages(model, cache, DEFAULT_NAMES), decoder_tensors(model, cache, DEFAULT_NAMES)
    spans = [(0, 0)] * (layers + 1)
    config = SimpleNamespace(
        model=model, cache=cache, names=DEFAULT_NAMES, tensors=tensors, tensorrt_flavour="none", tensorrt_version="",
        profiles=decoder_profiles(max_batch_size=BATCH, max_prefill_length=16), segments=SimpleNamespace(stages=stages, spans=spans),
        plan=SimpleNamespace(sha256=""), dtype="float16", network_facts=dict, max_embeddings=0,
    )  # fmt: skip
    constants = {spec.name: np.zeros(spec.shape, numpy_dtype(spec.dtype)) for spec in decoder_constants(model, cache)}
    segments = iter([stage for stage in stages if isinstance(stage, Segment)])
    with mock.patch(
        "trt_kvcache.trt.segmented_engine.LoadedPlan",
        new=lambda *_, resources, **options: NullPlan(next(segments), config.profiles, resources.messages),
    ):
        engine = SegmentedEngine(stand_in(), b"", memory=memory, config=config, constants=constants, cuda_graphs=cuda_graphs)  # type: ignore[arg-type]
    return engine, made_ready(engine, memory)


def open_whole(layers: int, memory: Any, *, cuda_graphs: bool) -> tuple[TensorRTEngine, Any]:
    """Return an engine in one piece that is bound and shaped for decode steps, and a stream."""
    model = model_of(layers)
    cache = cache_config(model, max_batch_size=BATCH, max_sequence_length=64, dtype="float16", attention="native")
    tensors = decoder_tensors(model, cache, DEFAULT_NAMES)
    profiles = decoder_profiles(max_batch_size=BATCH, max_prefill_length=16)
    with mock.patch(
        "trt_kvcache.trt.tensorrt_engine.LoadedPlan",
        new=lambda *_, resources, **options: NullPlan(SimpleNamespace(tensors=tensors), profiles, resources.messages),  # type: ignore[arg-type]
    ):
        engine = TensorRTEngine(stand_in(), b"", memory=memory, names=DEFAULT_NAMES, config=None, plan_sha256="", cuda_graphs=cuda_graphs)
    return engine, made_ready(engine, memory)


def stand_in() -> Any:
    """Return a TensorRT that is asked for nothing but its log."""
    log = SimpleNamespace(collect=lambda: contextlib.nullcontext(Messages(ignore_missing_driver=False)))
    return SimpleNamespace(log=log, is_rtx=False)


def made_ready(engine: Any, memory: Any) -> Any:
    """Bind and shape an engine for decode steps; return a stream."""
    stream, bound = memory.create_stream(), {}
    engine.use_profile(1)
    for spec in engine.tensors.values():
        new = np.zeros(shape_at(spec.shape, BATCH, 1), numpy_dtype(spec.dtype))
        bound[spec.name] = bound[spec.alias] if spec.alias else memory.to_device(new, stream=stream)
        engine.bind(spec.name, bound[spec.name])
        if spec.mode is TensorMode.INPUT:
            engine.set_input_shape(spec.name, new.shape)
    return stream


def measure(memory: Any, steps: int, *, cuda_graphs: bool, open_engine: Callable[..., tuple[Any, Any]] = open_engine) -> dict[int, float]:
    """Return the host time of an enqueue, in microseconds, by layers: the lowest median of a round."""
    engines = {layers: open_engine(layers, memory, cuda_graphs=cuda_graphs) for layers in LAYERS}
    medians: dict[int, list[float]] = {layers: [] for layers in LAYERS}
    for _ in range(ROUNDS):
        for layers, (engine, stream) in engines.items():
            times = []
            for _ in range(steps // ROUNDS + 2):
                start = time.perf_counter_ns()
                engine.enqueue(stream)
                times.append((time.perf_counter_ns() - start) / 1000)
                memory.synchronize(stream)
            medians[layers].append(statistics.median(times))
    for engine, _ in engines.values():
        engine.close()
    return {layers: min(one) for layers, one in medians.items()}


def main() -> int:
    """Measure; write and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "segments.json")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    on_gpu = find_gpu(0) is None
    memory: Any = CudaMemory(0) if on_gpu else HostStandIn()
    with contextlib.ExitStack() as stack:
        if not on_gpu:
            address = cached_property(lambda self: int(self.storage.ctypes.data))  # as cheap as that of a GPU's memory
            address.__set_name__(HostAllocation, "ptr")
            stack.enter_context(mock.patch.object(HostAllocation, "ptr", address))
            for name in ("attention", "embedding"):
                stack.enter_context(mock.patch(f"trt_kvcache.kernels.{name}_kernels.launch", new=nothing))
        eager = measure(memory, options.steps, cuda_graphs=False)
        replay = measure(memory, options.steps, cuda_graphs=True) if on_gpu else {}
        whole = {name: measure(memory, options.steps, cuda_graphs=name == "graph", open_engine=open_whole) for name in ("eager", "graph")}
    per_layer = (eager[LAYERS[-1]] - eager[LAYERS[0]]) / (LAYERS[-1] - LAYERS[0])
    result = {
        **describe_environment(gpu=on_gpu), "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "batch_size": BATCH, "steps": options.steps, "segments": "stand-ins that do nothing",
        "launches": "real" if on_gpu else "nothing", "eager_us": eager, "eager_us_per_layer": per_layer, "graph_us": replay,
        "one_piece_us": whole, "limits": {"one_piece_us": LIMIT_MICROSECONDS},
    }  # fmt: skip
    write_result(options.out, result)
    print(f"eager: {per_layer:.1f} us a layer ({eager}); graph: {replay or 'no GPU'}")
    slowest = max(max(times.values()) for times in whole.values())
    print(f"in one piece: {whole}; at most {slowest:.1f} us (limit {LIMIT_MICROSECONDS})")
    return int(slowest > LIMIT_MICROSECONDS)


if __name__ == "__main__":
    sys.exit(main())
