"""One part of a decoder's network by itself: built with TensorRT for RTX, computed by the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.builder.network.interpreter import interpret
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.trt.module import TensorRT

Array = np.ndarray[Any, Any]


class RecordingGraph(Graph):
    """A graph that keeps its constants by name: TensorRT does not give back bfloat16."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.constants: dict[str, Array] = {}

    def constant(self, name: str, array: Array) -> Any:
        return super().constant(name, self.constants.setdefault(name, array))


class Part:
    """A network of one part."""

    def __init__(self, tensorrt: TensorRT, messages: Any, dtype: str) -> None:
        self.tensorrt = tensorrt
        builder = tensorrt.module.Builder(tensorrt.log.logger)
        self.graph = RecordingGraph(tensorrt, builder.create_network(0), messages, dtype=dtype)
        self._builder = builder  # keeps the network alive

    def run(self, output: Any, **feed: Array) -> Array:
        """Compute one tensor of the network from its inputs."""
        self.graph.network.mark_output(output)
        return interpret(self.tensorrt, self.graph.network, self.graph.constants, feed)[output.name]


class StoredWeights:
    """Weights by name, as ``Weights`` gives them, or ``LayerWeights``."""

    updates = products = None

    def __init__(self, **weights: Array) -> None:
        self._weights = {name.replace("__", "."): array for name, array in weights.items()}

    def __call__(self, name: str) -> Array:
        return self._weights[name]

    def matrix(self, name: str) -> Any:
        return self._weights[name]

    def module(self, role: str) -> str:
        return f"layer.{role}"


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    """Return random numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)
