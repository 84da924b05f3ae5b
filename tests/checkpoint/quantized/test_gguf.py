"""GGUF files beside a ``config.json``, packed by the ``gguf`` package, and the values that it reads back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.folders import refused
from tests.helpers.models import write_model
from tests.helpers.quantized_models import write_values
from trt_kvcache import InferenceSession
from trt_kvcache.checkpoint import Checkpoint

pytest.importorskip("gguf")

from tests.helpers.gguf_files import write_gguf


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_values_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    values = write_gguf(tmp_path / "model", kind)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert checkpoint.weights.format == f"GGUF {kind}"
        assert checkpoint.quantized_weight("model.embed_tokens.weight") is not None
        for name, expected in values.items():
            np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), expected, err_msg=name)
        weight = checkpoint.quantized_weight("model.layers.0.self_attn.q_proj.weight")
        assert weight is not None
        part = weight.rows(slice(5, 70)).dequantized()
        np.testing.assert_array_equal(part, values["model.layers.0.self_attn.q_proj.weight"][5:70])
        assert [path.name for path in checkpoint.files] == ["config.json", "model.gguf"]
        assert len(checkpoint.fingerprint()) == 64


def test_the_numpy_engine(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "model", "Q8_0")
    found = []
    for folder in (tmp_path / "model", write_values(tmp_path / "plain", tmp_path / "model", values)):
        with InferenceSession.from_model(folder, engine="reference", dtype="float32", max_sequence_length=16) as session:
            found.append(session.prefill([[5, 6, 7]]))
    np.testing.assert_array_equal(*found)


def test_other_types_are_dequantized(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "model", "Q4_1")
    with pytest.warns(UserWarning, match=r"model.gguf: 9 tensor\(s\) in Q4_1 are dequantized when they are read, to float16"):
        checkpoint = Checkpoint.open(tmp_path / "model")
    with checkpoint:
        assert not checkpoint.weights.is_quantized
        for name, expected in values.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), expected, err_msg=name)
        assert len(checkpoint.fingerprint()) == 64


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "Q8_0", "falcon")
    assert "model.gguf: general.architecture: expected one of llama, " in (text := refused(tmp_path / "model"))
    assert text.endswith("got 'falcon'.")


@pytest.mark.parametrize("length", [0, 3, 20, 200, -100])
def test_damaged_files_are_refused(tmp_path: Path, length: int) -> None:
    write_gguf(tmp_path / "model", "Q8_0")
    path = tmp_path / "model" / "model.gguf"
    path.write_bytes(path.read_bytes()[:length])
    assert f"{path}: expected a whole GGUF file, got one that cannot be read" in refused(tmp_path / "model")


def test_two_files_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "Q8_0")
    (tmp_path / "model" / "other.gguf").write_bytes(b"GGUF")
    assert "expected one GGUF file, got model.gguf, other.gguf. Keep one of them there." in refused(tmp_path / "model")


def test_safetensors_are_read_before_it(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", hidden_size=32, intermediate_size=64, head_dim=16)
    write_gguf(tmp_path / "model", "Q8_0")
    shutil.copy(source / "model.safetensors", tmp_path / "model")
    text = "weights are read from safetensors, and not from model.gguf, which is there too."
    with pytest.warns(UserWarning, match=text) as caught, Checkpoint.open(tmp_path / "model") as checkpoint:
        assert not checkpoint.weights.is_quantized
    assert [warning.filename for warning in caught] == [__file__]


def test_matrices_in_another_dtype_are_named(tmp_path: Path) -> None:
    """Norms are always in float32 there."""
    write_gguf(tmp_path / "model", "F32")
    with pytest.warns(UserWarning, match=r"9 tensor\(s\) are stored in float32 and are converted to float16") as caught:
        Checkpoint.open(tmp_path / "model").close()
    assert "norm" not in str(caught[0].message)


def test_a_config_of_other_sizes_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "Q8_0")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))
    assert "expected model.layers.0.mlp.gate_proj.weight of shape (96, 32), as GGUF Q8_0 stores it" in refused(tmp_path / "model")
