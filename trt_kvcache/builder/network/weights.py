"""The weights of a checkpoint, in the dtype that the engine computes in."""

from typing import Any, Protocol

import numpy as np

from trt_kvcache.builder.network.adapter_updates import AdapterUpdates
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.packed_weight import PackedWeight
from trt_kvcache.checkpoint.quantized.offset_blocks import OffsetBlocks
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import BuildError
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.families.family import LLAMA_NAMES
from trt_kvcache.model.weight_parts import WeightPart, layer_parts

#: The largest distance of a quantized value from an offset, by dtype.
_LARGEST_VALUES = {"int4": 15, "int8": 255, "float8_e4m3fn": 448, "float4_e2m1fn": 6}


class TensorSource(Protocol):
    """Source of weights: a :class:`~trt_kvcache.checkpoint.Checkpoint`, or anything with these methods."""

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Return a weight.

        Parameters
        ----------
        name : str
            Its Hugging Face name.

        Returns
        -------
        ndarray
            In its stored dtype.
        """

    def quantized_weight(self, name: str) -> QuantizedWeight | None:
        """Return a quantized weight as it is stored, or None if it is not quantized.

        Parameters
        ----------
        name : str
            Its Hugging Face name.
        """

    def super_blocks(self, name: str) -> SuperBlocks | None:
        """Return a weight in Q4_K, Q5_K or Q6_K as it is stored, or None if it is in another format.

        Parameters
        ----------
        name : str
            Its Hugging Face name.
        """

    def offset_blocks(self, name: str) -> OffsetBlocks | None:
        """Return a weight in Q4_1, Q5_0 or Q5_1 as it is stored, or None if it is in another format.

        Parameters
        ----------
        name : str
            Its Hugging Face name.
        """

    def release(self, name: str) -> None:
        """Let the operating system take the memory of a stored weight.

        Parameters
        ----------
        name : str
            Its Hugging Face name.
        """


class PluginProducts(Protocol):
    """Products with matrices of linear layers in plugin layers."""

    def has(self, layer: int | None, role: str) -> bool:
        """Return True if a matrix has a plugin layer.

        Parameters
        ----------
        layer : int or None
            Index of the layer; None for the language model head.
        role : str
            Of the matrix, such as ``"up"``.

        Returns
        -------
        bool
            False for a product in layers of TensorRT.
        """

    def added(self, graph: Graph, layer: int | None, role: str, x: Any) -> Any:
        """Add a product.

        Parameters
        ----------
        graph : Graph
            The network.
        layer : int or None
            Index of the layer; None for the language model head.
        role : str
            Of the matrix, such as ``"up"``.
        x : ITensor [B, s, in]
            The rows.

        Returns
        -------
        ITensor [B, s, out] or None
            None for a matrix that has no plugin layer.
        """


class Weights:
    """Weights by their Hugging Face names, in the dtype of the model. With ``has_fp4`` FP4 is not widened to int8."""

    def __init__(self, checkpoint: TensorSource, dtype: str, *, has_fp4: bool = False) -> None:
        self._checkpoint = checkpoint
        self._is_native = has_fp4
        self._last: tuple[str, QuantizedWeight | None] | None = None
        self.dtype = dtype

    def __call__(self, name: str, rows: slice | list[int] = slice(None)) -> np.ndarray[Any, Any]:
        """Return one weight, or rows of it: a view of the checkpoint's memory if it is stored in this dtype, else a converted copy."""
        stored = self._checkpoint.tensor(name)
        if rows != slice(None):
            stored = stored[rows]
        dtype = numpy_dtype(self.dtype)
        if stored.dtype == dtype:
            return stored
        with np.errstate(over="ignore"):
            converted = stored.astype(dtype)
        if self.dtype == "float16" and not np.isfinite(converted).all():
            raise BuildError(
                f"weight `{name}`: it holds {dtype_name(stored.dtype)} values that float16 cannot hold (up to 65504). "
                "Build with dtype bfloat16 or float32."
            )
        return converted

    def exact(self, name: str) -> np.ndarray[Any, Any]:
        """Return one weight in float32."""
        return self._checkpoint.tensor(name).astype(np.float32)

    def matrix(self, name: str, part: WeightPart | None = None) -> np.ndarray[Any, Any] | PackedWeight:
        """Return one matrix ``[out, in]``, packed if it is quantized: a tensor, or ``part`` of it."""
        stored = self._quantized(name)
        if stored is None:
            return self(name) if part is None else self(name, part.index)
        parts = [stored] if part is None else [stored.rows(rows) for rows in part.selections]
        packed = PackedWeight.of(name, parts, has_fp4=self._is_native)
        self._checkpoint.release(name)
        largest = float(np.finfo(np.float16).max)
        scale = float(packed.scales.astype(np.float32).max()) * packed.scale_factor
        if self.dtype == "float16" and scale * _LARGEST_VALUES[packed.values.dtype.name] > largest:
            self(name)  # raises an error if there is such a value
        return packed

    def stored(self, name: str, rows: slice | list[int]) -> QuantizedWeight | SuperBlocks | None:
        """Return rows of a quantized weight, as it is stored or (Q5_0) as 8-bit integers; None if it is in no format of the kernels."""
        blocks = self._checkpoint.super_blocks(name)
        if blocks is not None:
            return blocks.of_rows([rows])
        offset = self._checkpoint.offset_blocks(name)
        stored = self._quantized(name) if offset is None else offset.as_int8()
        return None if stored is None else stored.rows(rows)

    def _quantized(self, name: str) -> QuantizedWeight | None:
        """Return a quantized weight, or None. The last one is kept: q, k and v may be rows of it, and rounding it takes time."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._checkpoint.quantized_weight(name))
        return self._last[1]


class LayerWeights:
    """Weights of one layer by role, such as ``"q.weight"``, also where they are parts of a fused tensor, and updates of adapters."""

    def __init__(
        self,
        weights: Weights,
        model: ModelConfig,
        layer: int,
        updates: AdapterUpdates | None = None,
        products: PluginProducts | None = None,
    ) -> None:
        self.layer, self.updates, self.products = layer, updates, products
        self._weights = weights
        self._parts = layer_parts(model, layer)
        self._prefix = f"model.layers.{layer}"

    def __call__(self, role: str) -> np.ndarray[Any, Any]:
        """Return the weight of a role."""
        part = self._parts[role]
        return self._weights(part.tensor) if part.is_whole else self._weights(part.tensor, part.index)

    def exact(self, role: str) -> np.ndarray[Any, Any]:
        """Return a weight of a router, or attention sinks, in float32. Each is a tensor of its own."""
        return self._weights.exact(self._parts[role].tensor)

    def has(self, role: str) -> bool:
        """Return True if the layer has a weight of a role."""
        return role in self._parts

    def stored(self, role: str) -> QuantizedWeight | SuperBlocks | None:
        """Return the matrix of a role: see :meth:`Weights.stored`."""
        part = self._parts[role]
        return self._weights.stored(part.tensor, part.index)

    def matrix(self, role: str) -> np.ndarray[Any, Any] | PackedWeight:
        """Return the matrix of a role, packed if it is quantized."""
        part = self._parts[role]
        return self._weights.matrix(part.tensor, None if part.is_whole else part)

    def module(self, role: str) -> str:
        """Return the prefix of layer names for a role: the module of the stored weight, or of Llama for a fused tensor."""
        part = self._parts[f"{role}.weight"]
        return part.tensor.removesuffix(".weight") if part.is_whole else f"{self._prefix}.{LLAMA_NAMES.get(role, role)}"
