"""Engines with packed weights, built by TensorRT for RTX: their size, their GPUs, and the engines that open their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.models import write_model
from tests.helpers.quantized_models import (
    AWQ_CONFIG,
    CT_FP8,
    FP4_CASES,
    FP8_CONFIG,
    GPTQ_CONFIG,
    awq,
    floats,
    fp8_blocks,
    gptq,
    write_quantized,
)
from tests.sweeps import each_once
from trt_kvcache import InferenceSession, build_engine, estimate_build
from trt_kvcache.builder.build_engine import BuildReport
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import CheckpointError, ConfigError

pytestmark = [pytest.mark.trt, pytest.mark.filterwarnings("ignore:(?s).*are not")]

BATCH: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 32, "max_prefill_length": 8}
SIZES: dict[str, Any] = {**BATCH, "flavour": "tensorrt_rtx"}

#: Linear layers of 26 MB in 16 bits, and little else.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 16384, "head_dim": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("wide") / "model", **WIDE)


@pytest.fixture(scope="module")
def dense(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    return build_engine(wide, tmp_path_factory.mktemp("dense") / "engine", **SIZES)


def assert_packed(report: BuildReport, dense: BuildReport) -> None:
    """The plan must be smaller by what packing saves: a tenth of the weights may be kernels for other types."""
    saved = dense.weights_nbytes - report.weights_nbytes
    assert report.plan_nbytes < dense.plan_nbytes - saved + dense.weights_nbytes / 10


@pytest.mark.parametrize(
    ("quantize", "part", "attention"), each_once([("int8", 0.51), ("int4", 0.29), ("int4:128", 0.27)], ["native", "plugin"])
)
def test_weights_stay_packed(wide: Path, dense: BuildReport, tmp_path: Path, quantize: str, part: float, attention: str) -> None:
    report = build_engine(wide, tmp_path / "engine", **SIZES, quantize=quantize, attention=attention)
    assert report.weights_nbytes < part * dense.weights_nbytes
    assert_packed(report, dense)
    assert estimate_build(wide, max_batch_size=2, max_sequence_length=32, quantize=quantize).weights_nbytes == report.weights_nbytes


@pytest.mark.parametrize(
    ("quantize", "config"),
    [
        pytest.param(gptq(group_size=32), {**GPTQ_CONFIG, "group_size": 32}, marks=pytest.mark.slow, id="gptq"),
        pytest.param(gptq(group_size=32, order=True), {**GPTQ_CONFIG, "group_size": 32, "desc_act": True}, id="gptq-order"),
        pytest.param(awq(group_size=32), {**AWQ_CONFIG, "group_size": 32}, marks=pytest.mark.slow, id="awq"),
        pytest.param(floats(1, None), CT_FP8, id="fp8"),
    ],
)
def test_checkpoints_stay_packed(wide: Path, dense: BuildReport, tmp_path: Path, quantize: Any, config: dict[str, Any]) -> None:
    write_quantized(tmp_path / "model", str(wide), quantize, config)
    assert_packed(build_engine(tmp_path / "model", tmp_path / "engine", **SIZES), dense)


@pytest.mark.parametrize("form", ["int4:128", *(pytest.param(form, marks=pytest.mark.slow) for form in ("fp8", "gptq"))])
def test_weights_whose_last_group_is_smaller_stay_packed(tmp_path: Path, form: str) -> None:
    model = write_model(tmp_path / "model", hidden_size=320, intermediate_size=16320, head_dim=64)
    dense = build_engine(model, tmp_path / "dense", **SIZES)
    packed: dict[str, Any] = {
        "fp8": (fp8_blocks(block=(128, 128)), {**FP8_CONFIG, "weight_block_size": [128, 128]}),
        "gptq": (gptq(group_size=128), {**GPTQ_CONFIG, "group_size": 128}),
    }
    if form in packed:
        write_quantized(tmp_path / "quantized", str(model), *packed[form])
        assert_packed(build_engine(tmp_path / "quantized", tmp_path / "engine", **SIZES), dense)
    else:
        assert_packed(build_engine(model, tmp_path / "engine", **SIZES, quantize=form), dense)


@pytest.mark.parametrize("case", [pytest.param("modelopt-nvfp4", marks=pytest.mark.slow), "mxfp4"])
def test_fp4_takes_half_of_int8(wide: Path, tmp_path: Path, case: str) -> None:
    quantize, config = FP4_CASES[case]
    write_quantized(tmp_path / "model", str(wide), quantize, {**config, "modules_to_not_convert": ["lm_head"]})
    sizes = [
        build_engine(tmp_path / "model", tmp_path / "engine", **SIZES, compute_capabilities=capabilities).plan_nbytes
        for capabilities in (("12.0",), ("8.9", "12.0"))
    ]
    weights = 3 * WIDE["hidden_size"] * WIDE["intermediate_size"]  # of the MLP
    assert sizes[1] - sizes[0] > 0.45 * weights
    estimates = [estimate_build(tmp_path / "model", **BATCH, compute_capabilities=capabilities) for capabilities in (("12.0",), None)]
    assert [one.plan_nbytes for one in estimates] == [pytest.approx(size, rel=0.2) for size in sizes]


def small(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.mark.parametrize(
    ("quantize", "capabilities"), [("int4", ("8.0", "8.6", "8.9", "12.0", "12.1")), ("int8", None), ("int8,head=int4", ("8.0",))]
)
def test_the_gpus_that_have_the_type_are_named(tmp_path: Path, quantize: str, capabilities: tuple[str, ...] | None) -> None:
    build_engine(small(tmp_path), tmp_path / "engine", **SIZES, quantize=quantize)
    config = EngineFolder.open(tmp_path / "engine").config
    if capabilities is None:
        assert config.compute_capabilities is None
    else:
        assert set(capabilities) <= set(config.compute_capabilities or ())
        assert "7.5" not in (config.compute_capabilities or ())


def test_a_gpu_without_the_type_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "compute_capabilities", expected="8.0 or more for weights in int4", got="7.5"):
        build_engine(small(tmp_path), tmp_path / "engine", **SIZES, quantize="int4", compute_capabilities=("8.6", "7.5"))
    assert not (tmp_path / "engine").exists()


def test_fp8_begins_at_another_gpu(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", str(write_model(tmp_path / "small", hidden_size=64, head_dim=16)), floats(1, None), CT_FP8)
    with pytest.raises(ConfigError, match=r"expected 8\.9 or more for weights in float8_e4m3fn, got 8\.6\."):
        build_engine(tmp_path / "model", tmp_path / "engine", **SIZES, compute_capabilities=("8.6",))


def logits(session: InferenceSession) -> np.ndarray[Any, Any]:
    with session:
        return session.prefill([[5, 6, 7, 9, 3, 11]])


def test_the_reference_engine_opens_the_folder_with_the_same_weights(tmp_path: Path) -> None:
    model = small(tmp_path)
    build_engine(model, tmp_path / "engine", **SIZES, quantize="int4,head=int8")
    record = EngineFolder.open(tmp_path / "engine").config.checkpoint
    assert record.quantize == "int4:32,head=int8"
    assert record.weights == "int4 in groups of 32 (rounded to nearest) and int8 by output (rounded to nearest)"
    options: dict[str, Any] = {"engine": "reference", "max_sequence_length": 32, "max_prefill_length": 8}
    found = logits(InferenceSession.open(tmp_path / "engine", engine="reference"))
    np.testing.assert_array_equal(found, logits(InferenceSession.from_model(model, **options, quantize="int4,head=int8")))
    assert (found != logits(InferenceSession.from_model(model, **options))).any()


def test_the_fingerprint_covers_the_rounding(tmp_path: Path) -> None:
    model = small(tmp_path)
    found = set()
    for quantize in (None, "int8", "int4", "int4,head=int8"):
        with Checkpoint.open(model, quantize=quantize) as checkpoint:
            found.add(checkpoint.fingerprint())
    assert len(found) == 4


def test_quantized_weights_are_not_rounded_again(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", "llama", gptq(), GPTQ_CONFIG)
    with raises(CheckpointError, "quantize", expected="checkpoint in 16 or 32 bits", got="GPTQ int4 in groups of 8"):
        build_engine(tmp_path / "model", tmp_path / "engine", **SIZES, quantize="int8")
