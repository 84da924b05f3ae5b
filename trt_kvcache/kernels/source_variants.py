"""Compiled variants of a source: attention by dtype, head dim and K/V dtype; others by dtypes, or by dtype and number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trt_kvcache.kernels.attention_tiles import (
    DECODE_HEAD_DIMS,
    ELEMENT_TYPES,
    HEAD_DIMS,
    STORED_TYPES,
    decode_tiles,
    few_tiles,
    prefill_tiles,
    quantized_prefill_tiles,
)
from trt_kvcache.kernels.linear_tiles import (
    EXPONENTS,
    NVFP4_SCALES,
    PACKED_TYPES,
    PAIR_SCALES,
    PAIRS,
    ROW_COUNTS,
    SUPER_BLOCK_TYPES,
    TILE_ROWS,
    TILED_ROWS,
    expert_tile_macros,
    linear_macros,
    pair_macros,
)
from trt_kvcache.kernels.recurrent_chunks import chunk_tokens

#: The functions that choose the macros of each attention source, by head dim and architecture.
TILES = {"attention_decode": decode_tiles, "attention_decode_few": few_tiles, "attention_prefill": prefill_tiles}

#: The same for a quantized cache.
QUANTIZED_TILES: dict[str, Callable[[int, str], dict[str, int]]] = {
    "attention_decode": partial(decode_tiles, quantized=True),
    "attention_decode_few": partial(few_tiles, quantized=True),
    "attention_prefill": quantized_prefill_tiles,
}

#: The sources of recurrent layers.
RECURRENT_SOURCES = ("recurrent_causal_conv1d", "recurrent_delta_rule", "recurrent_mamba2")

#: The dtypes of states for each dtype of activations.
STATE_DTYPES = {"float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32"), "float32": ("float32",)}

#: The sources of projections of few rows, with weights in 16 bits, with packed ones, those in super-blocks, and two packed matrices in
#: different formats; and for chosen experts.
LINEAR_SOURCE, PACKED_LINEAR_SOURCE, SUPER_BLOCK_SOURCE, PAIR_SOURCE = (
    "linear",
    "linear_packed",
    "linear_super_blocks",
    "linear_packed_pairs",
)
EXPERT_SOURCE, PACKED_EXPERT_SOURCE = "linear_experts", "linear_packed_experts"
SUPER_BLOCK_EXPERT_SOURCE = "linear_super_block_experts"

#: The same for the rows of a prompt.
EXPERT_TILE_SOURCE, PACKED_EXPERT_TILE_SOURCE = "linear_expert_tiles", "linear_packed_expert_tiles"
SUPER_BLOCK_EXPERT_TILE_SOURCE = "linear_super_block_expert_tiles"

#: The dtypes of scales of packed integers for each dtype of activations.
SCALE_DTYPES = {"float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float16", "float32")}

#: The source of attention that has variants for trees of draft tokens, and the end of their names.
TREE_SOURCE, _TREE = "attention_prefill", "tree"

#: The end of the names of variants of the other sources of attention, for layers that read rows which an earlier layer has appended.
_SHARED = "shared"

_ELEMENT_TYPES = {**ELEMENT_TYPES, "float32": "Float32"}
_SCALE_TYPES = {**_ELEMENT_TYPES, EXPONENTS: "E8m0", NVFP4_SCALES: "Float8"}


def head_dims_of(source: str) -> tuple[int, ...]:
    """Return the head dims that an attention source is compiled for."""
    return HEAD_DIMS if source == "attention_prefill" else DECODE_HEAD_DIMS


def variant_names(source: str) -> list[str]:
    """Return the names of all variants of a source."""
    if source in TILES:
        kinds = [(dtype, kv_dtype) for kv_dtype in (None, *STORED_TYPES) for dtype in ELEMENT_TYPES]
        names = [variant_name(source, dtype, dim, kv_dtype) for dtype, kv_dtype in kinds for dim in head_dims_of(source)]
        return names + [(tree_variant if source == TREE_SOURCE else shared_variant)(name) for name in names]
    if source in RECURRENT_SOURCES:
        return [variant_name(source, dtype, state) for dtype, states in STATE_DTYPES.items() for state in states]
    if source == LINEAR_SOURCE:
        return [variant_name(source, dtype, rows) for dtype in ELEMENT_TYPES for rows in ROW_COUNTS]
    if source == EXPERT_SOURCE:
        return [variant_name(source, dtype, TILE_ROWS) for dtype in ELEMENT_TYPES]
    if source == EXPERT_TILE_SOURCE:
        return [variant_name(source, dtype, TILED_ROWS) for dtype in ELEMENT_TYPES]
    if source in (PACKED_LINEAR_SOURCE, PACKED_EXPERT_SOURCE, PACKED_EXPERT_TILE_SOURCE):
        formats = [(dtype, kind, scale) for dtype in SCALE_DTYPES for kind in PACKED_TYPES for scale in scale_dtypes(dtype, kind)]
        of_experts = (TILED_ROWS,) if source == PACKED_EXPERT_TILE_SOURCE else (TILE_ROWS,)
        counts = ROW_COUNTS if source == PACKED_LINEAR_SOURCE else of_experts
        return [packed_variant_name(source, dtype, rows, kind, scale) for dtype, kind, scale in formats for rows in counts]
    if source in (SUPER_BLOCK_SOURCE, SUPER_BLOCK_EXPERT_SOURCE, SUPER_BLOCK_EXPERT_TILE_SOURCE):
        of_experts = (TILE_ROWS,) if source == SUPER_BLOCK_EXPERT_SOURCE else (TILED_ROWS,)
        counts = ROW_COUNTS if source == SUPER_BLOCK_SOURCE else of_experts
        return [variant_name(source, dtype, rows, kind) for dtype in ELEMENT_TYPES for rows in counts for kind in SUPER_BLOCK_TYPES]
    if source == PAIR_SOURCE:
        return [pair_variant_name(dtype, rows, kinds) for dtype in ELEMENT_TYPES for rows in ROW_COUNTS for kinds in PAIRS]
    return [source]


def variant_name(source: str, dtype: str, second: int | str, stored: str | None = None) -> str:
    """Return the name of a variant, such as ``"attention_decode-float16-128-int8"``; ``stored``: dtype of K and V, or of super-blocks.

    ``second`` is the head dim of attention, the state dtype of a recurrent kernel, or the rows of a projection.
    """
    name = f"{source}-{dtype}-{second}"
    return name if stored in (None, dtype) else f"{name}-{stored}"


def tree_variant(name: str) -> str:
    """Return the name of the same variant of :data:`TREE_SOURCE` for trees of draft tokens."""
    return f"{name}-{_TREE}"


def shared_variant(name: str) -> str:
    """Return the name of the same variant of a source of decode kernels for rows that an earlier layer has appended."""
    return f"{name}-{_SHARED}"


def scale_dtypes(dtype: str, kind: str) -> tuple[str, ...]:
    """Return the dtypes of scales of a kind of packed weights for a dtype of activations."""
    return (EXPONENTS, NVFP4_SCALES) if kind == "e2m1" else SCALE_DTYPES[dtype]


def packed_variant_name(source: str, dtype: str, rows: int, kind: str, scale_dtype: str) -> str:
    """Return the name of a variant of a source for packed weights."""
    return f"{source}-{dtype}-{rows}-{kind}-{scale_dtype}"


def pair_variant_name(dtype: str, rows: int, kinds: tuple[str, str]) -> str:
    """Return the name of a variant for two matrices of different formats."""
    return f"{PAIR_SOURCE}-{dtype}-{rows}-{'-'.join(kinds)}"


def variant_macros(name: str, arch: str) -> dict[str, str]:
    """Return the macros of a variant for an architecture; none for a source without variants."""
    source, _, variant = name.partition("-")
    if not variant:
        return {}
    dtype, second, *kv_dtype = variant.split("-")  # of packed weights: quantized values and scales
    if source in RECURRENT_SOURCES:
        return {"ELEMENT": _ELEMENT_TYPES[dtype], "STATE": _ELEMENT_TYPES[second], "CHUNK_TOKENS": str(chunk_tokens(arch))}
    if source in (LINEAR_SOURCE, PACKED_LINEAR_SOURCE, EXPERT_SOURCE, PACKED_EXPERT_SOURCE, EXPERT_TILE_SOURCE, PACKED_EXPERT_TILE_SOURCE):
        packed, scale = kv_dtype or (None, None)
        macros = _product_macros(source, int(second), arch, packed)
        stored = {} if packed is None or scale is None else {"STORED": PACKED_TYPES[packed], "SCALE": _SCALE_TYPES[scale]}
        return {"ELEMENT": ELEMENT_TYPES[dtype], **stored, **macros}
    if source in (SUPER_BLOCK_SOURCE, SUPER_BLOCK_EXPERT_SOURCE, SUPER_BLOCK_EXPERT_TILE_SOURCE):
        macros = _product_macros(source, int(second), arch, kv_dtype[0])
        return {"ELEMENT": ELEMENT_TYPES[dtype], "STORED": SUPER_BLOCK_TYPES[kv_dtype[0]], **macros}
    if source == PAIR_SOURCE:
        first, last = kv_dtype
        macros = {macro: str(value) for macro, value in pair_macros(int(second), arch, (first, last)).items()}
        is_super_block = last in SUPER_BLOCK_TYPES
        others = (
            {"SECOND": SUPER_BLOCK_TYPES[last]} if is_super_block else {"STORED": PACKED_TYPES[last], "SCALE": _SCALE_TYPES[PAIR_SCALES]}
        )
        return {"ELEMENT": ELEMENT_TYPES[dtype], "FIRST": SUPER_BLOCK_TYPES[first], **others, **macros}
    kinds = {macro: "1" for macro, end in (("TREE", _TREE), ("SHARED_ROWS", _SHARED)) if end in kv_dtype}
    kv_dtype = [one for one in kv_dtype if one not in (_TREE, _SHARED)]
    tiles = {macro: str(value) for macro, value in (QUANTIZED_TILES if kv_dtype else TILES)[source](int(second), arch).items()}
    stored = {"STORED": STORED_TYPES[kv_dtype[0]]} if kv_dtype else {}
    return {"ELEMENT": ELEMENT_TYPES[dtype], **stored, "HEAD_DIM": second, **tiles, **kinds}


def _product_macros(source: str, rows: int, arch: str, packed: str | None) -> dict[str, str]:
    is_tiled = source in (EXPERT_TILE_SOURCE, PACKED_EXPERT_TILE_SOURCE, SUPER_BLOCK_EXPERT_TILE_SOURCE)
    sizes = expert_tile_macros() if is_tiled else linear_macros(rows, arch, packed)
    return {macro: str(value) for macro, value in sizes.items()}
