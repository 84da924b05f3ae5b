"""Golden folders that a test may change, and what opening them says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.errors import CheckpointError

CopyOf = Callable[[str], Path]
Tensors = dict[str, np.ndarray[Any, Any]]

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))


def load_file(path: Path) -> Tensors:
    """Read tensors of every dtype, which the NumPy interface of safetensors does not."""
    file = SafetensorsFile(path)
    return {name: file.array(name).copy() for name in file.tensors}


def edit_tensors(folder: Path, edit: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file)


def unshard(folder: Path) -> None:
    """Merge the shards of a folder into one file."""
    tensors: Tensors = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    return str(error.value)
