"""``PackedProduct``: a product with a packed matrix of a linear layer in a plugin layer, in place of TensorRT's own layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trt_kvcache.builder.network.packed_matrices import PackedMatrices
from trt_kvcache.builder.network.weights import LayerWeights, Weights
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD
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
    of_layers = {part.tensor for layer in range(model.num_layers) for role, part in layer_parts(model, layer).items() if role in roles}
    return of_layers | (set() if model.tie_word_embeddings else {HEAD})


def packed_products(weights: LayerWeights, dtype: str) -> dict[str, PackedProduct]:
    """Return the products of a layer whose quantized matrices the kernels know, by role."""
    stored = {role: weights.stored(f"{role}.weight") for role in ROLES if weights.has(f"{role}.weight")}
    found = {role: _product(one, dtype) for role, one in stored.items()}
    return {role: product for role, product in found.items() if product is not None}


def packed_head(weights: Weights, model: ModelConfig, dtype: str) -> PackedProduct | None:
    """Return the product of the language model head; None for one that is tied to the embedding, or in no format of the kernels."""
    return None if model.tie_word_embeddings else _product(weights.stored(HEAD, slice(None)), dtype)


def _product(stored: QuantizedWeight | SuperBlocks | None, dtype: str) -> PackedProduct | None:
    matrix = None if stored is None else PackedMatrices.of([stored], dtype)
    if stored is None or matrix is None:
        return None
    outputs, inputs = stored.shape
    attributes = matrix.format.attributes(WEIGHT)
    if matrix.format.has_factors:
        attributes["factor_high"], attributes["factor_low"] = matrix.arrays["factors"][:2].view(np.float32).tolist()
    return PackedProduct(PackedLinearOp(outputs=outputs, **attributes), inputs, matrix)
