"""Fields of ``config.json`` as published checkpoints have them, beside those that decide how weights are read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.folders import Tensors, edit_config, edit_tensors, refused
from tests.helpers.quantized_models import (
    AWQ_CONFIG,
    CT_FP8,
    CT_INT4,
    CT_INT8,
    GPTQ_CONFIG,
    Quantize,
    awq,
    floats,
    gptq,
    integers,
    modelopt,
    write_quantized,
)
from trt_kvcache import InferenceSession
from trt_kvcache.checkpoint import Checkpoint

#: What AutoGPTQ and transformers write beside what is read.
OF_TRANSFORMERS = {
    "batch_size": 1,
    "block_name_to_quantize": None,
    "damp_percent": 0.01,
    "dataset": None,
    "exllama_config": {"version": 1},
    "modules_in_block_to_quantize": None,
    "static_groups": False,
    "true_sequential": True,
    "use_exllama": True,
}

#: What GPTQModel does.
OF_GPTQMODEL = {
    "checkpoint_format": "gptq",
    "dynamic": None,
    "hyb_act": False,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.0.0"], "damp_percent": 0.01},
    "pack_dtype": "int32",
    "static_groups": True,
}

ACTIVATIONS = {"actorder": None, "dynamic": True, "num_bits": 8, "observer": None, "strategy": "token", "symmetric": True, "type": "float"}

#: A group of llm-compressor with activations that are quantized as they come.
DYNAMIC = {
    **CT_FP8,
    "config_groups": {"group_0": {**CT_FP8["config_groups"]["group_0"], "input_activations": ACTIVATIONS, "format": "float-quantized"}},
    "format": "mixed-precision",
    "global_compression_ratio": 1.5,
    "ignore": ["re:.*lm_head", "re:visual.*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"},
    "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": []},
    "transform_config": {},
    "version": "0.11.0",
}


def of_regexes(config: dict[str, Any], *targets: str) -> dict[str, Any]:
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], "targets": list(targets)}}}


FIELDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq-of-transformers": (gptq(), {**GPTQ_CONFIG, **OF_TRANSFORMERS}),
    "gptq-of-gptqmodel": (gptq(order=True), {**GPTQ_CONFIG, **OF_GPTQMODEL, "desc_act": True}),
    "gptq-marlin-flag": (gptq(symmetric=True), {**GPTQ_CONFIG, "sym": True, "is_marlin_format": False}),
    "awq": (awq(), {**AWQ_CONFIG, "version": "GEMM", "modules_to_not_convert": ["lm_head"], "backend": "autoawq", "do_fuse": False}),
    "fp8-of-autofp8": (
        floats(None, None, scalar=True),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"},
    ),
    "fp8-of-ministral": (
        floats(None, None, "weight_scale_inv", scalar=True),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
    ),
    "compressed-dynamic": (floats(1, None), DYNAMIC),
    "compressed-frozen": (integers(8, None, packed=False, symmetric=True), {**CT_INT8, "quantization_status": "frozen"}),
    "compressed-regexes": (integers(4, 8, packed=True, symmetric=True), of_regexes(CT_INT4, "re:.*self_attn.*", "re:.*mlp.*_proj$")),
    "modelopt": (floats(None, None, scalar=True), modelopt("FP8", exclude_modules=["lm_head", "model.layers.9*"], producer={"name": "x"})),
}


def assert_values(folder: Path, values: Tensors) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*are not")
        with Checkpoint.open(folder) as checkpoint:
            assert checkpoint.weights.is_quantized
            for name in checkpoint.tensor_names:
                np.testing.assert_array_equal(checkpoint.tensor(name), values[name], err_msg=name)
        with InferenceSession.from_model(folder, engine="reference", max_sequence_length=16) as session:
            assert np.isfinite(session.prefill([[5, 6, 7]])).all()


@pytest.mark.parametrize("case", FIELDS)
def test_values_are_those_of_the_packing_rules(tmp_path: Path, case: str) -> None:
    quantize, config = FIELDS[case]
    assert_values(tmp_path / "model", write_quantized(tmp_path / "model", "llama", quantize, config))


def test_scales_of_activations_and_of_k_and_v_of_autofp8(tmp_path: Path) -> None:
    quantize, config = FIELDS["fp8-of-autofp8"]
    values = write_quantized(tmp_path / "model", "llama", quantize, config)
    more = {
        f"model.layers.0.{name}": np.ones((), np.float32) for name in ("mlp.up_proj.input_scale", "self_attn.kv_scale", "self_attn.k_scale")
    }
    edit_tensors(tmp_path / "model", lambda tensors: tensors.update(more))
    with pytest.warns(UserWarning, match="activations are not quantized, only weights are; scales of K and V are not read"):
        Checkpoint.open(tmp_path / "model")
    assert_values(tmp_path / "model", values)


def test_one_scale_of_fp8_must_be_there(tmp_path: Path) -> None:
    quantize, config = FIELDS["fp8-of-autofp8"]
    write_quantized(tmp_path / "model", "llama", quantize, config)
    edit_tensors(tmp_path / "model", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale"))
    assert "expected model.layers.1.mlp.up_proj.weight_scale_inv next to model.layers.1.mlp.up_proj.weight" in refused(tmp_path / "model")


def of_modules(first: Quantize, second: Quantize, outputs: int) -> Quantize:
    """Return a format that stores matrices of so many outputs in the second way."""
    return lambda weight, random: (second if len(weight) == outputs else first)(weight, random)


def plain(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
    return {"weight": weight}, weight


@pytest.mark.parametrize("prefix", ["", "+:"])
def test_modules_of_gptq_with_other_bits(tmp_path: Path, prefix: str) -> None:
    """``dynamic`` of GPTQModel: expressions for names of modules; the first one that matches counts."""
    dynamic = {f"{prefix}.*\\.mlp\\.(gate|up)_proj": {"bits": 8, "group_size": 4}, f"{prefix}.*up_proj": {"bits": 4}}
    quantize = of_modules(gptq(), gptq(bits=8, group_size=4), 40)
    values = write_quantized(tmp_path / "model", "llama", quantize, {**GPTQ_CONFIG, "dynamic": dynamic})
    assert {len(array) for name, array in values.items() if "gate_proj" in name or "up_proj" in name} == {40}
    assert_values(tmp_path / "model", values)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.weights.format == "GPTQ int4 in groups of 8 and int8 in groups of 4"
        assert checkpoint.value_kinds == {"uint4", "uint8"}
        before = checkpoint.fingerprint()
    edit_config(tmp_path / "model", quantization_config={**GPTQ_CONFIG, "dynamic": {**dynamic, "+:.*nothing": {"group_size": 16}}})
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.fingerprint() != before


def test_modules_that_gptq_leaves_out(tmp_path: Path) -> None:
    quantize = of_modules(gptq(), plain, 40)
    config = {**GPTQ_CONFIG, "dynamic": {"-:.*lm_head.*": {}, "-:.*(gate|up)_proj": {}}}
    assert_values(tmp_path / "model", write_quantized(tmp_path / "model", "llama", quantize, config))


def test_the_file_of_modelopt_alone(tmp_path: Path) -> None:
    values = write_quantized(tmp_path / "model", "llama", floats(None, None, scalar=True), {})
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    edit_tensors(tmp_path / "model", lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.input_scale": np.ones((), np.float32)}))
    assert_values(tmp_path / "model", values)


@pytest.mark.parametrize("algorithm", ["FP8", "MIXED_PRECISION"])
def test_modules_of_other_names(tmp_path: Path, algorithm: str) -> None:
    """Layers of Nemotron-H are called otherwise by the file and by this package."""
    quantize, config = floats(None, None, scalar=True), modelopt(algorithm)
    values = write_quantized(tmp_path / "model", "nemotron_h", quantize, config)
    stored = [name.removesuffix(".weight") for name, array in values.items() if "layers" in name and array.ndim == 2]
    if algorithm == "MIXED_PRECISION":
        layers = {name: {"quant_algo": "FP8"} for name in stored}
        edit_config(tmp_path / "model", quantization_config={**config, "quantized_layers": layers})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*are not")
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            assert len(checkpoint.quantized_names) == len(stored)


@pytest.mark.parametrize("write", [gptq(), awq()])
def test_a_file_of_its_own_says_how(tmp_path: Path, write: Callable[..., Any]) -> None:
    write_quantized(tmp_path / "model", "llama", write, {})
    assert "They are quantized, and config.json has no `quantization_config`: it may be in a file of its own." in refused(
        tmp_path / "model"
    )


def test_bfloat16_beside_float16_and_float32(tmp_path: Path) -> None:
    """A GPTQ checkpoint of a bfloat16 model: scales in float16, norms in float32."""
    values = write_quantized(tmp_path / "model", "llama", gptq(), {**GPTQ_CONFIG, **OF_TRANSFORMERS})
    edit_config(tmp_path / "model", dtype="bfloat16", torch_dtype="bfloat16")
    with pytest.warns(UserWarning, match="are converted to bfloat16"):
        checkpoint = Checkpoint.open(tmp_path / "model")
    with checkpoint:
        for name in ("model.norm.weight", "lm_head.weight"):
            np.testing.assert_array_equal(checkpoint.tensor(name), values[name].astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(checkpoint.tensor("model.layers.0.mlp.up_proj.weight"), values["model.layers.0.mlp.up_proj.weight"])
