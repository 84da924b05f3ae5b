"""GGUF files beside a ``config.json``, packed by the ``gguf`` package, and the values that it reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.folders import refused
from tests.helpers.quantized_models import write_values
from tests.helpers.small_model import write_model
from trt_kvcache import InferenceSession
from trt_kvcache.checkpoint import Checkpoint

gguf = pytest.importorskip("gguf")

NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}

#: Heads of q and k.
HEADS = {"q_proj": 4, "k_proj": 2}


def of_transformers(name: str) -> tuple[str, str]:
    """Return the last part of a module's name, and what GGUF calls the tensor."""
    parts = name.split(".")
    module = parts[-2]
    if module == "norm":
        return module, "output_norm.weight"
    return module, (f"blk.{parts[2]}." if "layers" in parts else "") + f"{NAMES[module]}.weight"


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return the rows as llama.cpp wants them: the two that RoPE pairs, d and d + half, beside each other."""
    width = len(weight) // heads
    rows = [head * width + half * width // 2 + row for head in range(heads) for row in range(width // 2) for half in range(2)]
    return weight[rows]


def write_gguf(folder: Path, kind: str, architecture: str = "llama", **metadata: int) -> dict[str, np.ndarray[Any, Any]]:
    """Write a small model as a GGUF file; return the values of its tensors in transformers' order."""
    write_model(folder, hidden_size=32, intermediate_size=64, head_dim=16, scale=0.4)
    source = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_head_count(metadata.get("heads", 4))
    writer.add_head_count_kv(2)
    values = {}
    for name, stored in source.items():
        weight = stored.astype(np.float32)
        module, gguf_name = of_transformers(name)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name, weight)
            values[name] = stored.astype(np.float32)
            continue
        quantized_type = getattr(gguf.GGMLQuantizationType, kind)
        back = gguf.quants.dequantize(gguf.quants.quantize(weight, quantized_type), quantized_type)
        values[name] = back
        order = permuted(weight, HEADS[module]) if module in HEADS and architecture == "llama" else weight
        writer.add_tensor(gguf_name, gguf.quants.quantize(order, quantized_type), raw_dtype=quantized_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.filterwarnings("ignore:(?s).*are converted")
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


@pytest.mark.filterwarnings("ignore:(?s).*are converted")
def test_the_numpy_engine(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "model", "Q8_0")
    found = []
    for folder in (tmp_path / "model", write_values(tmp_path / "plain", tmp_path / "model", values)):
        with InferenceSession.from_model(folder, engine="reference", dtype="float32", max_sequence_length=16) as session:
            found.append(session.prefill([[5, 6, 7]]))
    np.testing.assert_array_equal(*found)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "Q4_1")
    assert "expected model.embed_tokens.weight in Q8_0 or Q4_0, as GGUF stores it, got Q4_1." in refused(tmp_path / "model")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "Q8_0", "gemma2")
    assert "model.gguf: general.architecture: expected one of llama, qwen2, qwen3, got 'gemma2'." in refused(tmp_path / "model")


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


def test_a_config_of_other_sizes_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", "Q8_0")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))
    assert "expected model.layers.0.mlp.gate_proj.weight of shape (96, 32), as GGUF Q8_0 stores it" in refused(tmp_path / "model")
