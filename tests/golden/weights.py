"""The weights of the golden models: made from a seed where they are needed, so that only logits are stored.

They come from the raw 64-bit output of a Philox generator, which is the same on every platform and in every version of NumPy
(distributions are not promised to be). ``tensors.json`` beside each model says which tensors it has.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

HERE = Path(__file__).parent
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_all() -> None:
    """Write the weights of every golden model beside its ``tensors.json``."""
    for index in sorted(HERE.glob("*/tensors.json")):
        write(index.parent)


def write(folder: Path) -> None:
    """Write the weights of one model: one file, or shards as their index says. Each appears complete or not at all."""
    index = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    shards = folder / "model.safetensors.index.json"
    place = json.loads(shards.read_text(encoding="utf-8"))["weight_map"] if shards.exists() else {}
    files: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name, shape in index["tensors"].items():
        values = random_values(index["seed"], name, tuple(shape))
        files.setdefault(place.get(name, "model.safetensors"), {})[name] = values.astype(np.float32).astype(DTYPES[index["dtype"]])
    for file, tensors in files.items():
        temporary = folder / f"{file}.{os.getpid()}"
        temporary.write_bytes(save(tensors, metadata={"format": "pt"}))
        os.replace(temporary, folder / file)


def random_values(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return values of one tensor, each kind with a spread at which it matters: attention is neither flat nor one-hot."""
    raw = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(int(np.prod(shape)))
    uniform = (raw >> np.uint64(11)).astype(np.float64).reshape(shape) / 2.0**53  # [0, 1)
    if "norm" in name:
        return 0.5 + uniform
    deviation = 0.5 if name.endswith(".bias") or "embed_tokens" in name else 1.0 / np.sqrt(shape[1])
    if "q_proj.weight" in name or "k_proj.weight" in name:
        deviation *= 1.5
    return (2.0 * uniform - 1.0) * np.sqrt(3.0) * deviation
