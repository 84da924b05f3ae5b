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

from tests.helpers.models import write_model
from tests.paths import GOLDEN

Tensors = dict[str, np.ndarray[Any, Any]]

#: Returns what is stored for a matrix, by the end of its name, and the values that it stands for.
Quantize = Callable[[np.ndarray[Any, Any], np.random.Generator], tuple[Tensors, np.ndarray[Any, Any]]]

GROUP_OF_NVFP4, GROUP_OF_MXFP4 = 16, 32

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


def gptq(
    *, bits: int = 4, group_size: int = 8, version: int = 1, order: bool = False, one_order: bool = False, symmetric: bool = False
) -> Quantize:
    """Return how GPTQ stores weights. ``one_order``: as libraries write it, the same for all matrices of the same input."""

    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // group_size
        if order:
            groups = (np.random.default_rng(inputs) if one_order else random).permutation(groups)
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


def of_two_codes(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``[rows, 2 * k]`` to uint8 ``[rows, k]``, the first code in the low nibble."""
    return (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp4_codes(scaled: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the nearest codes, of both signs."""
    return np.abs(scaled[..., None] - FP4).argmin(axis=-1).astype(np.int64)


def integers(bits: int, group_size: int | None, *, packed: bool, symmetric: bool, order: bool = False) -> Quantize:
    """Return how compressed-tensors stores integers, offset by half of their range where they are packed."""
    half = 1 << (bits - 1)

    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        rows, inputs = weight.shape
        groups = np.arange(inputs) // (group_size or inputs)
        if order:
            groups = random.permutation(groups)
        count = int(groups.max()) + 1
        codes, scales, zeros = asymmetric(weight, bits, groups)
        codes, zeros = codes - half, zeros - half
        if symmetric:
            zeros[:] = 0
        scales = scales.T.astype(ml_dtypes.bfloat16)
        values = (codes - zeros[groups].T).astype(np.float32) * scales[:, groups].astype(np.float32)
        stored: Tensors = {"weight_scale": scales, **({"weight_g_idx": groups.astype(np.int32)} if order else {})}
        if packed:
            stored |= {"weight_packed": packed_columns(padded(codes + half, 32 // bits), bits), "weight_shape": np.array([rows, inputs])}
        else:
            stored |= {"weight": codes.astype(np.int8)}
        if not symmetric:
            offset = packed_rows(padded((zeros + half).T, 32 // bits, axis=0), bits) if packed else zeros.T.astype(np.int8)
            stored |= {"weight_zero_point": np.ascontiguousarray(offset)}
        assert count == scales.shape[1]
        return stored, values

    return quantize


def padded(codes: np.ndarray[Any, Any], multiple: int, axis: int = 1) -> np.ndarray[Any, Any]:
    """Return codes with zeros behind them, up to a multiple."""
    widths = [(0, 0), (0, 0)]
    widths[axis] = (0, -codes.shape[axis] % multiple)
    return np.pad(codes, widths)


def floats(rows: int | None, columns: int | None, scale: str = "weight_scale", *, scalar: bool = False) -> Quantize:
    """Return how FP8 is stored, with blocks of so many rows and columns; None for all of them."""

    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        stored, values = fp8_blocks(block=(rows or weight.shape[0], columns or weight.shape[1]))(weight, random)
        scales = stored["weight_scale_inv"]
        return {"weight": stored["weight"], scale: scales.reshape(()) if scalar else scales}, values

    return quantize


def nvfp4(names: tuple[str, str, str], *, inverse: bool, largest: float | None = None) -> Quantize:
    """Return how NVFP4 is stored; the number of the whole matrix multiplies scales, or is what they are divided by.

    ``largest``: its largest magnitude, by default that of the weights. Libraries have one for projections that are computed together.
    """

    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        whole = np.float32((largest or np.abs(weight).max()) / (6 * 448))
        groups = weight.reshape(len(weight), -1, GROUP_OF_NVFP4)
        scales = (np.abs(groups).max(axis=-1) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
        number = np.float32(1) / whole if inverse else whole
        exact = scales.astype(np.float32) / number if inverse else scales.astype(np.float32) * number
        codes = fp4_codes(groups / exact[..., None])
        values = (FP4[codes] * exact[..., None]).reshape(weight.shape)
        packed, of_groups, of_all = names
        shape = (1,) if inverse else ()
        return {packed: of_two_codes(codes.reshape(weight.shape)), of_groups: scales, of_all: np.full(shape, number, np.float32)}, values

    return quantize


def mxfp4(names: tuple[str, str], *, blocks: bool) -> Quantize:
    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        groups = weight.reshape(len(weight), -1, GROUP_OF_MXFP4)
        exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
        codes = fp4_codes(groups / np.exp2(exponents)[..., None])
        values = (FP4[codes] * np.exp2(exponents).astype(np.float32)[..., None]).reshape(weight.shape)
        packed = of_two_codes(codes.reshape(weight.shape))
        shape = (*exponents.shape, 16) if blocks else packed.shape
        return {names[0]: packed.reshape(shape), names[1]: (exponents + 127).astype(np.uint8)}, values

    return quantize


def symmetric(group_size: int) -> Quantize:
    """Return how compressed-tensors stores int4 without zero points: the scale is 2 / 15 of the largest magnitude of a group."""

    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        groups = np.arange(weight.shape[1]) // group_size
        scales = np.stack([np.abs(weight[:, groups == group]).max(axis=1) / 7.5 for group in range(groups.max() + 1)], 1)
        scales = scales.astype(ml_dtypes.bfloat16)
        spread = scales[:, groups].astype(np.float32)
        codes = np.clip(np.rint(weight / spread), -8, 7).astype(np.int64)
        packed = packed_columns(padded(codes + 8, 8), 4)
        stored = {"weight_packed": packed, "weight_scale": scales, "weight_shape": np.array(weight.shape)}
        return stored, codes.astype(np.float32) * spread

    return quantize


def modelopt_int4(group_size: int, *, factors: bool = True) -> Quantize:
    """Return how ModelOpt stores W4A16_AWQ: two rows share a byte, and inputs may have factors."""

    def quantize(weight: np.ndarray[Any, Any], random: np.random.Generator) -> tuple[Tensors, np.ndarray[Any, Any]]:
        factor = (0.5 + random.random(weight.shape[1]) if factors else np.ones(weight.shape[1])).astype(ml_dtypes.bfloat16)
        scaled = weight / factor.astype(np.float32)
        groups = np.arange(weight.shape[1]) // group_size
        scales = np.stack([np.abs(scaled[:, groups == group]).max(axis=1) / 7 for group in range(groups.max() + 1)], 1)
        scales = scales.astype(ml_dtypes.bfloat16)
        spread = scales[:, groups].astype(np.float32)
        codes = np.clip(np.rint(scaled / spread), -8, 7).astype(np.int64)
        values = codes.astype(np.float32) * spread * factor.astype(np.float32)
        return {"weight": np.ascontiguousarray(of_two_codes(codes.T).T), "weight_scale": scales, "pre_quant_scale": factor}, values

    return quantize


def write_quantized(folder: Path, model: str, quantize: Quantize, config: dict[str, Any], *, field: str = "quantization_config") -> Tensors:
    """Write a golden model whose linear layers, but for the head and routers, are quantized. Return the values of all its tensors."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    source = GOLDEN / model
    if config in [known for _, known in FP4_CASES.values()]:
        source = write_model(folder.parent / f"{folder.name}-source", hidden_size=32, intermediate_size=64, head_dim=16)
    data = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, field: config}))
    for name in ("tokenizer.json", "generation_config.json"):
        if (GOLDEN / model / name).is_file():
            shutil.copy(GOLDEN / model / name, folder)
    values: Tensors = load_file(source / "model.safetensors")
    stored: Tensors = {}
    for name, array in list(values.items()):
        if array.ndim == 2 and "layers" in name and not name.endswith("mlp.gate.weight"):
            parts, values[name] = quantize(array.astype(np.float32), random)
            stored |= {f"{name.removesuffix('.weight')}.{part}": tensor.copy(order="C") for part, tensor in parts.items()}
        else:
            stored[name] = array
    save_file(stored, folder / "model.safetensors")
    return values


def write_fp8(folder: Path, block: tuple[int, int], name: str | None = None, **fields: Any) -> Path:
    """Write a random model in FP8: see :func:`write_random`."""
    return write_random(folder, fp8_blocks(block=block), {**FP8_CONFIG, "weight_block_size": list(block)}, name, **fields)


def write_gptq(folder: Path, group_size: int, name: str | None = None, *, one_order: bool, **fields: Any) -> Path:
    """Write a random model in GPTQ with act-order: see :func:`write_random`."""
    config = {**GPTQ_CONFIG, "group_size": group_size, "desc_act": True, "checkpoint_format": "gptq"}
    return write_random(folder, gptq(group_size=group_size, order=True, one_order=one_order), config, name, **fields)


def write_nvfp4(folder: Path, name: str | None = None, *, one_factor: bool, inverse: bool = False, **fields: Any) -> Path:
    """Write a random model in NVFP4, of ModelOpt or with ``inverse`` of compressed-tensors: see :func:`write_random`."""
    names = ("weight_packed", "weight_scale", "weight_global_scale") if inverse else ("weight", "weight_scale", "weight_scale_2")
    config = modelopt("W4A16_NVFP4", group_size=16)
    if inverse:
        config = {**CT_NVFP4, "quantization_status": "frozen"}  # unlike that of FP4_CASES, for which write_quantized has a model
    return write_random(folder, nvfp4(names, inverse=inverse, largest=1.5 if one_factor else None), config, name, **fields)


def write_random(folder: Path, quantize: Quantize, config: dict[str, Any], name: str | None = None, **fields: Any) -> Path:
    """Write a quantized model: :func:`write_model` with ``fields``, or with those of a golden model and ``fields``."""
    golden = {} if name is None else json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    source = write_model(folder.parent / f"{folder.name}-source", **{**golden, **fields})
    write_quantized(folder, str(source), quantize, config)
    return folder


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


def compressed(packing: str, **weights: Any) -> dict[str, Any]:
    """Return a ``quantization_config`` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def in_groups_of(size: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``quantization_config`` of compressed-tensors with groups of another size."""
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], "group_size": size}}}}


CT_INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
CT_ASYMMETRIC = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8, symmetric=False)
CT_ORDER = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8, actorder="group")
CT_INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
CT_INT8_ASYMMETRIC = compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False)
CT_PACKED_INT8 = compressed("pack-quantized", num_bits=8, type="int", strategy="channel")
CT_FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
CT_FP8_TENSOR = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
CT_FP8_BLOCKS = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 12])
CT_NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
CT_MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """Return a ``quantization_config`` of ModelOpt."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


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
    "gptq-smaller-last-group": (gptq(group_size=12), {**GPTQ_CONFIG, "group_size": 12}),
    "gptq-order-smaller-last-group": (gptq(group_size=12, order=True), {**GPTQ_CONFIG, "group_size": 12, "desc_act": True}),
    "awq": (awq(), AWQ_CONFIG),
    "fp8-blocks": (fp8_blocks(), FP8_CONFIG),
    "compressed-int4": (integers(4, 8, packed=True, symmetric=True), CT_INT4),
    "compressed-int4-nearest": (symmetric(8), CT_INT4),
    "compressed-int4-asymmetric": (integers(4, 8, packed=True, symmetric=False), CT_ASYMMETRIC),
    "compressed-int4-order": (integers(4, 8, packed=True, symmetric=True, order=True), CT_ORDER),
    "compressed-int4-smaller-last-group": (integers(4, 12, packed=True, symmetric=False), in_groups_of(12, CT_ASYMMETRIC)),
    "compressed-packed-int8": (integers(8, None, packed=True, symmetric=True), CT_PACKED_INT8),
    "compressed-int8": (integers(8, None, packed=False, symmetric=True), CT_INT8),
    "compressed-int8-asymmetric": (integers(8, None, packed=False, symmetric=False), CT_INT8_ASYMMETRIC),
    "compressed-fp8": (floats(1, None), CT_FP8),
    "compressed-fp8-tensor": (floats(None, None), CT_FP8_TENSOR),
    "compressed-fp8-blocks": (floats(16, 12), CT_FP8_BLOCKS),
    "modelopt-fp8": (floats(None, None, scalar=True), modelopt("FP8")),
    "modelopt-int4": (modelopt_int4(8), modelopt("W4A16_AWQ", group_size=8)),
}

#: Cases whose groups need inputs of a multiple of 16 or 32. They are made from a small model.
FP4_CASES: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "compressed-nvfp4": (nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), inverse=True), CT_NVFP4),
    "compressed-mxfp4": (mxfp4(("weight_packed", "weight_scale"), blocks=False), CT_MXFP4),
    "modelopt-nvfp4": (nvfp4(("weight", "weight_scale", "weight_scale_2"), inverse=False), modelopt("NVFP4", group_size=16)),
    "mxfp4": (mxfp4(("weight_blocks", "weight_scales"), blocks=True), {"quant_method": "mxfp4"}),
}

ALL_CASES = CASES | FP4_CASES
