"""Which weight files a folder has: one, or shards with an index."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.folders import CopyOf, Tensors, edit_tensors, refused
from trt_kvcache.checkpoint import Checkpoint


def test_missing_shard(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert f"{shard}: expected a shard that model.safetensors.index.json names, got nothing there" in refused(folder)


def test_an_index_with_a_name_that_no_file_can_have(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    index.write_text(json.dumps({**found, "weight_map": dict.fromkeys(found["weight_map"], "x" * 300)}))
    assert "expected a shard that model.safetensors.index.json names, got nothing there" in refused(folder)


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
    ("name", "stored", "meant", "others"),
    [
        ("qwen3_5", "model.language_model.", "model.", ("mtp.fc.weight", "model.visual.patch_embed.proj.weight")),
        ("nemotron_h", "backbone.", "model.", ("mtp.layers.0.norm.weight",)),
        ("mamba2", "backbone.embedding.", "backbone.embeddings.", ()),
    ],
)
def test_names_of_other_versions_and_weights_of_other_parts(
    copy_of: CopyOf, name: str, stored: str, meant: str, others: tuple[str, ...]
) -> None:
    folder = copy_of(name)
    with Checkpoint.open(folder) as checkpoint:
        expected, fingerprint = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names}, checkpoint.fingerprint()

    def rename(tensors: Tensors) -> None:
        for old in [name for name in tensors if name.startswith(meant)]:
            tensors[stored + old.removeprefix(meant)] = tensors.pop(old)
        tensors.update(dict.fromkeys(others, np.ones(3, np.float16)))

    edit_tensors(folder, rename)
    with Checkpoint.open(folder) as checkpoint:
        for tensor_name, values in expected.items():
            np.testing.assert_array_equal(checkpoint.tensor(tensor_name), values)
        assert (set(checkpoint.tensor_names), checkpoint.fingerprint()) == (set(expected), fingerprint)


def test_two_names_of_one_tensor(copy_of: CopyOf) -> None:
    folder = copy_of("nemotron_h")
    edit_tensors(folder, lambda tensors: tensors.update({"backbone.norm_f.weight": np.ones(32, np.float16)}))
    text = f"{folder}: expected one tensor model.norm_f.weight of a nemotron_h model, got "
    assert refused(folder).startswith(text)


def test_heads_that_draft_tokens_are_extra_in_other_families(copy_of: CopyOf) -> None:
    folder = copy_of("llama")
    edit_tensors(folder, lambda tensors: tensors.update({"mtp.fc.weight": np.ones(3, np.float32)}))
    assert "that a llama model by config.json does not use: mtp.fc.weight" in refused(folder)


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
    assert f"{folder}: expected model.safetensors, or shards with model.safetensors.index.json, got " in message
    assert "pytorch_model.bin. Weights in another format" in message
    assert "must be converted to safetensors" in message


def test_weights_that_cannot_be_read(copy_of: CopyOf) -> None:
    folder = copy_of("qwen3-sharded")
    index = folder / "model.safetensors.index.json"
    index.write_bytes(b"\xff\xfe")
    assert f"{index}: cannot be read" in refused(folder)


def test_tensors_of_k_and_v_are_left_out_in_layers_that_read_those_of_another_one(copy_of: CopyOf) -> None:
    folder = copy_of("gemma4-shared")
    tensors = {f"model.layers.5.self_attn.{name}.weight": np.ones(3, np.float16) for name in ("k_proj", "v_proj", "k_norm")}
    edit_tensors(folder, lambda stored: stored.update(tensors))
    with Checkpoint.open(folder) as checkpoint:
        assert not tensors.keys() & set(checkpoint.tensor_names)


@pytest.mark.parametrize("stray", ["model.layers.2.self_attn.v_proj.weight", "model.layers.5.self_attn.k_proj_2.weight"])
def test_other_tensors_of_such_a_model_are_not(copy_of: CopyOf, stray: str) -> None:
    folder = copy_of("gemma4-shared")
    edit_tensors(folder, lambda stored: stored.update({stray: np.ones(3, np.float16)}))
    assert f"that a gemma4_text model by config.json does not use: {stray}" in refused(folder)
