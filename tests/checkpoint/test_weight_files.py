"""Which weight files a folder has: one, or shards with an index."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.folders import CopyOf, edit_tensors, refused


def test_missing_shard(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert f"{shard}: expected a shard that model.safetensors.index.json names, got nothing there" in refused(folder)


def test_shards_of_different_checkpoints(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    shard = "model-00002-of-00003.safetensors"
    edit_tensors(folder, lambda tensors: tensors.update(stray=np.ones(3, np.float16)), shard)
    assert f"{folder / shard}: holds 'stray', which model.safetensors.index.json does not place there" in refused(folder)


def test_index_that_names_a_tensor_its_shard_does_not_hold(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    shard = "model-00002-of-00003.safetensors"
    name = next(iter(load_file(folder / shard)))
    edit_tensors(folder, lambda tensors: tensors.pop(name), shard)
    assert f"{folder / shard}: model.safetensors.index.json places '{name}' there, but the file has no such tensor" in refused(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "expected an object `weight_map`"),
        ({"a": 3}, "expected an object `weight_map`"),
        ({"a": "../a.safetensors"}, "got '../a.safetensors'"),
    ],
)
def test_damaged_index(copy_of: CopyOf, weight_map: Any, message: str) -> None:
    folder = copy_of("qwen3-sharded")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert message in refused(folder)


def test_weights_in_another_format(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused(folder)
    assert f"{folder}: expected model.safetensors, or shards with model.safetensors.index.json, got neither" in message
    assert "must be converted to safetensors" in message


def test_weights_that_cannot_be_read(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    index = folder / "model.safetensors.index.json"
    index.write_bytes(b"\xff\xfe")
    assert f"{index}: cannot be read" in refused(folder)
