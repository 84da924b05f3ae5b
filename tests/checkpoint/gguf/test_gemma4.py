"""GGUF files of Gemma 4: the configuration of each layer, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from tests.checkpoint.folders import edit_config, refused
from tests.golden.weights import write as write_weights
from tests.paths import GOLDEN
from trt_kvcache import Checkpoint
from trt_kvcache.model import RopeConfig

from .convert import Config, Gemma4, Tensors, convert

Edit = Callable[[gguf.GGUFWriter], object]

KINDS = gguf.GGUFValueType


def put(name: str, value: Any, kind: gguf.GGUFValueType = KINDS.UINT32) -> Edit:
    """Return the edit that sets a field of the architecture, or removes it."""

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"gemma4.{name}", None)
        if isinstance(value, list):
            writer.add_array(f"gemma4.{name}", value)
        elif value is not None:
            writer.add_key_value(f"gemma4.{name}", value, kind)

    return edit


class WithFactors(Gemma4):
    """Files with these factors of frequencies, or without any."""

    def __init__(self, factors: list[float] | None) -> None:
        self._factors = factors

    def tensors(self, tensors: Tensors, config: Config) -> Tensors:
        found = super().tensors(tensors, config)
        del found["rope_freqs.weight"]
        return found if self._factors is None else {**found, "rope_freqs.weight": np.array(self._factors, np.float32)}


@pytest.mark.parametrize("model", ["gemma4", "gemma4-ple", "gemma4-experts"])
def test_layers_are_those_of_the_folder(tmp_path: Path, model: str) -> None:
    found, folder = (Checkpoint.read_config(path) for path in (convert(GOLDEN / model, tmp_path / "model.gguf"), GOLDEN / model))
    assert found.layers == folder.layers
    assert found.per_layer_embedding == folder.per_layer_embedding
    assert (found.final_softcap, found.tie_word_embeddings) == (folder.final_softcap, folder.tie_word_embeddings)


@pytest.mark.parametrize("turning", [1, 11, 15, 22])
def test_factors_of_frequencies_tell_the_elements_that_turn(tmp_path: Path, turning: int) -> None:
    """Of a head of 44: 44 times the rounded quotient 15 / 22 is less than 30."""
    folder = shutil.copytree(GOLDEN / "gemma4", tmp_path / "gemma4", ignore=shutil.ignore_patterns("*.safetensors"))
    edit_config(folder, global_head_dim=44)
    write_weights(folder)
    path = convert(folder, tmp_path / "model.gguf", architecture=WithFactors([1.0] * turning + [1e30] * (22 - turning)))
    (rope,) = {mixer.rope for mixer in Checkpoint.read_config(path).attention_layers if mixer.window is None}
    assert isinstance(rope, RopeConfig)
    assert int(rope.partial_rotary_factor * 44 // 2) == turning


def test_a_head_that_does_not_turn_is_refused(tmp_path: Path) -> None:
    path = convert(GOLDEN / "gemma4", tmp_path / "model.gguf", architecture=WithFactors([1e30] * 12))
    assert "partial_rotary_factor" in refused(path)


@pytest.mark.parametrize("factors", [None, [1.0] * 11, [1.0] * 13, [1.0] * 3 + [2.0] * 9, [1e30] * 3 + [1.0] * 9])
def test_other_factors_of_frequencies_are_refused(tmp_path: Path, factors: list[float] | None) -> None:
    message = refused(convert(GOLDEN / "gemma4", tmp_path / "model.gguf", architecture=WithFactors(factors)))
    assert "rope_freqs.weight: expected " in message


@pytest.mark.parametrize(
    ("model", "edit", "expected"),
    [
        (
            "gemma4",
            put("attention.sliding_window_pattern", None),
            "gemma4.attention.sliding_window_pattern: expected 4 flags, one for each layer",
        ),
        (
            "gemma4",
            put("attention.sliding_window_pattern", 6),
            "gemma4.attention.sliding_window_pattern: expected 4 flags, one for each layer",
        ),
        ("gemma4", put("attention.sliding_window_pattern", [True] * 4), "expected full_attention for the last layer"),
        ("gemma4", put("attention.value_length", 16), "gemma4.attention.value_length: expected 24, the length of a key, got 16"),
        ("gemma4", put("attention.value_length_swa", 24), "gemma4.attention.value_length_swa: expected 16, the length of a key, got 24"),
        ("gemma4", put("rope.dimension_count", 6), "gemma4.rope.dimension_count: expected 24, the length of a key, got 6"),
        ("gemma4", put("rope.dimension_count_swa", 8), "gemma4.rope.dimension_count_swa: expected 16, the length of a key, got 8"),
        ("gemma4", put("rope.scaling.type", "linear", KINDS.STRING), "gemma4.rope.scaling.type: expected none, got 'linear'"),
        ("gemma4", put("attention.head_count_kv", [2, 1, 1, 1]), "per_layer_config.2: expected the sizes of the other layers"),
        ("gemma4", put("attention.shared_kv_layers", 4), "num_kv_shared_layers: expected an integer from 0 to 3, got 4"),
        (
            "gemma4-ple",
            put("feed_forward_length", [28] * 5 + [56]),
            "gemma4.feed_forward_length: expected 28, or twice that in the 2 layers",
        ),
        ("gemma4-ple", put("attention.shared_kv_layers", 2**32 - 1), "gemma4.feed_forward_length: expected 28, or twice that in the"),
        ("gemma4-ple", put("feed_forward_length", 28), "model.layers.4.mlp.gate_proj.weight of shape (28, 48) by model.gguf, got (56, 48)"),
        ("gemma4-ple", put("embedding_length_per_layer_input", 0), "tensor(s) that a gemma4_text model by model.gguf does not use"),
    ],
)
def test_refusals(tmp_path: Path, model: str, edit: Edit, expected: str) -> None:
    assert expected in refused(convert(GOLDEN / model, tmp_path / "model.gguf", edit=edit))
