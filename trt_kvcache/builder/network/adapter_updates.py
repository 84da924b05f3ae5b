"""``AdapterUpdates``: products with A and B of LoRA adapters, which are inputs of the network; each slot takes the ranks of its adapter."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.projection import matmul_transposed
from trt_kvcache.builder.network.sizes import part, size
from trt_kvcache.engine.adapter_inputs import RANK_ADAPTERS, SLOT_ADAPTERS, update_names
from trt_kvcache.engine.protocol import TensorSpec


class AdapterUpdates:
    """Updates of linear layers, ``B (mask * (A x))``, of a network with the inputs ``tensors`` of ``AdapterInputs.tensors``."""

    def __init__(self, graph: Graph, tensors: Sequence[TensorSpec], *, slots_of: Any) -> None:
        self._inputs = {spec.name: graph.input(spec.name, spec.dtype, spec.shape) for spec in tensors}
        count = size(graph, "adapters/slots", slots_of, 0)
        slots = part(graph, "adapters/of_slots", self._inputs[SLOT_ADAPTERS], (0,), (count,))
        column = graph.shuffle("adapters/slot_column", slots, reshape=(-1, 1, 1))
        row = graph.shuffle("adapters/rank_row", self._inputs[RANK_ADAPTERS], reshape=(1, 1, -1))
        self._mask = graph.elementwise("adapters/mask", column, "EQUAL", row)  # [B, 1, rank]
        self._nothing = graph.scalar("adapters/nothing", 0, graph.dtype, 3)

    def added(self, graph: Graph, module: str, x: Any, y: Any, *, layer: int, role: str) -> Any:
        """Return ``y`` ``[B, s, out]`` with the update of the product of ``x`` ``[B, s, in]``, exactly 0 for slots without an adapter."""
        a, b = (self._inputs.get(name) for name in update_names(layer, role))
        if a is None:
            return y
        ranks = matmul_transposed(graph, f"{module}/lora_a", x, a)
        # Selected, not multiplied by 0: the ranks of another adapter may be infinite in 16 bits.
        own = graph.op(f"{module}/own_ranks", "select", self._mask, ranks, self._nothing)
        return graph.elementwise(f"{module}/add_update", y, "SUM", matmul_transposed(graph, f"{module}/lora_b", own, b))
