"""Hugging Face folders of any size with random weights, written tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, tensor_shapes

_SAFETENSORS_NAME = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_CHUNK_ELEMENTS = 1 << 22


def write_random_model(folder: Path, config: Mapping[str, Any], *, seed: int = 0, head_factor: float = 1.0) -> Path:
    """Write a model folder: norms near 1, everything else normal with a standard deviation that keeps activations of order 1.

    ``folder`` is made here, its parent must be there; ``config`` is a ``config.json``; logits are multiplied with ``head_factor``.
    """
    model = ModelConfig.from_dict(dict(config))
    shapes = tensor_shapes(model)
    random = np.random.default_rng(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(shapes, model.dtype))
        for name, shape in shapes.items():
            mean, deviation = (1.0, 0.02) if name.endswith("norm.weight") else (0.0, 1 / math.sqrt(model.hidden_size))
            deviation *= head_factor if name == HEAD else 1
            for start in range(0, math.prod(shape), _CHUNK_ELEMENTS):
                count = min(_CHUNK_ELEMENTS, math.prod(shape) - start)
                values = random.standard_normal(count, np.float32) * np.float32(deviation) + np.float32(mean)
                file.write(values.astype(numpy_dtype(model.dtype)).tobytes())
    return folder


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * itemsize(dtype)
        entries[name] = {"dtype": _SAFETENSORS_NAME[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
