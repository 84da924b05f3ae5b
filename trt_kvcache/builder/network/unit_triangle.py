"""The inverse of ``I + a`` for strictly lower triangular matrices ``a``, with a row and a column for each new token.

The first diagonal blocks have one token. Each step joins two adjacent diagonal blocks: with ``b`` the block of ``a`` between them,
their inverses ``x`` and ``y`` become ``[[x, 0], [-y b x, y]]``. This is block substitution. It keeps the precision that a series of
powers of ``a`` would lose for repeated tokens.
"""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.sizes import arange, size


class UnitTriangle:
    """Inverts the unit triangular matrices of all layers of a network, which share the masks that join two blocks."""

    def __init__(self, max_width: int) -> None:
        self._levels = max(max_width - 1, 0).bit_length()
        self._network: Any = None
        self._identity: Any = None
        self._joints: list[Any] = []

    def inverse(self, graph: Graph, name: str, a: Any) -> Any:
        """Return the inverse of ``I + a`` for ``a`` ``[B, heads, s, s]`` float32 with zeros on and above the diagonal."""
        if self._network is not graph.network:
            self._network = graph.network
            self._add_masks(graph, a)
        plain, nothing = graph.trt.MatrixOperation.NONE, graph.scalar(f"{name}/nothing", 0, "float32", 4)
        inverse = self._identity
        for level, joint in enumerate(self._joints):
            step = f"{name}/{level}"
            between = graph.op(f"{step}/between", "select", joint, a, nothing)
            if level:
                left = graph.op(f"{step}/left", "matrix_multiply", inverse, plain, between, plain)
                between = graph.op(f"{step}/right", "matrix_multiply", left, plain, inverse, plain)
            inverse = graph.elementwise(f"{step}/joined", inverse, "SUB", between)
        return inverse

    def _add_masks(self, graph: Graph, a: Any) -> None:
        """Add the identity ``[1, 1, s, s]``, and for each level a mask of the elements of ``a`` that join two blocks."""
        index = arange(graph, "blocks/tokens", size(graph, "blocks/width", a, 2))
        same_block = self._same_block(graph, "blocks/1", index)
        self._identity = graph.cast("blocks/identity", same_block, "float32")
        self._joints = []
        for level in range(self._levels):
            name, tokens = f"blocks/{2 << level}", graph.scalar(f"blocks/{2 << level}/tokens", 2 << level, "int32", 1)
            block = graph.elementwise(f"{name}/block", index, "FLOOR_DIV", tokens)
            same_pair = self._same_block(graph, name, block)
            other = graph.op(f"{name}/other", "unary", same_block, graph.trt.UnaryOperation.NOT)
            self._joints.append(graph.elementwise(f"{name}/joint", same_pair, "AND", other))
            same_block = same_pair

    @staticmethod
    def _same_block(graph: Graph, name: str, block: Any) -> Any:
        """Return ``[1, 1, s, s]`` bool: true if two tokens are in one block, for the block ``[s]`` of each."""
        rows, columns = (
            graph.shuffle(f"{name}/{what}", block, reshape=shape) for what, shape in (("rows", (1, 1, -1, 1)), ("columns", (1, 1, 1, -1)))
        )
        return graph.elementwise(f"{name}/same", rows, "EQUAL", columns)
