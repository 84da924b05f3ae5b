"""Draft heads of builds: which are opened, and the weights that they share with their model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.assertions import raises
from tests.helpers.eagle3 import write_head, write_model
from tests.helpers.mtp import write_mtp_model
from trt_kvcache import Checkpoint, estimate_build
from trt_kvcache.builder.draft_head import JoinedTensors
from trt_kvcache.errors import CheckpointError, ConfigError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_sharing_head(folder: Path, model: Path) -> Path:
    """Write an EAGLE-3 head whose embedding and language model head are those of the model."""
    head = write_head(folder, model, tokens=range(61))
    tensors = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in (HEAD, "d2t", "t2d")}, head / "model.safetensors")
    return head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_what_an_eagle3_head_lacks_is_that_of_its_model(tmp_path: Path, tied: bool, rounded: bool) -> None:
    quantize = None if not rounded else "int8,embedding=int8" if tied else "int8,embedding=int8,head=int8"
    model = write_model(tmp_path / "model", tie_word_embeddings=tied)
    head = write_sharing_head(tmp_path / "head", model)
    with Checkpoint.open(model, quantize=quantize) as of_model, Checkpoint.open_eagle3_head(head) as of_head:
        joined = JoinedTensors.of_head(of_head, of_model)
        for name, stored in ((EMBEDDING, EMBEDDING), (HEAD, EMBEDDING if tied else HEAD)):
            np.testing.assert_array_equal(joined.tensor(name), of_model.tensor(stored))
            assert (joined.quantized_weight(name) is None) == (quantize is None)
            joined.release(name)
        own = "model.layers.0.mlp.up_proj.weight"
        np.testing.assert_array_equal(joined.tensor(own), load_file(head / "model.safetensors")["midlayer.mlp.up_proj.weight"])
        assert joined.quantized_weight(own) is None
        reduced = JoinedTensors.of_model(of_model, of_head)
        np.testing.assert_array_equal(reduced.tensor("fc.weight"), of_head.tensor("fc.weight"))
        np.testing.assert_array_equal(reduced.tensor(EMBEDDING), of_model.tensor(EMBEDDING))


def test_heads_that_do_not_fit_are_refused_before_a_build(tmp_path: Path) -> None:
    """By estimates too, which check as builds do."""
    model = write_model(tmp_path / "model")
    with raises(ConfigError, "draft_head", expected="mtp or the folder of an EAGLE-3 head", got=str(model)):
        estimate_build(model, draft_head=model)
    narrow = write_head(tmp_path / "narrow", model, hidden_size=24, target_hidden_size=32)
    with raises(ConfigError, f"draft_head: {narrow}", expected="an embedding of width 24 in the files of the head", got="none"):
        estimate_build(model, draft_head=narrow)
    wide = write_head(tmp_path / "wide", model, hidden_size=40)
    with raises(ConfigError, f"draft_head: {wide}", expected="hidden size 32 of the model", got="40"):
        estimate_build(model, draft_head=wide)
    with pytest.raises(CheckpointError, match="for 'mtp', got llama"):
        estimate_build(model, draft_head="mtp")


def test_heads_with_experts_are_built_where_their_models_are(tmp_path: Path) -> None:
    """With plugin attention, which is not for heads of this size."""
    experts = {"family": "qwen3_5_moe", "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}
    models = {size: write_mtp_model(tmp_path / f"{size}", **experts, head_dim=size) for size in (16, 64)}
    found = estimate_build(models[64], draft_head="mtp", dtype="float16").draft_head
    assert found is not None
    with Checkpoint.open_mtp_head(models[64]) as head:
        assert found.weights_nbytes > head.nbytes // 2 - 4096
    with pytest.raises(ConfigError, match="got none: plugin: head_dim: expected one of"):
        estimate_build(models[16], draft_head="mtp", dtype="float16")
