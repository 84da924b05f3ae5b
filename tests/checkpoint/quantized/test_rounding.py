"""Rounding to the nearest integers of a scale: ``Quantization``, the codes, and which weights of a model are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from tests.checkpoint.folders import edit_tensors
from tests.checkpoint.quantized.test_engines import logits
from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.helpers.quantized_models import write_values
from trt_kvcache import InferenceSession
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized import rounding
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_nbytes
from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.errors import ConfigError, KVCacheError

RNG = np.random.default_rng(5)

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


#: Each scheme: the inputs of a group (None for all), what its largest magnitude is divided by, and the least and largest code.
INT4 = (8, 7, 7.5, 8.5, 9)
RULES: dict[str, Any] = {"int8": (None, (127,), -127, 127), "int4:32": (32, INT4, -8, 7), "int4:128": (128, INT4, -8, 7)}

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def candidates(group: Any, divisors: Any, low: int, high: int, dtype: Any) -> list[tuple[float, Any, list[int]]]:
    """The rule, written down a second time: squared error, scale and codes of each divisor."""
    found = []
    for divisor in divisors:
        scale = (np.float32(max(abs(x) for x in group)) / np.float32(divisor)).astype(dtype)
        codes = [int(min(max(np.rint(np.float32(x) / np.float32(scale)), low), high)) for x in group]
        found.append((sum((code * float(scale) - float(x)) ** 2 for code, x in zip(codes, group, strict=True)), scale, codes))
    return found


def squared_errors(values: Any, found: QuantizedWeight, group: int) -> Any:
    """The squared error of each group of a rounded matrix, ``[out, groups]``."""
    squares = np.square(found.dequantized().astype(np.float64) - values.astype(np.float64))
    return np.stack([squares[:, first : first + group].sum(axis=1) for first in range(0, values.shape[1], group)], axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", RULES)
@pytest.mark.parametrize("inputs", [128, 136, 40, 13])
def test_codes_and_scales(monkeypatch: pytest.MonkeyPatch, scheme: str, inputs: int, dtype: Any) -> None:
    """The last group of inputs may be smaller, and the last byte of a row half empty."""
    monkeypatch.setattr(rounding, "_CHUNK", 2 * inputs + 1)  # two rows, then one
    values = RNG.normal(size=(5, inputs)).astype(dtype)
    found = rounded_to_nearest(values, scheme, np.dtype(dtype).name)
    group, *rule = RULES[scheme]
    group = group or inputs
    chosen = [
        [min(candidates(row[first : first + group], *rule, dtype), key=lambda one: one[0]) for first in range(0, inputs, group)]
        for row in values
    ]
    scales = np.array([[one[1] for one in row] for row in chosen], dtype)
    codes = np.array([[code for one in row for code in one[2]] for row in chosen])
    np.testing.assert_array_equal(found.quantized_values.unpacked(), codes)
    np.testing.assert_array_equal(found.scales.stored, scales)
    spread = np.repeat(scales.astype(np.float32), group, axis=1)[:, :inputs]
    np.testing.assert_array_equal(found.dequantized(), codes.astype(np.float32) * spread)
    assert found.quantized_values.nbytes == 5 * (-(-inputs // 2) if scheme.startswith("int4") else inputs)
    assert found.quantized_values.nbytes + found.scales.stored.nbytes == rounded_nbytes((5, inputs), scheme, np.dtype(dtype).name)


@given(
    values=arrays(np.float16, (2, 40), elements=st.floats(-65504, 65504, width=16) | st.floats(-(2.0**-19), 2.0**-19, width=16)),
    scheme=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from(DTYPES),
)
def test_no_divisor_has_a_smaller_error(values: Any, scheme: str, dtype: Any) -> None:
    """For values of all sizes: the choice is the best, however near to the ends of the dtype, and codes are the nearest."""
    values = values.astype(dtype)
    found = rounded_to_nearest(values, scheme, np.dtype(dtype).name)
    group, divisors, low, high = RULES[scheme]
    group = group or 40
    codes, scales, errors = found.quantized_values.unpacked(), found.scales.stored.astype(np.float32), squared_errors(values, found, group)
    assert np.isfinite(found.dequantized(np.dtype(dtype).name).astype(np.float32)).all()
    for row, block in np.ndindex(scales.shape):
        part = slice(block * group, (block + 1) * group)
        if not values[row, part].any():
            assert scales[row, block] == errors[row, block] == 0
            continue
        assert scales[row, block] > 0
        nearest = np.clip(np.rint(values[row, part].astype(np.float32) / scales[row, block]), low, high)
        np.testing.assert_array_equal(codes[row, part], nearest)
        with np.errstate(divide="ignore", invalid="ignore"):
            allowed = [error for error, scale, _ in candidates_in_range(values[row, part], divisors, low, high, dtype)]
        rounding_of_float32 = 1e-6 * np.abs(values[row, part].astype(np.float64)).max()
        assert np.sqrt(errors[row, block]) <= np.sqrt(min(allowed, default=np.inf)) + rounding_of_float32


def candidates_in_range(group: Any, divisors: Any, low: int, high: int, dtype: Any) -> list[tuple[float, Any, list[int]]]:
    """Those whose scale is not 0, and whose values the dtype holds."""
    scales = [(np.float32(max(abs(x) for x in group)) / np.float32(divisor)).astype(dtype) for divisor in divisors]
    found = candidates(group, [divisor for divisor, scale in zip(divisors, scales, strict=True) if scale > 0], low, high, dtype)
    with np.errstate(over="ignore"):
        return [one for one in found if np.isfinite(np.array([code * np.float32(one[1]) for code in one[2]]).astype(dtype)).all()]


@pytest.mark.parametrize("group", [32, 128])
def test_smaller_errors_than_with_the_largest_magnitude_over_8(group: int) -> None:
    values = RNG.normal(size=(400, 512)).astype(ml_dtypes.bfloat16)
    found = squared_errors(values, rounded_to_nearest(values, f"int4:{group}", "bfloat16"), group)
    before = [
        [candidates(row[first : first + group], (8,), -8, 7, ml_dtypes.bfloat16)[0][0] for first in range(0, 512, group)] for row in values
    ]
    assert (found <= np.array(before) * (1 + 1e-6)).all()
    assert found.sum() < {32: 0.89, 128: 0.95}[group] * np.sum(before)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("others", [(-1 / 3, 0, 1 / 2), [code / 7.5 for code in range(1, 7)]], ids=["", "best with 7.5"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_every_number_of_a_dtype_as_the_largest(monkeypatch: pytest.MonkeyPatch, scheme: str, dtype: Any, others: Any, sign: int) -> None:
    """Or, for float32, every bfloat16 and the end. Rows of very different size are rounded apart."""
    monkeypatch.setattr(rounding, "_CHUNK", 1 << 12)
    short = ml_dtypes.bfloat16 if dtype == np.float32 else dtype
    numbers = np.arange(1, np.array(np.inf, short).view(np.uint16), dtype=np.uint16).view(short).astype(np.float32)
    numbers[-1] = ml_dtypes.finfo(dtype).max
    values = (sign * numbers[:, None] * np.array([1, *others], np.float32)).astype(dtype)
    found = rounded_to_nearest(values, scheme, np.dtype(dtype).name)
    dequantized = found.dequantized(np.dtype(dtype).name).astype(np.float32)
    assert np.isfinite(dequantized).all()
    errors = np.abs(dequantized - values.astype(np.float32)).max(axis=1)
    smallest = np.float32(ml_dtypes.finfo(dtype).smallest_subnormal)
    most = numbers / {"int8": 2 * 127, "int4": 8}[scheme]  # half a step; or 8 is cut to 7
    assert (errors <= most + numbers * 2.0**-8 + 2 * smallest).all()  # what scale and value are rounded to


def test_the_first_of_two_codes_is_in_the_low_bits() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :3] = -8, 3, 1
    assert rounded_to_nearest(values, "int4", "float32").quantized_values.stored[0, :2].tolist() == [0x38, 0x01]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_group_of_zeros(scheme: str) -> None:
    values = RNG.normal(size=(3, 64)).astype(np.float32)
    values[1] = 0
    values[2] = 1e-9  # 0 in float16
    assert not rounded_to_nearest(values, scheme, "float16").dequantized()[1:].any()


@pytest.mark.parametrize("quantize", ["int8", "int4", "int4:32,embedding=int8,head=int4"])
@pytest.mark.parametrize(("dtype", "sizes"), [("float32", SIZES), ("bfloat16", SIZES), ("bfloat16", {**SIZES, "intermediate_size": 72})])
def test_the_numpy_engine_computes_with_the_rounded_values(tmp_path: Path, quantize: str, dtype: str, sizes: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model", **sizes, torch_dtype="bfloat16")
    with Checkpoint.open(model, quantize=quantize) as checkpoint:
        values = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.tensor_names}
        assert len(checkpoint.quantized_names) == 7 + quantize.count("=")
    plain = write_values(tmp_path / "plain", model, values)
    with InferenceSession.from_model(model, engine="reference", dtype=dtype, max_sequence_length=16, quantize=quantize) as session:  # type: ignore[arg-type]
        np.testing.assert_array_equal(session.prefill([[5, 6, 7, 9, 3, 11]]), logits(plain, dtype))
        assert session.weights is not None
        assert session.weights.format.endswith("(rounded to nearest)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", r"quantize: weights: expected one of int8, int4, int4:32, int4:128, got 'int3'\. Such as"),
        ("int4:64", "quantize: weights: expected one of"),
        ("int8,head=fp8", "quantize: head: expected one of"),
        ("int8,tail=int8", r"quantize: expected embedding=\.\.\. and head=\.\.\. after the linear layers, got 'tail=int8'"),
        ("int8,head=int8,head=int4", "got 'head=int4'"),
        ("", "quantize: weights: expected one of"),
        (8, "quantize: expected a text, got 8"),
    ],
)
def test_what_is_not_known(text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Quantization.parse(text)
    with pytest.raises(ConfigError, match=message):
        InferenceSession.from_model("nowhere", quantize=text)


def test_a_model_without_a_head_of_its_own(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **SIZES, tie_word_embeddings=True)
    with raises(KVCacheError, "quantize", expected="no head="):
        Checkpoint.open(model, quantize="int8,head=int8")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite(tmp_path: Path, value: float, quantize: str) -> None:
    model = write_model(tmp_path / "model", **SIZES)
    edit_tensors(model, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].put(70, value))
    with Checkpoint.open(model, quantize=quantize) as checkpoint, pytest.raises(KVCacheError, match="expected finite values of model"):
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_an_engine_with_the_largest_and_smallest_numbers_of_float16(tmp_path: Path, quantize: str) -> None:
    """The scale of int8 of 65504 would be rounded to 516, and 127 times that is infinite; that of 6e-8 would be rounded to 0."""
    model = write_model(tmp_path / "model", **SIZES)
    name = "model.layers.0.mlp.down_proj.weight"

    def scale_rows(tensors: Any) -> None:
        weight = tensors[name].astype(np.float32)
        peaks = np.abs(weight).max(axis=1)
        weight[3] *= 65504 / peaks[3]
        weight[5] *= 6e-8 / peaks[5]
        tensors[name] = weight.astype(np.float16)

    edit_tensors(model, scale_rows)
    with InferenceSession.from_model(model, engine="reference", max_sequence_length=16, quantize=quantize) as session:
        assert np.isfinite(session.prefill([[5, 6, 7]])).all()
    with Checkpoint.open(model, quantize=quantize) as checkpoint:
        found = checkpoint.tensor(name)
    assert np.abs(found[3]).max() > 0.87 * 65504
    assert found[5].any()


def test_the_rule_is_part_of_what_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose codes were rounded otherwise is not opened beside other codes."""
    model = write_model(tmp_path / "model", **SIZES)
    found = set()
    for divisors in (rounding.DIVISORS[4], (8,)):
        monkeypatch.setitem(rounding.DIVISORS, 4, divisors)
        with Checkpoint.open(model, quantize="int4") as checkpoint:
            found.add(checkpoint.fingerprint())
    assert len(found) == 2


def test_an_engine_folder_has_its_own_rounding(tmp_path: Path) -> None:
    folder = make_engine_folder(write_model(tmp_path / "model", **SIZES), tmp_path / "engine").path
    with raises(ConfigError, "quantize", expected="with a Hugging Face folder only"):
        InferenceSession.open(folder, quantize="int8")  # type: ignore[call-arg]


def test_pages_of_a_weight_are_released_when_it_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(SafetensorsFile, "release", lambda self, name: released.append(name))
    name = "model.layers.0.mlp.up_proj.weight"
    with Checkpoint.open(write_model(tmp_path / "model"), quantize="int8") as checkpoint:
        checkpoint.quantized_weight(name)
        assert released == [name]
        checkpoint.release("model.norm.weight")
        assert released == [name, "model.norm.weight"]
