"""``LoraAdapter``: folders that are incomplete, damaged or contradict themselves, and fingerprints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.adapters import DOWN_PROJ, Q_PROJ, Array, edit_adapter, tensors_of, write_adapter
from tests.helpers.assertions import raises
from trt_kvcache.checkpoint.adapters.lora_adapter import LoraAdapter
from trt_kvcache.errors import CheckpointError, ConfigError

A = f"base_model.model.{Q_PROJ}.lora_A.weight"
B = f"base_model.model.{Q_PROJ}.lora_B.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def test_an_update_has_b_left_and_a_right(folder: Path) -> None:
    adapter, tensors = LoraAdapter.open(folder), tensors_of(folder)
    assert set(adapter.updates) == {Q_PROJ, DOWN_PROJ}
    assert adapter.updates[Q_PROJ].shape == (96, 40)
    np.testing.assert_array_equal(adapter.updates[Q_PROJ].left, tensors[B])
    np.testing.assert_array_equal(adapter.updates[Q_PROJ].right, tensors[A])
    assert adapter.updates[Q_PROJ].scale == 7 / 3


@pytest.mark.parametrize("path", [None, 3, "", b"adapter"])
def test_a_folder_is_needed(path: Any) -> None:
    with raises(ConfigError, "adapter", "a folder of PEFT", repr(path)):
        LoraAdapter.open(path)


def test_an_absent_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    with raises(CheckpointError, "adapter", "a folder of PEFT", "absent"):
        LoraAdapter.open(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with raises(CheckpointError, "adapter", "a folder of PEFT", "a file"):
        LoraAdapter.open(tmp_path / "file")


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_both_files_are_needed(folder: Path, missing: str) -> None:
    (folder / missing).rename(folder / "adapter_model.bin")
    with raises(CheckpointError, str(folder), ("adapter_config.json", "adapter_model.safetensors"), "adapter_model.bin"):
        LoraAdapter.open(folder)


def test_a_refused_field_is_named_with_its_file(folder: Path) -> None:
    write_adapter(folder, lora_bias=True)
    with raises(CheckpointError, "lora_bias", "not set", "True", says="adapter_config.json"):
        LoraAdapter.open(folder)
    (folder / "adapter_config.json").write_text("[3]")
    with raises(CheckpointError, "adapter_config.json", "a JSON object", "list"):
        LoraAdapter.open(folder)


def without(name: str) -> Callable[[dict[str, Array]], object]:
    return lambda tensors: tensors.pop(name)


def with_tensor(name: str, value: Array) -> Callable[[dict[str, Array]], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("edit", "expected", "got"),
    [
        (without(B), B, "none"),
        (without(A), A, "none"),
        (lambda tensors: tensors.clear(), "base_model.model", "none"),
        (with_tensor(A, np.zeros((2, 40), np.float32)), (A, "(3, in)"), "(2, 40)"),
        (with_tensor(A, np.zeros((40, 3), np.float32)), (A, "(3, in)"), "(40, 3)"),
        (with_tensor(B, np.zeros((96, 2), np.float32)), (B, "(out, 3)"), "(96, 2)"),
        (with_tensor(B, np.zeros((96, 3, 1), np.float32)), B, "(96, 3, 1)"),
        (with_tensor(A, np.zeros((3, 40), np.int8)), "float16", A),
        (with_tensor(A, np.full((3, 40), np.nan, np.float32)), ("finite", A), "others"),
        (with_tensor(f"base_model.model.{Q_PROJ}x.base_layer.weight", np.zeros((3, 4), np.float32)), f"{Q_PROJ}x", "none"),
    ],
)
def test_other_tensors_are_refused(folder: Path, edit: Callable[[dict[str, Array]], object], expected: Any, got: str) -> None:
    tensors = tensors_of(folder)
    edit(tensors)
    edit_adapter(folder, tensors)
    with raises(CheckpointError, "adapter_model.safetensors", expected, got):
        LoraAdapter.open(folder)


@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.{Q_PROJ}.lora_magnitude_vector",
        f"base_model.model.{Q_PROJ}.lora_B.bias",
        "base_model.model.lm_head.weight",
        f"{Q_PROJ}.lora_A.weight",
    ],
)
def test_tensors_of_other_methods_are_refused(folder: Path, name: str) -> None:
    edit_adapter(folder, {**tensors_of(folder), name: np.zeros((3, 40), np.float32)})
    with raises(CheckpointError, "adapter_model.safetensors", ("base_model.model.MODULE", "lora_A.weight"), name):
        LoraAdapter.open(folder)


def test_a_module_that_is_not_targeted_is_refused(folder: Path) -> None:
    write_adapter(folder, target_modules=["down_proj", "o_proj"])
    with raises(CheckpointError, "adapter_model.safetensors", "adapter_config.json", Q_PROJ):
        LoraAdapter.open(folder)


def test_modules_to_save_are_there_once(folder: Path) -> None:
    write_adapter(folder, modules_to_save=["norm"])
    with raises(CheckpointError, "adapter_model.safetensors", "norm", "none"):
        LoraAdapter.open(folder)
    norm = np.ones(40, np.float32)
    edit_adapter(folder, {**tensors_of(folder), "base_model.model.model.norm.weight": norm})
    assert sorted(LoraAdapter.open(folder).changed) == [f"{Q_PROJ}.weight", f"{DOWN_PROJ}.weight", "model.norm.weight"]
    edit_adapter(folder, {**tensors_of(folder), "base_model.model.model.norm.base_layer.weight": norm})
    with raises(
        CheckpointError, "adapter_model.safetensors", ("model.norm.weight", "once"), "base_model.model.model.norm.base_layer.weight"
    ):
        LoraAdapter.open(folder)


def test_an_update_of_a_module_that_is_saved_whole_is_refused(folder: Path) -> None:
    write_adapter(folder, modules_to_save=["self_attn"])
    tensors = tensors_of(folder)
    edit_adapter(folder, {**tensors, f"base_model.model.{Q_PROJ}.weight": np.ones((96, 40), np.float32)})
    with raises(CheckpointError, "adapter_model.safetensors", "adapter_config.json", Q_PROJ):
        LoraAdapter.open(folder)


def test_a_module_cannot_be_a_linear_layer_and_an_embedding(folder: Path) -> None:
    more = {f"base_model.model.{Q_PROJ}.lora_embedding_A": np.zeros((3, 5), np.float32)}
    edit_adapter(folder, {**tensors_of(folder), **more, f"base_model.model.{Q_PROJ}.lora_embedding_B": np.zeros((7, 3), np.float32)})
    with raises(CheckpointError, "adapter_model.safetensors", ("one pair", Q_PROJ), "embedding"):
        LoraAdapter.open(folder)


@pytest.mark.parametrize(
    ("magnitude", "expected", "got"),
    [
        (None, f"base_model.model.{Q_PROJ}.lora_magnitude_vector", "none"),
        (np.ones(95, np.float32), "(96,)", "(95,)"),
        (np.full(96, np.inf, np.float32), "finite", "others"),
    ],
)
def test_dora_needs_a_magnitude_of_each_row(folder: Path, magnitude: Array | None, expected: str, got: str) -> None:
    write_adapter(folder, {Q_PROJ: (96, 40)}, use_dora=True)
    if magnitude is not None:
        edit_adapter(folder, {**tensors_of(folder), f"base_model.model.{Q_PROJ}.lora_magnitude_vector": magnitude})
    with raises(CheckpointError, "adapter_model.safetensors", expected, got):
        LoraAdapter.open(folder)


def test_dora_of_an_embedding_is_refused(folder: Path) -> None:
    write_adapter(folder, {Q_PROJ: (96, 40)}, use_dora=True)
    tensors = {f"base_model.model.model.embed_tokens.lora_embedding_{side}": np.zeros((3, 3), np.float32) for side in "AB"}
    edit_adapter(folder, tensors)
    with raises(
        CheckpointError, "adapter_model.safetensors", "lora_magnitude_vector", "base_model.model.model.embed_tokens.lora_embedding_A"
    ):
        LoraAdapter.open(folder)


def test_a_damaged_file_is_refused(folder: Path) -> None:
    content = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(content[:-5])
    with raises(CheckpointError, "adapter_model.safetensors", "a whole safetensors file"):
        LoraAdapter.open(folder)


def test_the_fingerprint_is_of_the_updates(folder: Path, tmp_path: Path) -> None:
    first = LoraAdapter.open(folder).fingerprint()
    same = write_adapter(tmp_path / "elsewhere", lora_dropout=0.3, base_model_name_or_path="another/name")
    assert LoraAdapter.open(same).fingerprint() == first
    others = [
        write_adapter(tmp_path / "alpha", lora_alpha=8),
        write_adapter(tmp_path / "seed", seed=1),
        write_adapter(tmp_path / "dtype", dtype=np.float16),
        write_adapter(tmp_path / "module", {Q_PROJ: (96, 40)}),
    ]
    assert len({first, *(LoraAdapter.open(other).fingerprint() for other in others)}) == 5
    tensors = tensors_of(folder)
    save_file(dict(reversed(tensors.items())), folder / "adapter_model.safetensors")
    assert LoraAdapter.open(folder).fingerprint() == first
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
