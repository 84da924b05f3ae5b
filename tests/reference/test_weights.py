from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError
from trt_kvcache.reference.weights import load_weights

from .rig import GOLDEN


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("model", ["llama", "llama-linear", "llama-bfloat16-old"])
def test_values_are_those_that_the_dtype_holds(model: str, dtype: str) -> None:
    with Checkpoint.open(GOLDEN / model) as checkpoint:
        weights = load_weights(checkpoint, dtype)
        stored = checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
        up = weights.layers[1].up.weight
        assert up.dtype == np.float32
        np.testing.assert_array_equal(up, stored.astype(numpy_dtype(dtype)).astype(np.float32))


def test_float32_in_float32_is_not_copied() -> None:
    with Checkpoint.open(GOLDEN / "llama") as checkpoint:
        weights = load_weights(checkpoint, "float32")
        assert np.shares_memory(weights.head, checkpoint.tensor("lm_head.weight"))


def test_every_part_is_where_it_belongs() -> None:
    with Checkpoint.open(GOLDEN / "llama-llama3-bias") as checkpoint:
        weights = load_weights(checkpoint, "float16")
        prefix = "model.layers.1."
        layer = weights.layers[1]
        for array, name in (
            (layer.input_norm.weight, "input_layernorm.weight"),
            (layer.mlp_norm.weight, "post_attention_layernorm.weight"),
            (layer.q.bias, "self_attn.q_proj.bias"),
            (layer.o.weight, "self_attn.o_proj.weight"),
            (layer.down.bias, "mlp.down_proj.bias"),
        ):
            np.testing.assert_array_equal(array, checkpoint.tensor(prefix + name))
        assert layer.q_norm is None
        assert layer.k_norm is None


def test_a_tied_head_is_the_embedding() -> None:
    with Checkpoint.open(GOLDEN / "qwen2-tied") as checkpoint:
        weights = load_weights(checkpoint, "float32")
        assert weights.head is weights.embedding


def test_a_value_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        load_weights(checkpoint, "bfloat16")
        with pytest.raises(CheckpointError, match=r"llama: model\.norm\.weight has values that float16 cannot hold"):
            load_weights(checkpoint, "float16")


def test_progress() -> None:
    reports: list[tuple[int, int]] = []
    with Checkpoint.open(GOLDEN / "qwen3-sharded") as checkpoint:
        load_weights(checkpoint, "float32", lambda done, total: reports.append((done, total)))
        assert reports == sorted(reports)
        assert reports[-1] == (checkpoint.nbytes, checkpoint.nbytes)
        assert len(reports) == len(checkpoint.tensor_names)
