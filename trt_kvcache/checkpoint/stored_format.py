"""Quantized format of a model folder, before a checkpoint is opened."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_kvcache.checkpoint.gguf.model import GGUFModel
from trt_kvcache.checkpoint.gguf.weights import GGUFWeights
from trt_kvcache.checkpoint.quantized.format import QuantizedFormat
from trt_kvcache.checkpoint.quantized.gguf import GGUF, TYPES
from trt_kvcache.checkpoint.quantized.registry import quantized_format
from trt_kvcache.checkpoint.weight_files import gguf_path


def stored_format(data: Mapping[str, Any], folder: Path) -> QuantizedFormat | None:
    """Return the quantized format in ``config.json`` or in the GGUF file; None for plain weights. No weights are read."""
    file = gguf_path(folder)
    if file is None:
        return quantized_format(data, folder)
    weights = GGUFWeights(GGUFModel(file))
    dtypes = {tensor.dtype for tensor in weights.tensors.values()}
    return GGUF(dtypes, weights.dequantized.values()) if dtypes & set(TYPES) else None
