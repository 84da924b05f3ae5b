"""``PackedProduct``: a product with a packed matrix of a linear layer in a plugin layer, in place of TensorRT's own layers."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache.builder.network.packed_matrices import PackedMatrices
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.ops.packed_linear_op import WEIGHT, PackedLinearOp

#: The linear layers of attention and MLPs.
ROLES = ("q", "k", "v", "o", "output_gate", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "latent_in", "latent_out")


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """A product with a packed matrix."""

    op: PackedLinearOp
    inputs: int
    matrix: PackedMatrices


def packed_products(weights: LayerWeights, dtype: str) -> dict[str, PackedProduct]:
    """Return the products of a layer whose quantized matrices the kernels know, by role."""
    found = {}
    for role in ROLES:
        stored = weights.stored(f"{role}.weight") if weights.has(f"{role}.weight") else None
        matrix = None if stored is None else PackedMatrices.of([stored], dtype)
        if stored is not None and matrix is not None:
            outputs, inputs = stored.shape
            found[role] = PackedProduct(PackedLinearOp(outputs=outputs, **matrix.format.attributes(WEIGHT)), inputs, matrix)
    return found
