"""Tiny checkpoints of quantized weights, packed by rules that are written down here a second time, element by element."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.paths import GOLDEN

Tensors = dict[str, np.ndarray[Any, Any]]

#: Returns what is stored for a matrix, by the end of its name, and the values that it stands for.
Quantize = Callable[[np.ndarray[Any, Any], np.random.Generator], tuple[Tensors, np.ndarray[Any, Any]]]

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def as_int32(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(words.astype(np.uint32).view(np.int32))


def packed_rows(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """``[n * k, columns]`` to int32 ``[k, columns]``: each column of n neighbours is a word, the first in the lowest bits."""
    n = 32 // bits
    words = np.zeros((codes.shape[0] // n, codes.shape[1]), np.uint64)
    for row in range(codes.shape[0]):
        words[row // n] |= codes[row].astype(np.uint64) << np.uint64(bits * (row % n))
    return as_int32(words)


def packed_columns(codes: np.ndarray[Any, Any], bits: int, nibbles: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
    """``[rows, n * k]`` to int32 ``[rows, k]``; ``nibbles[i]`` is which neighbour the i-th nibble holds."""
    n = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // n), np.uint64)
    for word in range(words.shape[1]):
        for place in range(n):
            neighbour = place if nibbles is None else nibbles[place]
            words[:, word] |= codes[:, word * n + neighbour].astype(np.uint64) << np.uint64(bits * place)
    return as_int32(words)


def asymmetric(weight: np.ndarray[Any, Any], bits: int, groups: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Return codes ``[out, in]``, and float16 scales and zero points ``[groups, out]``, none of which is zero."""
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    scales, zeros = np.zeros((count, len(weight)), np.float16), np.zeros((count, len(weight)), np.int64)
    for group in range(count):
        part = weight[:, groups == group].astype(np.float32)
        low, high = np.minimum(part.min(axis=1), -0.01), np.maximum(part.max(axis=1), 0.01)
        scales[group] = (high - low) / top
        zeros[group] = np.clip(np.rint(-low / scales[group].astype(np.float32)), 1, top)
    codes = np.rint(weight / scales[groups].T.astype(np.float32)) + zeros[groups].T
    return np.clip(codes, 0, top).astype(np.int64), scales, zeros


def gptq(*, bits: int = 4, group_size: int = 8, version: int = 1, order: bool = False, symmetric: bool = False) -> Quantize:
    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // group_size
        if order:
            groups = random.permutation(groups)
        codes, scales, zeros = asymmetric(weight, bits, groups)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        values = (codes - zeros[groups].T).astype(np.float32) * scales[groups].T.astype(np.float32)
        stored = {
            "qweight": packed_rows(codes.T, bits),
            "qzeros": packed_columns(zeros - (version == 1), bits),
            "scales": scales,
            "g_idx": groups.astype(np.int32),
        }
        return stored, values

    return quantize


def awq(*, group_size: int = 8) -> Quantize:
    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        groups = np.arange(weight.shape[1]) // group_size
        codes, scales, zeros = asymmetric(weight, 4, groups)
        values = (codes - zeros[groups].T).astype(np.float32) * scales[groups].T.astype(np.float32)
        stored = {
            "qweight": packed_columns(codes.T, 4, AWQ_NIBBLES),
            "qzeros": packed_columns(zeros, 4, AWQ_NIBBLES),
            "scales": scales,
        }
        return stored, values

    return quantize


def fp8_blocks(*, block: tuple[int, int] = (16, 12)) -> Quantize:
    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        rows, columns = (-(-size // by) for size, by in zip(weight.shape, block, strict=True))
        codes, scales = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros((rows, columns), np.float32)
        values = np.zeros(weight.shape, np.float32)
        for row in range(rows):
            for column in range(columns):
                place = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
                scales[row, column] = np.abs(weight[place]).max() / 448
                codes[place] = (weight[place] / scales[row, column]).astype(codes.dtype)
                values[place] = codes[place].astype(np.float32) * scales[row, column]
        return {"weight": codes, "weight_scale_inv": scales}, values

    return quantize


def write_quantized(folder: Path, model: str, quantize: Quantize, config: dict[str, Any], *, field: str = "quantization_config") -> Tensors:
    """Write a golden model whose linear layers, but for the head, are quantized. Return the values of all its tensors."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    data = json.loads((GOLDEN / model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, field: config}))
    for name in ("tokenizer.json", "generation_config.json"):
        if (GOLDEN / model / name).is_file():
            shutil.copy(GOLDEN / model / name, folder)
    values: Tensors = load_file(GOLDEN / model / "model.safetensors")
    stored: Tensors = {}
    for name, array in list(values.items()):
        if array.ndim == 2 and "layers" in name:
            parts, values[name] = quantize(array.astype(np.float32), random)
            stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        else:
            stored[name] = array
    save_file(stored, folder / "model.safetensors")
    return values


def write_values(folder: Path, quantized: Path, values: Tensors) -> Path:
    """Write the model of a quantized folder with the values of its weights, in float32."""
    folder.mkdir()
    data = json.loads((quantized / "config.json").read_text())
    kept = {
        name: value for name, value in data.items() if name not in ("quantization_config", "compression_config", "dtype", "torch_dtype")
    }
    (folder / "config.json").write_text(json.dumps({**kept, "dtype": "float32"}))
    save_file({name: np.ascontiguousarray(array, np.float32) for name, array in values.items()}, folder / "model.safetensors")
    return folder


GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False, "desc_act": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 12]}

#: Every way in which a checkpoint of these rules is made: how it is packed, and what ``quantization_config`` says.
CASES: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (gptq(), {**GPTQ_CONFIG, "checkpoint_format": "gptq"}),
    "gptq-v2": (gptq(version=2), {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"}),
    "gptq-order": (gptq(order=True), {**GPTQ_CONFIG, "desc_act": True}),
    "gptq-symmetric": (gptq(symmetric=True), {**GPTQ_CONFIG, "sym": True}),
    "gptq-8-bits": (gptq(bits=8, group_size=4), {**GPTQ_CONFIG, "bits": 8, "group_size": 4}),
    "awq": (awq(), AWQ_CONFIG),
    "fp8-blocks": (fp8_blocks(), FP8_CONFIG),
}
