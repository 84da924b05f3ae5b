"""The side ``llama`` of ``end_to_end.py``: ``llama-bench`` of llama.cpp on a GGUF file of the same shapes. Needs the package gguf.

The environment variable ``LLAMA_BENCH`` names the program, compiled for this device. It decodes one sequence, and its steps include no
sampling and no text. The weights of the file are random: speed depends on shapes and block types only.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from weight_schemes import Q4_K_M, SUPER_BLOCKS, scheme_of

from trt_kvcache.model import AttentionConfig, MlpConfig, ModelConfig

#: The block type of llama.cpp that is nearest to each scheme of ``weight_schemes.py``.
BLOCK_TYPES = {None: "BF16", "int8": "Q8_0", "q8_0": "Q8_0", "int4": "Q4_0", "q4_0": "Q4_0"}
BLOCK_TYPES |= {scheme: scheme.upper() for scheme in (*SUPER_BLOCKS, Q4_K_M)}

#: Rows that are made at random; a tensor repeats them.
_ROWS = 64

AddTensor = Callable[..., object]


def llama(config: ModelConfig, scheme: str | None, past: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run ``llama-bench``: a prompt of ``past`` tokens, and so many tokens after it."""
    program = os.environ["LLAMA_BENCH"]
    path = folder / f"{config.family}-{BLOCK_TYPES[scheme]}.gguf"
    if not path.exists():
        write_gguf(path, config, BLOCK_TYPES[scheme])
    command = [program, "-m", str(path), "-p", str(past), "-n", str(steps), "-d", f"0,{past}", "-ngl", "99", "-fa", "1", "-o", "json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {run.returncode}: {run.stderr[-300:]}")
    rows = json.loads(run.stdout)
    [prompt] = [row for row in rows if row["n_prompt"] and not row["n_depth"]]
    [decode] = [row for row in rows if row["n_gen"] and row["n_depth"]]
    samples = [nanoseconds / steps * 1e-6 for nanoseconds in decode["samples_ns"]]
    return {
        "steps": steps,
        "first_token_ms": prompt["avg_ns"] * 1e-6,
        "step_ms": {"median": float(np.median(samples)), "min": min(samples), "max": max(samples)},
        "tokens_per_second": decode["avg_ts"],
        "llama_cpp": decode["build_commit"],
        "block_type": BLOCK_TYPES[scheme],
    }


def write_gguf(path: Path, config: ModelConfig, block_type: str) -> None:
    """Write a GGUF file of the shapes of a dense decoder: matrices in ``block_type``, norms and biases in float32, and no vocabulary."""
    layer = config.layers[0]
    mixer, mlp = layer.mixer, layer.mlp
    assert isinstance(mixer, AttentionConfig), "attention in each layer"
    assert isinstance(mlp, MlpConfig), "no experts"
    assert mixer.rope is not None, "RoPE in each layer"
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(mlp.intermediate_size)
    writer.add_head_count(mixer.num_heads)
    writer.add_head_count_kv(mixer.num_kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_value_length(mixer.head_dim)
    writer.add_rope_freq_base(mixer.rope.theta)
    writer.add_layer_norm_rms_eps(config.final_norm.epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    _add_tensors(_adder(writer, block_type, config), config, mixer, mlp)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(add: AddTensor, config: ModelConfig, mixer: AttentionConfig, mlp: MlpConfig) -> None:
    """Add the tensors of a decoder under the names of llama.cpp."""
    hidden, queries, keys = config.hidden_size, mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    add("token_embd.weight", config.vocab_size, hidden)
    add("output_norm.weight", hidden)
    if not config.tie_word_embeddings:
        add("output.weight", config.vocab_size, hidden)
    for index in range(config.num_layers):
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            add(f"blk.{index}.attn_{name}.weight", outputs, hidden)
            if mixer.qkv_bias:
                add(f"blk.{index}.attn_{name}.bias", outputs)
        add(f"blk.{index}.attn_output.weight", hidden, queries)
        if mixer.qk_norm is not None:
            add(f"blk.{index}.attn_q_norm.weight", mixer.head_dim)
            add(f"blk.{index}.attn_k_norm.weight", mixer.head_dim)
        add(f"blk.{index}.ffn_gate.weight", mlp.intermediate_size, hidden)
        add(f"blk.{index}.ffn_up.weight", mlp.intermediate_size, hidden)
        add(f"blk.{index}.ffn_down.weight", hidden, mlp.intermediate_size)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{index}.{name}.weight", hidden)


def _adder(writer: gguf.GGUFWriter, block_type: str, config: ModelConfig) -> AddTensor:
    """Return a function ``add(name, *shape)`` that adds a tensor: a random matrix in the block type, or a vector of ones in float32."""
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        rows, columns = shape
        is_head = config.tie_word_embeddings and name == "token_embd.weight"
        scheme = scheme_of(block_type.lower(), "output.weight" if is_head else name, config.num_layers)
        kind = gguf.GGMLQuantizationType[scheme.upper()]
        if scheme in SUPER_BLOCKS:
            packed = _super_blocks(kind, columns, random)
        else:
            values = random.standard_normal((_ROWS, columns), dtype=np.float32) / np.sqrt(columns, dtype=np.float32)
            packed = gguf.quants.quantize(values, kind).view(np.uint8)
        repeated = np.tile(packed, (-(-rows // _ROWS), 1))[:rows]
        writer.add_tensor(name, repeated, raw_dtype=kind)

    return add


def _super_blocks(kind: gguf.GGMLQuantizationType, columns: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random super-blocks with small factors: the package does not write these types."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    stored = random.integers(0, 256, (_ROWS, columns // size, nbytes)).astype(np.uint8)
    place = slice(-2, None) if kind == gguf.GGMLQuantizationType.Q6_K else slice(4)
    stored[:, :, place] = np.full(2, 2**-14, np.float16).view(np.uint8)[: len(range(nbytes)[place])]
    return stored.reshape(_ROWS, -1)
