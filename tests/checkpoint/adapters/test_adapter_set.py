"""``AdapterSet``: updates of several adapters side by side, and adapters that only a merge supports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden.weights import SEEDS
from tests.helpers.adapters import Q_PROJ, edit_adapter, linear_shapes, tensors_of, write_adapter
from tests.helpers.assertions import assert_close, raises
from tests.helpers.models import model_of, write_model
from tests.paths import GOLDEN
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.weight_parts import layer_parts


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return Checkpoint.read_config(write_model(tmp_path / "model", num_hidden_layers=2))


def test_updates_of_several_adapters_are_side_by_side(model: ModelConfig, tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, rank=rank, seed=rank) for name, rank in (("a", 2), ("b", 64), ("c", 1))}
    adapters = AdapterSet.open(model, folders)
    update = adapters.layer_updates(model, 0)["q.weight"]
    assert adapters.layer_updates(model, 0).keys() == {"q.weight"}
    assert adapters.layer_updates(model, 1).keys() == {"down.weight"}
    assert update.owners == (1,) * 2 + (2,) * 64 + (3,)
    for number, (folder, rank) in enumerate(zip(folders.values(), (2, 64, 1), strict=True), start=1):
        own = [index for index, owner in enumerate(update.owners) if owner == number]
        a, b = (tensors_of(folder)[f"base_model.model.{Q_PROJ}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        assert_close(update.b[:, own] @ update.a[own], 7 / rank * (b @ a), 1e-6)
    assert adapters.nbytes("float16") == 2 * 67 * (96 + 40 + 40 + 28)
    assert adapters.names == ("a", "b", "c")


@pytest.mark.parametrize("name", SEEDS)
def test_rows_of_roles_are_those_of_the_merged_tensor(name: str, tmp_path: Path) -> None:
    """Fused tensors, head by head, and interleaved RoPE: the update of each role is the difference that a merge makes to it."""
    folder = GOLDEN / name
    with Checkpoint.open(folder) as base:
        model = base.config
        shapes = linear_shapes(model)
        adapter = write_adapter(tmp_path / "a", shapes, lora_alpha=1)
        adapters = AdapterSet.open(model, {"a": adapter})
        tensors = tensors_of(adapter)
        for index in range(model.num_layers):
            updates = adapters.layer_updates(model, index)
            adapted = {role: part for role, part in layer_parts(model, index).items() if part.tensor.removesuffix(".weight") in shapes}
            assert updates.keys() == adapted.keys()
            for role, part in adapted.items():
                module = part.tensor.removesuffix(".weight")
                a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
                assert_close(updates[role].b @ updates[role].a, (b @ a / 3)[part.index], 1e-5)
                assert updates[role].b.shape[0] == part.shape[0]


def test_a_higher_rank_is_merged(model: ModelConfig, tmp_path: Path) -> None:
    with raises(CheckpointError, "adapters['a']", "64", ("65", Q_PROJ), says="adapter="):
        AdapterSet.open(model, {"a": write_adapter(tmp_path / "a", rank=65)})


def test_dora_is_merged(model: ModelConfig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {Q_PROJ: (96, 40)}, use_dora=True)
    edit_adapter(folder, {**tensors_of(folder), f"base_model.model.{Q_PROJ}.lora_magnitude_vector": np.ones(96, np.float32)})
    with raises(CheckpointError, "adapters['a']", "linear layers", ("DoRA", Q_PROJ), says="adapter="):
        AdapterSet.open(model, {"a": folder})


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_the_head_and_the_embedding_are_merged(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    head = write_adapter(tmp_path / "head", {"lm_head": (model.vocab_size, model.hidden_size)})
    with raises(CheckpointError, "adapters['a']", "linear layers", ("lm_head", "language model head"), says="adapter="):
        AdapterSet.open(model, {"a": head})
    embedding, random = write_adapter(tmp_path / "embedding", {}, target_modules=["embed_tokens"]), np.random.default_rng(0)
    names = (f"base_model.model.model.embed_tokens.lora_embedding_{side}" for side in "AB")
    shapes = ((3, model.vocab_size), (model.hidden_size, 3))
    edit_adapter(embedding, {one: random.standard_normal(shape).astype(np.float32) for one, shape in zip(names, shapes, strict=True)})
    with raises(CheckpointError, "adapters['a']", "linear layers", "the embedding", says="adapter="):
        AdapterSet.open(model, {"a": embedding})


@pytest.mark.parametrize("fields", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=["modules_to_save", "bias"])
def test_tensors_in_full_are_merged(fields: dict[str, object], model: ModelConfig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", **fields)
    name = "lm_head.weight" if "bias" not in fields else "model.layers.0.self_attn.q_proj.base_layer.bias"
    edit_adapter(folder, {**tensors_of(folder), f"base_model.model.{name}": np.ones((37, 40) if "bias" not in fields else 96, np.float32)})
    with raises(CheckpointError, "adapters['a']", "linear layers", "modules_to_save", says="adapter="):
        AdapterSet.open(model, {"a": folder})


@pytest.mark.parametrize(("module", "is_router"), [("experts.1.w1", False), ("gate", True)])
def test_experts_and_their_router_are_merged(module: str, is_router: bool, tmp_path: Path) -> None:
    model = model_of("mixtral")
    shape = (model.layers[0].mlp.router.num_experts if is_router else model.layers[0].mlp.expert.intermediate_size, model.hidden_size)
    name = f"model.layers.0.block_sparse_moe.{module}"
    with raises(CheckpointError, "adapters['a']", "linear layers", (name, "router of experts" if is_router else "an expert")):
        AdapterSet.open(model, {"a": write_adapter(tmp_path / "a", {name: shape})})


def test_an_adapter_of_another_model(model: ModelConfig, tmp_path: Path) -> None:
    with raises(CheckpointError, str(tmp_path / "a"), says="expected modules"):
        AdapterSet.open(model, {"a": write_adapter(tmp_path / "a", {"model.layers.2.self_attn.q_proj": (96, 40)})})
    with raises(CheckpointError, str(tmp_path / "b"), says="expected an update of"):
        AdapterSet.open(model, {"a": write_adapter(tmp_path / "b", {Q_PROJ: (96, 41)})})
