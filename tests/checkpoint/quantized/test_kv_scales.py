"""Static scales of K and V beside quantized weights: which are read, and sessions that use them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.folders import edit_config, edit_tensors
from tests.helpers.assertions import assert_close, raises
from trt_kvcache import Checkpoint, InferenceSession
from trt_kvcache.errors import CheckpointError, ConfigError

#: The model has two layers of one K/V head.
SCHEMES = {"float": "float8_e4m3fn", "int": "int8"}


def opened(path: Path) -> Checkpoint:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Checkpoint.open(path)


def session_of(path: Path, **options: Any) -> InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return InferenceSession.from_model(path, engine="reference", dtype="float32", max_sequence_length=24, **options)


def with_scales(path: Path, form: str, **changes: Any) -> None:
    """Add scales of layer i, side by side: 0.5 + i for K, and half of it for V, unless changed."""
    names = {side: form.replace("SIDE", side) for side in "kv"}
    scales = {names[side].format(i): np.array((0.5 + i) / (1 + (side == "v")), np.float32) for i in range(2) for side in "kv"}
    scales |= {name.replace("__", "."): value for name, value in changes.items()}
    edit_tensors(path, lambda tensors: tensors.update({name: value for name, value in scales.items() if value is not None}))


COMPRESSED, MODELOPT = "model.layers.{}.self_attn.SIDE_scale", "model.layers.{}.self_attn.SIDE_proj.SIDE_scale"


@pytest.mark.parametrize(("kind", "dtype"), SCHEMES.items())
def test_of_compressed_tensors(made, kind: str, dtype: str) -> None:
    folder = made("compressed-int8")
    config = json.loads((folder.path / "config.json").read_text())["quantization_config"]
    edit_config(folder.path, quantization_config={**config, "kv_cache_scheme": {"num_bits": 8, "type": kind, "dynamic": False}})
    with_scales(folder.path, COMPRESSED)
    with opened(folder.path) as checkpoint:
        assert checkpoint.kv_dtype == dtype
        assert checkpoint.kv_scales() == ((0.5, 0.25), (1.5, 0.75))


@pytest.mark.parametrize(("options", "warned"), [({}, 1), ({"kv_dtype": "int8"}, 0), ({"kv_dtype": "int8", "kv_scales": "token"}, 0)])
def test_scales_that_are_not_asked_for_are_named(made, options: dict[str, str], warned: int) -> None:
    folder = made("compressed-int8")
    config = json.loads((folder.path / "config.json").read_text())["quantization_config"]
    edit_config(folder.path, quantization_config={**config, "kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}})
    with_scales(folder.path, COMPRESSED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        InferenceSession.from_model(folder.path, engine="reference", dtype="float32", max_sequence_length=24, **options).close()
    said = [(warning.filename, str(warning.message)) for warning in caught if "K and V" in str(warning.message)]
    text = f"{folder.path}: K and V are not quantized. The checkpoint describes them in int8: kv_dtype='int8' quantizes them."
    assert said == [(__file__, text)] * warned


def test_of_modelopt(made) -> None:
    folder = made("modelopt-fp8")
    edit_config(folder.path, quantization_config=...)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder.path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    with_scales(folder.path, MODELOPT)
    with opened(folder.path) as checkpoint:
        assert (checkpoint.kv_dtype, checkpoint.kv_scales()) == ("float8_e4m3fn", ((0.5, 0.25), (1.5, 0.75)))
    with session_of(folder.path, kv_dtype="fp8") as session:
        assert session.cache_config.scales == "tensor"
        assert [session.cache.get_kv_scales(layer).numpy().tolist() for layer in (0, 1)] == [[[0.5], [0.25]], [[1.5], [0.75]]]
    with session_of(folder.path, kv_dtype="fp8", kv_scales="token") as session:
        assert session.cache_config.scales == "token"
    with session_of(folder.path, kv_dtype="int8") as session:
        assert session.cache_config.scales == "token"  # the checkpoint has them for fp8
    with raises(ConfigError, "kv_scales", expected=("token", "int8")):
        session_of(folder.path, kv_dtype="int8", kv_scales="tensor")


def test_static_scales_reach_what_is_computed(made) -> None:
    folder = made("modelopt-fp8")
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    edit_config(folder.path, quantization_config=...)
    (folder.path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    with_scales(folder.path, MODELOPT, **{"model__layers__1__self_attn__v_proj__v_scale": np.array([1e-5], np.float32)})
    prompt = [[5, 9, 33, 41, 7]]
    with session_of(folder.path) as exact, session_of(folder.path, kv_dtype="fp8", kv_scales="head") as session:
        expected, found = exact.prefill(prompt), session.prefill(prompt)
        with pytest.raises(AssertionError):
            assert_close(found, expected, 0.05)  # V of layer 1 is held within 0.00448 of zero
        assert np.abs(session.cache.get_combined_kv_cache(1).numpy()[0, 1, :, :5].astype(np.float32)).max() == 448


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model__layers__1__self_attn__v_scale": None}, "expected static scales of K and V in all layers, got no v_scale in layer 1."),
        (
            {"model__layers__0__self_attn__k_scale": np.zeros((), np.float32)},
            "model.layers.0.self_attn.k_scale: expected a finite number above 0, or one for each of 1 heads, got [0.0] of 1.",
        ),
        (
            {"model__layers__0__self_attn__k_scale": np.ones(3, np.float32)},
            "model.layers.0.self_attn.k_scale: expected a finite number above 0, or one for each of 1 heads, got [1.0, 1.0, 1.0] of 3.",
        ),
    ],
)
def test_what_is_refused(made, changes: dict[str, Any], text: str) -> None:
    folder = made("compressed-int8")
    config = json.loads((folder.path / "config.json").read_text())["quantization_config"]
    edit_config(folder.path, quantization_config={**config, "kv_cache_scheme": {"num_bits": 8, "type": "int"}})
    with_scales(folder.path, COMPRESSED, **changes)
    with opened(folder.path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.kv_scales()
    assert str(caught.value).endswith(text)


@pytest.mark.parametrize("scheme", [None, {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "float", "dynamic": True}])
def test_schemes_without_static_scales(made, scheme: dict[str, Any] | None) -> None:
    folder = made("compressed-int8")
    config = json.loads((folder.path / "config.json").read_text())["quantization_config"]
    edit_config(folder.path, quantization_config={**config, "kv_cache_scheme": scheme})
    with opened(folder.path) as checkpoint:
        assert (checkpoint.kv_dtype, checkpoint.kv_scales()) == (None, ())
