"""Writes GGUF files of Hugging Face folders in the conventions of llama.cpp, with the ``gguf`` package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoint.folders import load_file

Array = np.ndarray[Any, Any]
Config = dict[str, Any]


def convert(folder: Path, target: Path, *, kind: str = "F32", edit: Callable[[gguf.GGUFWriter], object] = lambda writer: None) -> Path:
    """Write the model of a folder, its matrices in one type; ``edit`` adds more metadata."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture.arch])
    architecture.sizes(writer, config)
    edit(writer)
    tensors: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != "golden.safetensors":
            tensors |= load_file(file)
    names = gguf.get_tensor_name_map(architecture.arch, config["num_hidden_layers"])
    for name, tensor in architecture.tensors(tensors, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _add(writer, stored, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, name: str, tensor: Array, kind: str) -> None:
    values = np.ascontiguousarray(tensor.astype(np.float32))
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
        return
    quantized = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)


class Architecture:
    """How models of one architecture are written."""

    arch = gguf.MODEL_ARCH.LLAMA

    def sizes(self, writer: gguf.GGUFWriter, config: Config) -> None:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])

    def tensors(self, tensors: dict[str, Array], config: Config) -> dict[str, Array]:
        return tensors


class Llama(Architecture):
    """Rows of q and k that RoPE pairs are beside each other."""

    def tensors(self, tensors: dict[str, Array], config: Config) -> dict[str, Array]:
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        return {
            name: paired(tensor, heads[module]) if (module := name.split(".")[-2]) in heads else tensor for name, tensor in tensors.items()
        }


def paired(weight: Array, heads: int) -> Array:
    """Put the rows d and d + half of each head beside each other."""
    half = len(weight) // heads // 2
    rows = [head * 2 * half + part * half + row for head in range(heads) for row in range(half) for part in range(2)]
    return weight[rows]


ARCHITECTURES: dict[str, Architecture] = {"llama": Llama()}
