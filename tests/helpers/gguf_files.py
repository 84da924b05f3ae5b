"""GGUF files, written by the ``gguf`` package: of tiny models with Llama's names, and copies of files with floating-point weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.helpers.models import write_model

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


#: Types in super-blocks, which the library reads, but does not write.
SUPER_BLOCKS = ("Q4_K", "Q5_K", "Q6_K")

#: The types of matrices in a file that is called Q4_K_M, in the layers that have more bits.
Q4_K_M = {name: "Q6_K" if name in ("v_proj", "down_proj", "lm_head") else "Q4_K" for name in NAMES}


def random_super_blocks(kind: str, shape: tuple[int, int], random: np.random.Generator, size: float = 0.05) -> np.ndarray[Any, Any]:
    """Return the bytes ``[out, bytes]`` of random values of about ``size``."""
    outputs, blocks = shape[0], shape[1] // 256
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    stored = random.integers(0, 256, (outputs, blocks, nbytes)).astype(np.uint8)
    signs = random.choice([-1, 1], (outputs, blocks, 2))
    whole = {"Q4_K": (32 * 8, 32), "Q5_K": (32 * 16, 32), "Q6_K": (64 * 16,)}[kind]
    factors = (random.uniform(0.5, 1.5, (outputs, blocks, 2)) * signs * size)[..., : len(whole)] / whole
    place = slice(-2, None) if kind == "Q6_K" else slice(4)
    stored[:, :, place] = factors.astype(np.float16).view(np.uint8)
    return stored.reshape(outputs, -1)


def write_q4_k_m(folder: Path, types: dict[str, str] | None = None, **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Write a small model whose matrices have the types of :data:`Q4_K_M`, or others by name; return the values of its tensors."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2, "torch_dtype": "bfloat16"}
    write_model(folder, **{**sizes, **changes})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    by_name = {name: {**Q4_K_M, **(types or {})}.get(of_transformers(name)[0], "F32") for name in tensors}
    return write_gguf_file(folder / "model.gguf", tensors, by_name, heads=(4, 2))


def write_gguf_file(
    path: Path, tensors: dict[str, np.ndarray[Any, Any]], types: dict[str, str], *, heads: tuple[int, int], architecture: str = "llama"
) -> dict[str, np.ndarray[Any, Any]]:
    """Write tensors, matrices in the types that are named; return the values that the library reads back, in transformers' order."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    permuted_heads = dict(zip(("q_proj", "k_proj"), heads, strict=True)) if architecture == "llama" else {}
    values = {}
    for name, stored in tensors.items():
        weight = stored.astype(np.float32)
        module, gguf_name = of_transformers(name)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name, weight)
            values[name] = weight
            continue
        kind = getattr(gguf.GGMLQuantizationType, types[name])
        if kind.name in SUPER_BLOCKS:
            stored = random_super_blocks(kind.name, weight.shape, np.random.default_rng(len(values)))
            rows = np.arange(len(weight))
            in_file = permuted(rows, permuted_heads[module]) if module in permuted_heads else rows
            values[name] = gguf.quants.dequantize(stored, kind)[np.argsort(in_file)]
            writer.add_tensor(gguf_name, stored, raw_dtype=kind)
            continue
        values[name] = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        order = permuted(weight, permuted_heads[module]) if module in permuted_heads else weight
        writer.add_tensor(gguf_name, gguf.quants.quantize(order, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def write_gguf(folder: Path, kind: str, architecture: str = "llama") -> dict[str, np.ndarray[Any, Any]]:
    """Write a small model whose matrices are all of one type, beside its ``config.json``; return the values of its tensors."""
    write_model(folder, hidden_size=32, intermediate_size=64, head_dim=16, scale=0.4)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    types = dict.fromkeys(tensors, kind)
    return write_gguf_file(folder / "model.gguf", tensors, types, heads=(4, 2), architecture=architecture)


def write_floats(source: Path, target: Path, dtype: str = "float32") -> Path:
    """Write the values of a file's matrices in ``float32`` or ``float16``, all else as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if dtype == "float32" else gguf.LlamaFileType.MOSTLY_F16)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(dtype if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
