"""``PackedProduct``: a product with a packed matrix of a linear layer in a plugin layer, in place of TensorRT's own layers."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache.builder.network.packed_matrices import PackedMatrices
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.weight_parts import layer_parts
from trt_kvcache.ops.packed_linear_op import WEIGHT, PackedLinearOp

#: The linear layers of attention and MLPs.
ROLES = ("q", "k", "v", "o", "output_gate", "gate", "up", "down", "shared_gate", "shared_up", "shared_down", "latent_in", "latent_out")


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """A product with a packed matrix."""

    op: PackedLinearOp
    inputs: int
    matrix: PackedMatrices


def product_tensors(model: ModelConfig) -> set[str]:
    """Return the names of the tensors that have such matrices."""
    roles = {f"{role}.weight" for role in ROLES}
    return {part.tensor for layer in range(model.num_layers) for role, part in layer_parts(model, layer).items() if role in roles}


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
