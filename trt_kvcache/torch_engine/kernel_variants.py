"""The compiled variants of kernels that a decoder needs, so that they can be compiled while its weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS
from trt_kvcache.kernels.linear_tiles import ROW_COUNTS, TILE_ROWS, TILED_ROWS
from trt_kvcache.kernels.packed_pair_kernels import pair_variant
from trt_kvcache.kernels.source_variants import (
    EXPERT_SOURCE,
    EXPERT_TILE_SOURCE,
    LINEAR_SOURCE,
    TILES,
    TREE_SOURCE,
    head_dims_of,
    shared_variant,
    variant_name,
)
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix, PackedParts


def decoder_variants(model: ModelConfig, dtype: str, kv_dtype: str | None) -> Iterator[str]:
    """Yield the variants of prompts and decode steps, but for recurrent layers and packed weights. Those that take longest come first."""
    if dtype not in ELEMENT_TYPES:
        return
    head_dims = sorted({mixer.head_dim for mixer in model.attention_layers} & set(HEAD_DIMS))
    yield from (variant_name("attention_prefill", dtype, head_dim, kv_dtype) for head_dim in head_dims)
    yield "sampling_choose"
    heads = sorted({(mixer.head_dim, mixer.stores_kv) for mixer in model.attention_layers})
    for source, (head_dim, stores_kv) in product(TILES, heads):
        if source != TREE_SOURCE and head_dim in head_dims_of(source):
            name = variant_name(source, dtype, head_dim, kv_dtype)
            yield name if stores_kv else shared_variant(name)
    yield variant_name(LINEAR_SOURCE, dtype, ROW_COUNTS[0])
    if any(isinstance(layer.mlp, RoutedMlpConfig) for layer in model.layers):
        yield variant_name(EXPERT_SOURCE, dtype, TILE_ROWS)
        yield variant_name(EXPERT_TILE_SOURCE, dtype, TILED_ROWS)
        yield from ("router", "expert_order")
    yield from ("decoder_layer", "lengths")


def packed_variants(weight: PackedMatrix, dtype: str, *, of_expert: bool) -> Iterator[str]:
    """Yield the variants of decode steps for a packed weight, and of prompts for one of an expert."""
    if of_expert:
        yield weight.tensors.expert_variant(dtype)
        yield weight.tensors.expert_tile_variant(dtype)
    yield weight.tensors.variant(dtype, ROW_COUNTS[0])


def pair_variants(parts: PackedParts) -> Iterator[str]:
    """Yield the variants of decode steps for two parts in one launch."""
    for launch in parts.launches:
        if len(launch) == 2:
            first, second = launch
            yield pair_variant(first.tensors, second.tensors, str(first.dtype).removeprefix("torch."), ROW_COUNTS[0])
