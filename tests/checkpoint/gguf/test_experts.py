"""Experts of GGUF files: one tensor of a layer as tensors of single experts, their types of blocks, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from tests.checkpoint.folders import edit_config, refused
from tests.golden.weights import write as write_weights
from tests.paths import GOLDEN
from trt_kvcache import Checkpoint
from trt_kvcache.checkpoint.gguf.header import GGUFHeader
from trt_kvcache.errors import CheckpointError

from .convert import Config, Gemma4, Tensors, convert

Edit = Callable[[gguf.GGUFWriter], object]


def stored_values(path: Path, name: str) -> np.ndarray:
    """Return the values of a tensor by the ``gguf`` package."""
    found = GGUFHeader(path).tensors[name]
    kind = gguf.GGMLQuantizationType[found.kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.frombuffer(found.mapping, np.uint8, found.nbytes, found.offset).reshape(*found.shape[:-1], found.shape[-1] // block * nbytes)
    return gguf.quants.dequantize(rows, kind)


def experts(checkpoint: Checkpoint, part: str, count: int) -> np.ndarray:
    return np.stack([checkpoint.tensor(f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight") for expert in range(count)])


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_mxfp4_stays_packed(tmp_path: Path, part: str) -> None:
    path = convert(GOLDEN / "gpt_oss-mxfp4", tmp_path / "model.gguf", kind="MXFP4")
    with Checkpoint.open(path) as checkpoint, Checkpoint.open(GOLDEN / "gpt_oss-mxfp4") as folder:
        name = f"model.layers.1.mlp.experts.3.{part}_proj.weight"
        assert checkpoint.weights.format == "GGUF MXFP4"
        assert checkpoint.value_kinds == {"e2m1"}
        assert checkpoint.nbytes_of(name) == folder.nbytes_of(name)
        found = experts(checkpoint, part, 5)
        np.testing.assert_array_equal(found, stored_values(path, f"blk.1.ffn_{part}_exps.weight"))
        np.testing.assert_array_equal(found, experts(folder, part, 5))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_integers_stay_packed(tmp_path: Path, kind: str) -> None:
    path = convert(GOLDEN / "gpt_oss-mxfp4", tmp_path / "model.gguf", kind=kind)
    with Checkpoint.open(path) as checkpoint:
        name = "model.layers.1.mlp.experts.3.gate_proj.weight"
        assert name in checkpoint.quantized_names
        np.testing.assert_array_equal(experts(checkpoint, "gate", 5), stored_values(path, "blk.1.ffn_gate_exps.weight"))


def test_gate_and_up_in_one_tensor_stay_packed(tmp_path: Path) -> None:
    folder = tmp_path / "gemma4-experts"  # whose inputs are whole blocks
    shutil.copytree(GOLDEN / folder.name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    edit_config(folder, hidden_size=64, moe_intermediate_size=32)
    write_weights(folder)
    path = convert(folder, tmp_path / "model.gguf", kind="Q8_0")
    with Checkpoint.open(path) as checkpoint:
        names = [[f"model.layers.1.experts.{expert}.{part}_proj.weight" for part in ("gate", "up")] for expert in range(7)]
        assert {name for both in names for name in both} <= {*checkpoint.quantized_names}
        found = np.stack([np.concatenate([checkpoint.tensor(name) for name in both]) for both in names])
        np.testing.assert_array_equal(found, stored_values(path, "blk.1.ffn_gate_up_exps.weight"))


def test_gate_and_up_in_tensors_of_their_own(tmp_path: Path) -> None:
    """llama.cpp reads both forms."""

    class Split(Gemma4):
        def tensors(self, tensors: Tensors, config: Config) -> Tensors:
            found: Tensors = {}
            for name, tensor in super().tensors(tensors, config).items():
                layer, _, part = name.partition(".experts.gate_up_proj")
                if not part:
                    found[name] = tensor
                else:
                    block = f"blk.{layer.split('.')[2]}.ffn"
                    found[f"{block}_gate_exps.weight"], found[f"{block}_up_exps.weight"] = np.split(tensor, 2, axis=1)
            return found

    path = convert(GOLDEN / "gemma4-experts", tmp_path / "model.gguf", architecture=Split())
    with Checkpoint.open(path) as split, Checkpoint.open(GOLDEN / "gemma4-experts") as folder:
        for name in (name for name in folder.tensor_names if ".experts." in name):
            np.testing.assert_array_equal(split.tensor(name), folder.tensor(name).astype(np.float32))


@pytest.mark.filterwarnings("ignore:.*dequantized when they are read")
def test_other_types_are_dequantized(tmp_path: Path) -> None:
    path = convert(GOLDEN / "gpt_oss-mxfp4", tmp_path / "model.gguf", kind="Q5_0")
    with Checkpoint.open(path) as checkpoint:
        assert not checkpoint.quantized_names
        np.testing.assert_array_equal(experts(checkpoint, "down", 5), stored_values(path, "blk.1.ffn_down_exps.weight"))


def test_a_file_without_rope_scaling_has_none(tmp_path: Path) -> None:
    """Other than a config.json without it, which is published with YaRN."""

    def remove(writer: gguf.GGUFWriter) -> None:
        for name in [name for name in writer.kv_data[0] if ".rope.scaling." in name]:
            del writer.kv_data[0][name]

    path = convert(GOLDEN / "gpt_oss-mxfp4", tmp_path / "model.gguf", kind="MXFP4", edit=remove)
    assert {mixer.rope.kind for mixer in Checkpoint.read_config(path).attention_layers if mixer.rope is not None} == {"default"}


def put(key: str, value: int | float | bool | None, kind: gguf.GGUFValueType = gguf.GGUFValueType.UINT32) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, kind)

    return edit


@pytest.mark.parametrize(
    ("model", "edit", "expected"),
    [
        ("qwen3_moe", put("qwen3moe.expert_count", 6), r"expected blk.0.ffn_\w+_exps.weight of 6 experts, got the shape \(7, "),
        ("qwen3_moe", put("qwen3moe.expert_count", 0), r"expected blk.0.ffn_\w+_exps.weight of 0 experts, got the shape \(7, "),
        ("qwen3_moe", put("qwen3moe.expert_count", None), "qwen3moe.expert_count: expected an integer"),
        ("qwen3_moe", put("qwen3moe.expert_used_count", None), "qwen3moe.expert_used_count: expected an integer"),
        ("qwen3_moe", put("qwen3moe.expert_used_count", 8), "num_experts_per_tok: expected at most the number of experts, 7, got 8"),
        ("qwen3_moe", put("qwen3moe.expert_gating_func", 2), "qwen3moe.expert_gating_func: expected none, or 1, got 2"),
        ("qwen3_moe", put("qwen3moe.expert_shared_count", 1), "qwen3moe.expert_shared_count: expected none, or 0, got 1"),
        ("qwen3_moe", put("qwen3moe.expert_group_count", 4), "qwen3moe.expert_group_count: expected none, or 1, got 4"),
        (
            "qwen3_moe",
            put("qwen3moe.expert_weights_scale", 2.5, gguf.GGUFValueType.FLOAT32),
            "qwen3moe.expert_weights_scale: expected none, or 1, got 2.5",
        ),
        (
            "qwen3_moe",
            put("qwen3moe.expert_weights_norm", False, gguf.GGUFValueType.BOOL),
            "qwen3moe.expert_weights_norm: expected none, or true, got False",
        ),
        ("gpt_oss-mxfp4", put("gpt-oss.expert_feed_forward_length", 64), r"experts.0.gate_proj.weight of shape .*64.*got .*32"),
        ("gpt_oss-mxfp4", put("gpt-oss.expert_feed_forward_length", None), "gpt-oss.expert_feed_forward_length: expected an integer"),
        ("gemma4-experts", put("gemma4.expert_count", 6), r"expected blk.0.ffn_\w+_exps.weight of 6 experts, got the shape \(7, "),
        ("gemma4-experts", put("gemma4.expert_used_count", 8), "top_k_experts: expected at most the number of experts, 7, got 8"),
        ("gemma4-experts", put("gemma4.expert_feed_forward_length", None), "gemma4.expert_feed_forward_length: expected an integer"),
        ("gemma4-experts", put("gemma4.expert_gating_func", 2), "gemma4.expert_gating_func: expected none, or 1, got 2"),
        ("llama", put("llama.expert_count", 8), "llama.expert_count: a llama model with mixture of experts is not supported, got 8"),
    ],
)
def test_refusals(tmp_path: Path, model: str, edit: Edit, expected: str) -> None:
    path = convert(GOLDEN / model, tmp_path / "model.gguf", kind="MXFP4" if "mxfp4" in model else "F32", edit=edit)
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint.open(path)
    assert refused(path)
