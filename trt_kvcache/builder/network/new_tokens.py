"""``NewTokens``: number of new tokens of each slot in a step, which layers with states need, since a step is padded."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.sizes import arange, size
from trt_kvcache.engine.names import TensorNames


class NewTokens:
    """Number of new tokens of each slot, without padding: an input of each network that has layers with states."""

    def __init__(self, names: TensorNames) -> None:
        self._names = names
        self._network: Any = None
        self._lengths: Any = None
        self._is_new: Any = None

    def lengths(self, graph: Graph) -> Any:
        """Return the input ``new_lengths`` ``[B]`` int32, which the network gets at the first call."""
        if self._network is not graph.network:
            self._network = graph.network
            self._lengths = graph.input(self._names.new_lengths, "int32", (-1,))
            self._is_new = None
        return self._lengths

    def is_new(self, graph: Graph, tokens: Any) -> Any:
        """Return ``[B, s, 1]`` bool: true for new tokens, false for padding. Of ``tokens`` ``[B, s, n]`` only the shape is read."""
        lengths = self.lengths(graph)
        if self._is_new is None:
            column = graph.shuffle("new_tokens/lengths", lengths, reshape=(-1, 1, 1))
            positions = arange(graph, "new_tokens/arange", size(graph, "new_tokens/width", tokens, 1))
            row = graph.shuffle("new_tokens/positions", positions, reshape=(1, -1, 1))
            self._is_new = graph.elementwise("new_tokens/is_new", column, "GREATER", row)
        return self._is_new
