"""Networks of one TensorRT layer, built and run. A dry run builds them if TensorRT can, and computes the layer in NumPy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from trt_kvcache.builder.network import Graph
from trt_kvcache.builder.tensorrt_calls import require
from trt_kvcache.doctor.cases import NotHere
from trt_kvcache.doctor.compare import Array
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import TENSORRT, usable_tensorrt
from trt_kvcache.engine.attention_variants import attention_variant
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import BuildError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.module import TensorRT

#: Smallest, tuned and largest shape of an input.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class SingleLayer(ABC):
    """A network of one layer."""

    dtype: str

    @abstractmethod
    def define(self, graph: Graph) -> None:
        """Add inputs, the layer, and outputs."""

    @abstractmethod
    def shapes(self) -> Mapping[str, ShapeRange]:
        """Return the shapes of the inputs."""

    @abstractmethod
    def compute(self, tensors: Mapping[str, Array]) -> None:
        """Compute the layer in NumPy: read the inputs, and write the outputs in place."""


class Runner(Protocol):
    """Runs a layer over bound tensors."""

    memory: Memory
    tensors: Mapping[str, TensorSpec]  # what the engine reports; empty in a dry run

    def run(self, bound: Mapping[str, DeviceTensor]) -> None:
        """Run once, and wait."""


@contextmanager
def opened(settings: Settings, layer: SingleLayer, variant: str) -> Iterator[Runner]:
    """Build a layer and open its engine. Raises NotHere where TensorRT or the layers of the variant are missing."""
    if TENSORRT in settings.left_out:
        raise NotHere(settings.left_out[TENSORRT])
    tensorrt = usable_tensorrt(settings)
    if not tensorrt.supports(attention_variant(variant)):
        raise NotHere(f"{tensorrt} has no {attention_variant(variant).needs}")
    plan = _build(tensorrt, layer)
    if settings.dry_run:
        yield NumPyRunner(layer)
        return
    runner = _PlanRunner(tensorrt, plan, settings.memory())
    try:
        yield runner
    finally:
        runner.close()


def _build(tensorrt: TensorRT, layer: SingleLayer) -> Any:
    """Return the serialised engine of a layer."""
    with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
        builder = require(tensorrt.create, messages, f"{tensorrt} cannot start a builder", "Builder")
        flags = 0 if tensorrt.is_rtx else 1 << int(tensorrt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = require(builder.create_network, messages, "TensorRT cannot make a network", flags)
        graph = Graph(tensorrt, network, messages, dtype=layer.dtype)
        layer.define(graph)
        config = require(builder.create_builder_config, messages, "TensorRT cannot make a builder configuration")
        profile = builder.create_optimization_profile()
        for name, sizes in layer.shapes().items():
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            messages.fail(BuildError, "the layer could not be built")
        return plan


class NumPyRunner:
    """A layer in NumPy, over host memory."""

    def __init__(self, layer: SingleLayer) -> None:
        self._layer = layer
        self.memory: Memory = HostMemory()
        self.tensors: Mapping[str, TensorSpec] = {}

    def run(self, bound: Mapping[str, DeviceTensor]) -> None:
        """Compute the layer in place."""
        assert isinstance(self.memory, HostMemory)
        self._layer.compute({name: tensor.memory.array(tensor) for name, tensor in bound.items()})  # type: ignore[attr-defined]


class _PlanRunner:
    """An engine of TensorRT with one context."""

    def __init__(self, tensorrt: TensorRT, plan: Any, memory: Memory) -> None:
        self.memory = memory
        self._resources = EngineResources(tensorrt, memory)
        try:
            self._stream = memory.create_stream()
            self._plan = LoadedPlan(tensorrt, plan, resources=self._resources)
            self.tensors: Mapping[str, TensorSpec] = self._plan.tensors
            nbytes = self._plan.context_memory_nbytes
            context_memory = self._resources.allocate(nbytes, stream=self._stream)
            self._plan.create_contexts(context_memory.ptr, nbytes, cache=None, stream=self._stream, repeats=[False])
        except BaseException:
            self._resources.close()
            raise

    def run(self, bound: Mapping[str, DeviceTensor]) -> None:
        """Set shapes and addresses, enqueue, and wait."""
        inputs = self._plan.ranges[0].ranges
        for name, tensor in bound.items():
            if name in inputs:
                self._plan.set_input_shape(0, name, tensor.shape)
            self._plan.set_tensor_address(0, name, tensor.ptr)
        self._plan.enqueue(0, int(self._stream.__cuda_stream__()[1]))
        self.memory.synchronize(self._stream)

    def close(self) -> None:
        """Release the engine."""
        self._resources.close()
