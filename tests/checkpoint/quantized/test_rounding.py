"""Rounding to the nearest integers of a scale: ``Quantization``, the codes, and which weights of a model are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.folders import edit_tensors
from tests.checkpoint.quantized.test_engines import logits
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.quantized_models import write_values
from tests.helpers.small_model import write_model
from trt_kvcache import InferenceSession
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized import rounding
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_nbytes
from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.errors import ConfigError, KVCacheError

RNG = np.random.default_rng(5)

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def by_element(values: Any, group: int, limit: int, low: int, high: int, dtype: Any) -> tuple[Any, Any]:
    """The rule, written down a second time."""
    codes, scales = np.zeros(values.shape, np.int64), np.zeros((len(values), -(-values.shape[1] // group)), dtype)
    for row in range(len(values)):
        for block in range(scales.shape[1]):
            part = values[row, block * group : (block + 1) * group].astype(np.float32)
            scales[row, block] = np.float32(max(abs(x) for x in part)) / np.float32(limit)
            for column, x in enumerate(part):
                code = np.rint(x / np.float32(scales[row, block]))
                codes[row, block * group + column] = min(max(code, low), high)
    return codes, scales


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(("scheme", "rule"), [("int8", (300, 127, -127, 127)), ("int4:32", (32, 8, -8, 7)), ("int4:128", (128, 8, -8, 7))])
@pytest.mark.parametrize("inputs", [128, 136, 40, 13])
def test_codes_and_scales(monkeypatch: pytest.MonkeyPatch, scheme: str, rule: tuple[int, ...], inputs: int, dtype: Any) -> None:
    """The last group of inputs may be smaller, and the last byte of a row half empty."""
    monkeypatch.setattr(rounding, "_CHUNK", 2 * inputs + 1)  # two rows, then one
    values = RNG.normal(size=(5, inputs)).astype(dtype)
    found = rounded_to_nearest(values, scheme, np.dtype(dtype).name)
    codes, scales = by_element(values, *rule, dtype)
    np.testing.assert_array_equal(found.codes.unpacked(), codes)
    np.testing.assert_array_equal(found.scales.stored, scales)
    spread = np.repeat(scales.astype(np.float32), rule[0], axis=1)[:, :inputs]
    np.testing.assert_array_equal(found.dequantized(), codes.astype(np.float32) * spread)
    assert found.codes.nbytes == 5 * (-(-inputs // 2) if scheme.startswith("int4") else inputs)
    assert found.codes.nbytes + found.scales.stored.nbytes == rounded_nbytes((5, inputs), scheme, np.dtype(dtype).name)


def test_the_first_of_two_codes_is_in_the_low_bits() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :3] = -8, 3, 1
    assert rounded_to_nearest(values, "int4", "float32").codes.stored[0, :2].tolist() == [0x38, 0x01]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_group_of_zeros(scheme: str) -> None:
    values = RNG.normal(size=(3, 64)).astype(np.float32)
    values[1] = 0
    values[2] = 1e-9  # its scale is 0 in float16
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
        ("int8,tail=int8", r"quantize: expected embedding=\.\.\. and head=\.\.\. behind the linear layers, got 'tail=int8'"),
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
    with pytest.raises(KVCacheError, match=r"quantize: expected no head=\.\.\., as the head of this model is its embedding"):
        Checkpoint.open(model, quantize="int8,head=int8")


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **SIZES)
    edit_tensors(model, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].put(70, np.inf))
    with Checkpoint.open(model, quantize="int4") as checkpoint, pytest.raises(KVCacheError, match="expected finite values of model"):
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight")


def test_an_engine_folder_has_its_own_rounding(tmp_path: Path) -> None:
    folder = make_engine_folder(write_model(tmp_path / "model", **SIZES), tmp_path / "engine").path
    with pytest.raises(ConfigError, match="quantize: expected with a Hugging Face folder only"):
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
