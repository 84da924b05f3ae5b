"""Weights that are rounded when they are read: selection, size and result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.quantization import SCHEMES, Quantization
from trt_kvcache.checkpoint.quantized.rounding import DIVISORS, rounded_to_nearest
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import CheckpointError, ConfigError
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, tensor_shapes
from trt_kvcache.model.weight_parts import EXACT_ROLES, layer_parts

#: Matrices that stay as they are: routers, and the gate of a shared expert, which is a single row.
_NOT_ROUNDED = EXACT_ROLES | {"shared_expert_gate.weight"}


@dataclass(frozen=True)
class RoundToNearest:
    """Rounding of a weight, with the members of a :class:`~trt_kvcache.checkpoint.quantized.format.QuantizedFormat` that describe it."""

    scheme: str  # a key of SCHEMES
    dtype: str  # of the scales

    @property
    def title(self) -> str:
        """Common name."""
        bits, group = SCHEMES[self.scheme]
        return f"int{bits} {'by output' if group is None else f'in groups of {group}'} (rounded to nearest)"

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide the quantized values, as plain JSON values."""
        bits, _ = SCHEMES[self.scheme]
        return {"rounded": self.scheme, "scales": self.dtype, "divisors": DIVISORS[bits]}


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """A weight in files that is rounded when it is read; it has the members of a ``StoredWeight``."""

    quantized: RoundToNearest
    name: str
    shape: tuple[int, int]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of its stored tensors: its own alone."""
        return (self.name,)

    def value_kind(self, files: Mapping[str, WeightFile]) -> str:
        """Return the kind of its quantized values."""
        return f"int{SCHEMES[self.quantized.scheme][0]}"

    def nbytes(self, files: Mapping[str, WeightFile]) -> int:
        """Return the size of quantized values and scales in bytes."""
        return rounded_nbytes(self.shape, self.quantized.scheme, self.quantized.dtype)

    def unrounded(self, files: Mapping[str, WeightFile]) -> npt.NDArray[Any]:
        """Return the values that are rounded, over the memory of the files."""
        return files[self.name].array(self.name)

    def read(self, files: Mapping[str, WeightFile]) -> QuantizedWeight:
        """Return the rounded weight in new memory. Raises CheckpointError for a value that is not finite."""
        file = files[self.name]
        weight = rounded_to_nearest(file.array(self.name), self.quantized.scheme, self.quantized.dtype)
        file.release(self.name)
        if not np.isfinite(weight.scales.stored.astype(np.float32)).all():
            raise CheckpointError(f"{file.path}: expected finite values of {self.name}, got others. They cannot be rounded.")
        return weight


def rounded_nbytes(shape: tuple[int, int], scheme: str, dtype: str) -> int:
    """Return the size in bytes of a rounded matrix ``[out, in]`` with scales of a dtype."""
    (outputs, inputs), (bits, group) = shape, SCHEMES[scheme]
    return outputs * (-(-inputs * bits // 8) + -(-inputs // (group or inputs)) * itemsize(dtype))


def rounding_schemes(config: ModelConfig, quantization: Quantization) -> dict[str, str]:
    """Return the scheme of each weight to round, by name. Raises ConfigError for ``head=...`` if the head is tied to the embedding."""
    parts = (
        part
        for index in range(config.num_layers)
        for role, part in layer_parts(config, index).items()
        if role.endswith(".weight") and role not in _NOT_ROUNDED
    )
    schemes = {part.tensor: quantization.weights for part in parts if len(part.shape) == 2}
    if quantization.embedding is not None:
        schemes[embedding_name(config)] = quantization.embedding
    if quantization.head is not None:
        if config.tie_word_embeddings:
            raise ConfigError("quantize: expected no head=..., as the head of this model is its embedding. embedding=... rounds both.")
        schemes[HEAD] = quantization.head
    return schemes


def rounded_weights(config: ModelConfig, quantization: Quantization, packed: Mapping[str, Any]) -> dict[str, RoundedWeight]:
    """Return the weights to round, by name. Raises CheckpointError if the checkpoint is quantized already (``packed``)."""
    if packed:
        title = next(iter(packed.values())).quantized.title
        raise CheckpointError(f"quantize: expected a checkpoint in 16 or 32 bits, got one in {title}. Leave the option out.")
    shapes = tensor_shapes(config)
    return {
        name: RoundedWeight(quantized=RoundToNearest(scheme, config.dtype), name=name, shape=(shapes[name][0], shapes[name][1]))
        for name, scheme in rounding_schemes(config, quantization).items()
    }
