"""Checkpoints of quantized weights: what is checked, what fingerprints cover, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.folders import Tensors, edit_config, edit_tensors, load_file, refused
from tests.checkpoint.quantized.conftest import Folder
from tests.helpers.assertions import raises
from tests.helpers.quantized_models import ALL_CASES, AWQ_CONFIG, FP8_CONFIG, GPTQ_CONFIG
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized.registry import FORMATS
from trt_kvcache.errors import CheckpointError

Made = Callable[..., Folder]

MODULE = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("case", ALL_CASES)
def test_sizes_are_those_of_what_is_stored(made: Made, case: str) -> None:
    folder = made(case)
    stored = load_file(folder.path / "model.safetensors")
    with folder.open() as checkpoint:
        weights = checkpoint.weights
        assert weights.is_quantized
        assert checkpoint.nbytes == weights.nbytes == sum(array.nbytes for array in stored.values())
        assert weights.nbytes - weights.step_nbytes == stored["model.embed_tokens.weight"].nbytes
        assert weights.nbytes < sum(array.nbytes for array in folder.values.values())


@pytest.mark.parametrize(
    ("case", "title"),
    [
        ("gptq", "GPTQ int4 in groups of 8"),
        ("gptq-order", "GPTQ int4 in groups of 8, act-order"),
        ("gptq-8-bits", "GPTQ int8 in groups of 4"),
        ("awq", "AWQ int4 in groups of 8"),
        ("fp8-blocks", "FP8 (e4m3) in blocks of 16 x 12"),
    ],
)
def test_the_format_is_named(made: Made, case: str, title: str) -> None:
    with made(case).open() as checkpoint:
        assert checkpoint.weights.format == title


def test_fp8_with_quantized_activations_is_read_as_weights_only(made: Made) -> None:
    folder = made("fp8-blocks")
    edit_tensors(folder.path, lambda tensors: tensors.update({f"{MODULE}.input_scale": np.ones(1, np.float32)}))
    with pytest.warns(UserWarning, match=r"weights are FP8 .*: activations are not quantized, only weights are"):
        Checkpoint.open(folder.path).close()


@pytest.mark.parametrize("case", ["gptq", "awq", "fp8-blocks"])
def test_fingerprints_cover_every_packed_tensor(made: Made, case: str) -> None:
    folder = made(case)
    with folder.open() as checkpoint:
        seen = {checkpoint.fingerprint()}
        reports: list[tuple[int, int]] = []
        checkpoint.fingerprint(lambda done, total: reports.append((done, total)))
        assert reports[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    parts = [name for name in load_file(folder.path / "model.safetensors") if name.startswith(f"{MODULE}.")]
    for part in parts:

        def flip(tensors: Tensors, part: str = part) -> None:
            tensors[part].reshape(-1).view(np.uint8)[0] ^= 1

        edit_tensors(folder.path, flip)
        with folder.open() as checkpoint:
            seen.add(checkpoint.fingerprint())
    assert len(seen) == 1 + len(parts)


def test_fingerprints_see_how_tensors_are_read(made: Made) -> None:
    folder = made("gptq")
    with folder.open() as checkpoint:
        before = checkpoint.fingerprint()
    edit_config(folder.path, quantization_config={**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"})
    with folder.open() as checkpoint:
        assert checkpoint.fingerprint() != before


def test_fields_of_the_config_that_decide_nothing_do_not_change_the_fingerprint(made: Made) -> None:
    folder = made("gptq")
    with folder.open() as checkpoint:
        before = checkpoint.fingerprint()
    edit_config(folder.path, quantization_config={**GPTQ_CONFIG, "damp_percent": 0.1, "model_file_base_name": "model"})
    with folder.open() as checkpoint:
        assert checkpoint.fingerprint() == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method: expected one of gptq, awq, "),
        ({"quant_method": "bitsandbytes"}, "got 'bitsandbytes'. Its 16 values are no multiples of a scale; take a GPTQ or AWQ"),
        ({"quant_method": ["gptq"]}, "got ['gptq']"),
        ({"bits": 4}, "quantization_config.quant_method: expected one of"),
        ([1], "quantization_config: expected an object, got [1]."),
        ({**GPTQ_CONFIG, "bits": 3}, "quantization_config.bits: expected 4 or 8, got 3."),
        ({**GPTQ_CONFIG, "bits": True}, "quantization_config.bits: expected 4 or 8, got True."),
        ({**GPTQ_CONFIG, "group_size": 0}, "quantization_config.group_size: expected an integer from 1 to"),
        (
            {**GPTQ_CONFIG, "group_size": None},
            "quantization_config.group_size: expected a positive integer, or -1 for one group, got none.",
        ),
        ({**GPTQ_CONFIG, "group_size": 7}, "qzeros of shape (5, 4), as GPTQ int4 in groups of 7 stores it"),
        ({**GPTQ_CONFIG, "group_size": 16}, "Bits or group size of `quantization_config` may belong to another checkpoint."),
        ({**GPTQ_CONFIG, "checkpoint_format": "marlin"}, "checkpoint_format: expected 'gptq' or 'gptq_v2', got 'marlin'."),
        ({**GPTQ_CONFIG, "sym": "yes"}, "quantization_config.sym: expected true or false, got 'yes'."),
        ({**GPTQ_CONFIG, "dynamic": ["-:.*down.*"]}, "quantization_config.dynamic: expected an object of objects, got ['-:.*down.*']."),
        ({**GPTQ_CONFIG, "dynamic": {"+:.*down": {"bits": 3}}}, "quantization_config.bits: expected 4 or 8, got 3."),
        ({**GPTQ_CONFIG, "dynamic": {".*(": {}}}, "quantization_config.dynamic['.*(']: expected a regular expression, got '.*(': "),
        ({**AWQ_CONFIG}, f"expected {MODULE.replace('1', '0')}.qweight of shape (32, 4), as AWQ int4 in groups of 8 stores it"),
        ({**AWQ_CONFIG, "version": "gemv"}, "quantization_config.version: expected 'gemm', got 'gemv'."),
        ({**AWQ_CONFIG, "bits": 8}, "quantization_config.bits: expected 4, got 8."),
        ({**AWQ_CONFIG, "zero_point": False}, "quantization_config.zero_point: expected True, got False."),
        ({**FP8_CONFIG, "weight_block_size": [128]}, "weight_block_size: expected two sizes, as [128, 128], got [128]."),
        ({**FP8_CONFIG, "weight_block_size": [0, 4]}, "quantization_config.weight_block_size[0]: expected an integer from 1"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "quantization_config.fmt: expected 'e4m3', got 'e5m2'."),
        ({**FP8_CONFIG}, "As FP8 (e4m3) in blocks of 16 x 12, it would be there with .weight in its place."),
    ],
)
def test_configurations_that_are_refused(made: Made, config: Any, message: str) -> None:
    folder = made("gptq")
    edit_config(folder.path, quantization_config=config)
    assert message in refused(folder.path)


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        (
            "gptq",
            lambda t: t.pop(f"{MODULE}.scales"),
            f"expected {MODULE}.scales next to {MODULE}.qweight, got nothing there. Weights of GPTQ",
        ),
        ("gptq-order", lambda t: t.pop(f"{MODULE}.g_idx"), f"expected {MODULE}.g_idx next to"),
        (
            "gptq",
            lambda t: t.pop(f"{MODULE}.qweight"),
            f"1 tensor(s) of a llama model are missing: {MODULE}.weight. As GPTQ int4 in groups",
        ),
        (
            "gptq",
            lambda t: t.update({f"{MODULE}.scales": np.ascontiguousarray(t[f"{MODULE}.scales"].T)}),
            f"expected {MODULE}.scales of shape (4, 32), as GPTQ int4 in groups of 8 stores it by config.json, got (32, 4).",
        ),
        (
            "gptq",
            lambda t: t.update({f"{MODULE}.qweight": t[f"{MODULE}.qweight"].astype(np.int64)}),
            f"expected {MODULE}.qweight in I32, as GPTQ int4 in groups of 8 stores it, got I64.",
        ),
        ("awq", lambda t: t.update({f"{MODULE}.qzeros": t[f"{MODULE}.qzeros"][:-1]}), f"expected {MODULE}.qzeros of shape (4, 4)"),
        (
            "fp8-blocks",
            lambda t: t.update({f"{MODULE}.weight_scale_inv": np.ones((2, 2), np.float32)}),
            f"expected {MODULE}.weight_scale_inv of shape (2, 3)",
        ),
        ("fp8-blocks", lambda t: t.pop(f"{MODULE}.weight_scale_inv"), f"expected {MODULE}.weight_scale_inv next to {MODULE}.weight"),
        (
            "gptq",
            lambda t: t.update({f"{MODULE}.bias": np.ones(32, np.float16)}),
            f"1 tensor(s) that a llama model by config.json does not use: {MODULE}.bias",
        ),
        ("gptq", lambda t: t.update({"model.norm.qweight": np.ones(32, np.int32)}), "does not use: model.norm.qweight"),
    ],
)
def test_tensors_that_are_refused(made: Made, case: str, edit: Callable[[Tensors], object], message: str) -> None:
    folder = made(case)
    edit_tensors(folder.path, edit)
    assert message in refused(folder.path)


def test_biases_of_zeros_that_autogptq_stores_are_left_out(made: Made) -> None:
    folder = made("gptq")
    with folder.open() as checkpoint:
        before = checkpoint.fingerprint()
    edit_tensors(folder.path, lambda tensors: tensors.update({f"{MODULE}.bias": np.zeros(32, np.float16)}))
    with folder.open() as checkpoint:
        assert checkpoint.fingerprint() == before


def test_symmetric_zero_points_of_the_other_version_are_refused(made: Made) -> None:
    folder = made("gptq-symmetric")
    edit_config(folder.path, quantization_config={**GPTQ_CONFIG, "sym": True, "checkpoint_format": "gptq_v2"})
    with folder.open() as checkpoint, pytest.raises(CheckpointError, match=r"expected 'gptq' by the zero points .* all 7 instead of 8"):
        checkpoint.tensor(f"{MODULE}.weight")


def test_groups_that_do_not_exist_are_refused(made: Made) -> None:
    folder = made("gptq-order")
    edit_tensors(folder.path, lambda tensors: tensors[f"{MODULE}.g_idx"].__setitem__(3, 4))
    with folder.open() as checkpoint, raises(CheckpointError, f"{MODULE}.g_idx", expected="groups from 0 to 3", got="0 to 4"):
        checkpoint.tensor(f"{MODULE}.weight")


def test_scales_that_are_not_finite_are_refused(made: Made) -> None:
    folder = made("awq")
    edit_tensors(folder.path, lambda tensors: tensors[f"{MODULE}.scales"].__setitem__((1, 2), np.nan))
    with folder.open() as checkpoint, pytest.raises(CheckpointError, match=r"expected finite values of .*q_proj\.weight, got others"):
        checkpoint.tensor(f"{MODULE}.weight")


@pytest.mark.parametrize("case", ALL_CASES)
def test_codes_are_of_the_kinds_that_the_format_names(made: Made, case: str) -> None:
    _, config = ALL_CASES[case]
    with made(case).open() as checkpoint:
        assert checkpoint.value_kinds <= set(FORMATS[config["quant_method"]].kinds)
