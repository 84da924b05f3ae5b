"""What compressed-tensors, ModelOpt and MXFP4 describe and is not read; and the file of ModelOpt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.folders import Tensors, edit_config, edit_tensors, refused
from tests.checkpoint.quantized.conftest import Folder
from tests.helpers.quantized_models import CT_FP8, CT_INT4, CT_NVFP4, modelopt
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import CheckpointError

Made = Callable[..., Folder]

MODULE = "model.layers.0.self_attn.q_proj"


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with other weights."""
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


def in_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with another group."""
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], **changes}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CT_INT4, "format": "marlin-24"}, "quantization_config.format: expected 'pack-quantized' or "),
        ({**CT_INT4, "quantization_status": "initialized"}, "quantization_status: expected 'compressed' or 'frozen', got 'initialized'."),
        (in_group(CT_INT4, targets=["re:.*[mlp"]), "config_groups.group_0.targets: expected a regular expression, got '.*[mlp': "),
        ({**CT_INT4, "config_groups": {}}, "quantization_config.config_groups: expected an object of groups, got {}."),
        ({**CT_INT4, "config_groups": {"a": {"targets": ["Linear"]}}}, "config_groups.a.weights: expected an object, got None."),
        ({**CT_INT4, "transform_config": {"config_groups": {"u": {}}}}, "quantization_config.transform_config: expected nothing, got"),
        ({**CT_INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "quantization_config.sparsity_config: expected nothing"),
        (changed(CT_INT4, num_bits=3), "config_groups.group_0.weights.num_bits: expected 4 or 8, got 3."),
        (
            changed(CT_INT4, strategy="attn_head"),
            "weights.strategy: expected 'tensor' or 'channel' or 'group' or 'block', got 'attn_head'.",
        ),
        (changed(CT_INT4, type="float"), "config_groups.group_0.weights.type: expected the one of pack-quantized, got 'float'."),
        (changed(CT_INT4, group_size=None), "quantization_config.group_size: expected a positive integer"),
        (
            changed(CT_INT4, group_size=12),
            f"expected {MODULE}.weight_scale of shape (32, 3), as compressed-tensors int4 (pack-quantized) in",
        ),
        (changed(CT_INT4, symmetric=False), f"expected {MODULE}.weight_zero_point next to {MODULE}.weight_packed, got nothing there."),
        (changed(CT_INT4, actorder="group"), f"expected {MODULE}.weight_g_idx next to"),
        (changed(CT_FP8, symmetric=False), "weights.symmetric: expected True, got False."),
        (changed(CT_NVFP4, group_size=32), "weights.group_size: expected 16, got 32."),
        (modelopt("FP8_PB_WO"), "quantization.quant_algo: expected one of FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4, W4A16_AWQ, MIXED_PRECISION"),
        (modelopt("MIXED_PRECISION"), "quantization.quantized_layers: expected an object for each module, got {}."),
        (modelopt("W4A16_AWQ", group_size="8"), "quantization.group_size: expected a positive integer, got '8'."),
    ],
)
def test_configurations_that_are_refused(made: Made, config: dict[str, Any], message: str) -> None:
    folder = made("compressed-int4")
    edit_config(folder.path, quantization_config=config)
    assert message in refused(folder.path)


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("compressed-int4", lambda t: t.pop(f"{MODULE}.weight_scale"), f"expected {MODULE}.weight_scale next to {MODULE}.weight_packed"),
        (
            "compressed-int4",
            lambda t: t.update({f"{MODULE}.weight_scale": t[f"{MODULE}.weight_scale"].T.copy()}),
            f"expected {MODULE}.weight_scale of shape (32, 4), as compressed-tensors int4 (pack-quantized) in groups of 8 stores it",
        ),
        ("modelopt-nvfp4", lambda t: t.pop(f"{MODULE}.weight_scale_2"), f"expected {MODULE}.weight_scale_2 next to {MODULE}.weight"),
        (
            "modelopt-nvfp4",
            lambda t: t.update({f"{MODULE}.weight_scale": t[f"{MODULE}.weight_scale"].astype(np.float32)}),
            f"expected {MODULE}.weight_scale in F8_E4M3, as ModelOpt NVFP4 stores it, got float32.",
        ),
        ("mxfp4", lambda t: t.update({f"{MODULE}.weight_blocks": t[f"{MODULE}.weight_blocks"][:, :, :8].copy()}), "of shape (64, 1, 16)"),
    ],
)
def test_tensors_that_are_refused(made: Made, case: str, edit: Callable[[Tensors], object], message: str) -> None:
    folder = made(case)
    edit_tensors(folder.path, edit)
    assert message in refused(folder.path)


@pytest.mark.parametrize(
    ("case", "name", "value", "message"),
    [
        ("compressed-int4", "weight_shape", np.array([32, 31]), r"weight_shape: expected \[32, 32\], got \[32, 31\]"),
        ("compressed-int4-order", "weight_g_idx", np.full(32, 4, np.int32), "weight_g_idx: expected groups from 0 to 3, got 4 to 4"),
        ("compressed-nvfp4", "weight_global_scale", np.zeros(1, np.float32), "weight_global_scale: expected a finite number > 0, got 0"),
        ("modelopt-nvfp4", "weight_scale_2", np.array(-0.5, np.float32), "weight_scale_2: expected a finite number >= 0, got -0.5"),
        ("modelopt-nvfp4", "weight_scale_2", np.array(np.inf, np.float32), "weight_scale_2: expected a finite number >= 0, got inf"),
        ("mxfp4", "weight_scales", np.full((96, 1), 255, np.uint8), "expected finite values of"),
    ],
)
def test_values_that_are_refused(made: Made, case: str, name: str, value: Any, message: str) -> None:
    folder = made(case)
    edit_tensors(folder.path, lambda tensors: tensors.update({f"{MODULE}.{name}": np.resize(value, tensors[f"{MODULE}.{name}"].shape)}))
    if case == "mxfp4":
        edit_tensors(folder.path, lambda tensors: tensors[f"{MODULE}.{name}"].fill(255))
    with folder.open() as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{MODULE}.weight")


def test_an_order_of_minus_one_is_none(made: Made) -> None:
    folder = made("compressed-int4")
    edit_tensors(folder.path, lambda tensors: tensors.update({f"{MODULE}.weight_g_idx": np.full(32, -1, np.int32)}))
    with folder.open() as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor(f"{MODULE}.weight"), folder.values[f"{MODULE}.weight"])


def test_modules_of_several_groups_have_each_their_own(made: Made) -> None:
    """A group that names modules goes before that of all linear ones."""
    folder = made("compressed-int4")
    group = CT_INT4["config_groups"]["group_0"]
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": group, "group_1": {"targets": ["re:.*q_proj$"], "weights": int8, "format": "int-quantized"}}
    edit_config(folder.path, quantization_config={**CT_INT4, "config_groups": groups})

    def as_int8(tensors: Tensors) -> None:
        for layer in range(2):
            module = f"model.layers.{layer}.self_attn.q_proj"
            for part in ("weight_packed", "weight_shape"):
                del tensors[f"{module}.{part}"]
            tensors |= {f"{module}.weight": np.full((32, 32), -3, np.int8), f"{module}.weight_scale": np.full((32, 1), 0.5, np.float32)}

    edit_tensors(folder.path, as_int8)
    with folder.open() as checkpoint:
        assert set(checkpoint.tensor(f"{MODULE}.weight").flat) == {-1.5}
        np.testing.assert_array_equal(
            checkpoint.tensor(MODULE.replace("q_", "k_") + ".weight"), folder.values[MODULE.replace("q_", "k_") + ".weight"]
        )


def test_the_file_of_modelopt(made: Made) -> None:
    folder = made("modelopt-fp8")
    edit_config(folder.path, quantization_config=...)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder.path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    edit_tensors(folder.path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": np.ones((), np.float32)}))
    with pytest.warns(UserWarning, match=r"activations are not quantized, only weights are\.$"):
        checkpoint = Checkpoint.open(folder.path)
    with checkpoint:
        assert checkpoint.weights.format == "ModelOpt FP8 (e4m3), one scale a matrix"
        assert folder.path / "hf_quant_config.json" in checkpoint.files
        np.testing.assert_array_equal(checkpoint.tensor(f"{MODULE}.weight"), folder.values[f"{MODULE}.weight"])


def test_mixed_precision_of_modelopt(made: Made) -> None:
    folder = made("modelopt-int4")
    with folder.open() as checkpoint:
        modules = [name.removesuffix(".weight") for name in checkpoint.tensor_names if checkpoint.quantized_weight(name)]
    layers = {module: {"quant_algo": "W4A16_AWQ", "group_size": 8} for module in modules}
    edit_config(
        folder.path, quantization_config=modelopt("MIXED_PRECISION", quantized_layers={**layers, modules[0]: {"quant_algo": "FP8"}})
    )
    assert f"expected {MODULE}.weight in F8_E4M3, as ModelOpt FP8 (e4m3), one scale a matrix and int4 (AWQ) stores it, got U8." in refused(
        folder.path
    )
    del layers[modules[0]]
    edit_config(folder.path, quantization_config=modelopt("MIXED_PRECISION", quantized_layers=layers))
    assert f"expected {MODULE} among the modules, as it is quantized, got none." in refused(folder.path)
