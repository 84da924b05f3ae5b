"""Checkpoints with one stacked tensor for all experts of a layer, the form of transformers 5, beside those with one tensor per expert."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.paths import GOLDEN
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import CheckpointError

Tensors = dict[str, np.ndarray[Any, Any]]

NAMES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def stack(model: str, tensors: Tensors) -> Tensors:
    """Return tensors with the experts of each layer stacked, under the names that transformers 5 has for them."""
    gate, up, down = NAMES[model]
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    found = {name: tensor for name, tensor in renamed.items() if ".experts." not in name}
    for layer in {match[1] for match in map(re.compile(r"(.+\.experts)\.").match, renamed) if match}:
        experts = range(sum(name.startswith(layer) and name.endswith(f".{down}.weight") for name in renamed))
        gates_and_ups = [[renamed[f"{layer}.{expert}.{name}.weight"] for name in (gate, up)] for expert in experts]
        found[f"{layer}.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in gates_and_ups])
        found[f"{layer}.down_proj"] = np.stack([renamed[f"{layer}.{expert}.{down}.weight"] for expert in experts])
    return found


def write(folder: Path, model: str, change: Callable[[Tensors], Any] = lambda tensors: None, **fields: Any) -> Path:
    """Write a golden model with stacked experts, changed."""
    tensors = stack(model, load_file(GOLDEN / model / "model.safetensors"))
    change(tensors)
    folder.mkdir()
    config = json.loads((GOLDEN / model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("model", NAMES)
def test_stacked_experts_are_the_same_model(model: str, tmp_path: Path) -> None:
    with Checkpoint.open(GOLDEN / model) as split, Checkpoint.open(write(tmp_path / "stacked", model)) as stacked:
        assert stacked.tensor_names == split.tensor_names
        for name in split.tensor_names:
            np.testing.assert_array_equal(stacked.tensor(name), split.tensor(name))
            assert not stacked.tensor(name).flags.owndata, "a view of the file"
            stacked.release(name)
        assert stacked.fingerprint() == split.fingerprint()
        assert stacked.nbytes == split.nbytes


def test_stacked_experts_are_rounded_as_single_ones(tmp_path: Path) -> None:
    folder = write(tmp_path / "stacked", "qwen3_moe")
    with Checkpoint.open(GOLDEN / "qwen3_moe", quantize="int8") as split, Checkpoint.open(folder, quantize="int8") as stacked:
        name = "model.layers.1.mlp.experts.5.up_proj.weight"
        assert name in split.quantized_names
        np.testing.assert_array_equal(stacked.tensor(name), split.tensor(name))


def write_gpt_oss(folder: Path, model: str, change: Callable[[Tensors], Any] = lambda tensors: None, **fields: Any) -> Path:
    """Write a golden gpt-oss, which has its experts stacked, changed."""
    tensors = load_file(GOLDEN / model / "model.safetensors")
    change(tensors)
    folder.mkdir()
    config = json.loads((GOLDEN / model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(tensors, folder / "model.safetensors")
    return folder


EXPERTS = "model.layers.1.mlp.experts"


def test_experts_of_gpt_oss_are_transposed_and_interleaved() -> None:
    stored = load_file(GOLDEN / "gpt_oss" / "model.safetensors")
    with Checkpoint.open(GOLDEN / "gpt_oss") as checkpoint:
        for expert in range(7):
            for name, columns in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
                values = checkpoint.tensor(f"{EXPERTS}.{expert}.{name}_proj.weight")
                np.testing.assert_array_equal(values, stored[f"{EXPERTS}.gate_up_proj"][expert][:, columns].T)
                bias = checkpoint.tensor(f"{EXPERTS}.{expert}.{name}_proj.bias")
                np.testing.assert_array_equal(bias, stored[f"{EXPERTS}.gate_up_proj_bias"][expert][columns])
            values = checkpoint.tensor(f"{EXPERTS}.{expert}.down_proj.weight")
            np.testing.assert_array_equal(values, stored[f"{EXPERTS}.down_proj"][expert].T)
            assert not values.flags.owndata, "a view of the file"
            checkpoint.release(f"{EXPERTS}.{expert}.down_proj.weight")
            np.testing.assert_array_equal(values, stored[f"{EXPERTS}.down_proj"][expert].T)
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in stored.values())


def test_packed_experts_of_gpt_oss_are_rows_in_turns() -> None:
    stored = load_file(GOLDEN / "gpt_oss-mxfp4" / "model.safetensors")
    with Checkpoint.open(GOLDEN / "gpt_oss-mxfp4") as checkpoint:
        assert checkpoint.value_kinds == {"e2m1"}
        for name, first in (("gate", 0), ("up", 1)):
            weight = checkpoint.quantized_weight(f"{EXPERTS}.3.{name}_proj.weight")
            assert weight is not None
            blocks, scales = (stored[f"{EXPERTS}.gate_up_proj_{part}"][3, first::2] for part in ("blocks", "scales"))
            np.testing.assert_array_equal(weight.unpacked()[:, ::2], blocks.reshape(32, 32) & 15)
            np.testing.assert_array_equal(weight.scales_of_rows(), np.exp2(scales.astype(np.float32) - 127))
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in stored.values())
        assert len(checkpoint.fingerprint()) == 64


def test_experts_of_gpt_oss_are_rounded() -> None:
    with Checkpoint.open(GOLDEN / "gpt_oss") as exact, Checkpoint.open(GOLDEN / "gpt_oss", quantize="int8") as rounded:
        name = f"{EXPERTS}.5.up_proj.weight"
        assert name in rounded.quantized_names
        assert "model.layers.1.mlp.router.weight" not in rounded.quantized_names
        np.testing.assert_allclose(rounded.tensor(name), exact.tensor(name).astype(np.float32), atol=0.01)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            "gpt_oss",
            lambda t: t.update({f"{EXPERTS}.down_proj": t[f"{EXPERTS}.down_proj"].swapaxes(1, 2).copy()}),
            r"down_proj of shape \(7, 44, 40\) by config.json, got \(7, 40, 44\)",
        ),
        (
            "gpt_oss",
            lambda t: t.update({f"{EXPERTS}.gate_up_proj_bias": t[f"{EXPERTS}.gate_up_proj_bias"][:, 1:].copy()}),
            r"gate_up_proj_bias of shape \(7, 88\) by config.json, got \(7, 87\)",
        ),
        ("gpt_oss", lambda t: t.pop("model.layers.2.self_attn.sinks"), "are missing: model.layers.2.self_attn.sinks"),
        (
            "gpt_oss",
            lambda t: t.update({"model.layers.2.self_attn.sinks": np.zeros(5, np.float16)}),
            r"self_attn.sinks of shape \(4,\) by config.json, got \(5,\)",
        ),
        ("gpt_oss-mxfp4", lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), "expected .*experts.0.down_proj.weight_scales next to"),
        ("gpt_oss-mxfp4", lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"), "are missing: .*experts.0.down_proj.weight"),
        (
            "gpt_oss-mxfp4",
            lambda t: t.update({f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"][..., :8].copy()}),
            r"down_proj.weight_blocks of shape \(64, 1, 16\), as MXFP4 stores it by config.json, got \(64, 1, 8\)",
        ),
        (
            "gpt_oss-mxfp4",
            lambda t: t.update({f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"][:, :, :0].copy()}),
            r"down_proj.weight_blocks of shape \(64, 1, 16\), as MXFP4 stores it by config.json, got \(64, 0, 16\)",
        ),
        (
            "gpt_oss-mxfp4",
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].astype(np.float32)}),
            "weight_scales in U8 or F8_E8M0, as MXFP4 stores it, got float32",
        ),
        (
            "gpt_oss-mxfp4",
            lambda t: t.update({f"{EXPERTS}.gate_up_proj_scales": t[f"{EXPERTS}.gate_up_proj_scales"][:, 0].copy()}),
            r"gate_up_proj_scales of shape \(5, 64\) by config.json, got \(5, 2\)",
        ),
    ],
)
def test_damaged_experts_of_gpt_oss(model: str, change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(write_gpt_oss(tmp_path / "damaged", model, change))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            ["model.layers.*.experts"],
            r"modules_to_not_convert: expected no packed .*0.gate_proj with 'model.layers.\*.experts'",
        ),
        ("lm_head", "modules_to_not_convert: expected a list of names, got 'lm_head'"),
        ([7], r"modules_to_not_convert: expected a list of names, got \[7\]"),
        (["("], "modules_to_not_convert: expected a regular expression, got '\\('"),
    ],
)
def test_modules_that_mxfp4_leaves_as_they_are(kept: Any, message: str, tmp_path: Path) -> None:
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(write_gpt_oss(tmp_path / "kept", "gpt_oss-mxfp4", quantization_config=quantization))


def test_packed_experts_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"are missing: model.layers.0.mlp.experts.0.gate_proj.weight"):
        Checkpoint.open(write_gpt_oss(tmp_path / "plain", "gpt_oss-mxfp4", quantization_config=None))


GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP][1:]}),
            r"gate_up_proj of shape \(7, 48, 40\) by config.json, got \(6, 48, 40\)",
        ),
        (
            lambda tensors: tensors.update({DOWN: np.swapaxes(tensors[DOWN], 1, 2).copy()}),
            r"shape \(7, 40, 24\) by config.json, got \(7, 24, 40\)",
        ),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN][0]}), r"of shape \(7, 40, 24\) by config.json, got \(40, 24\)"),
        (
            lambda tensors: tensors.pop(DOWN),
            r"7 tensor\(s\) of a qwen3_moe model are missing: model.layers.1.mlp.experts.0.down_proj.weight, ",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.2.down_proj.weight": tensors[DOWN][2]}),
            r"expected each expert of a qwen3_moe model once, got .*\.experts\.down_proj and .*\.experts\.2\.down_proj\.weight",
        ),
        (
            lambda tensors: tensors.update({DOWN.replace("1", "3"): tensors[DOWN]}),
            r"1 tensor\(s\) that a qwen3_moe model by config.json does not use: model.layers.3.mlp.experts.down_proj",
        ),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].astype(np.int8)}), "experts.0.down_proj.weight in I8"),
    ],
)
def test_damaged_stacks(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "damaged", "qwen3_moe", change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_a_stack_in_a_layer_without_experts_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor\(s\) .* are missing: model.layers.1.mlp.gate_proj.weight"):
        Checkpoint.open(write(tmp_path / "dense", "qwen3_moe", mlp_only_layers=[1]))
