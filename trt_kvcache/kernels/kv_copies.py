"""Save K/V of a slot into tensors, and instantiate a slot from them: one layer, or all layers of a head-dim group."""

from typing import Any

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.errors import DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.layer_infos import KVLayerInfos, check_kind
from trt_kvcache.kernels.layer_views import CACHE_NDIM, SAVED_NDIM, check_layer, check_same, slot_view
from trt_kvcache.memory.tensor import DeviceTensor


def _check_single(layer: DeviceTensor, saved: DeviceTensor, batch_idx: int, stream: Any) -> DeviceTensor:
    """Check the arguments of the single-layer variants; return K and V of the slot ``[2, H, S, D]``."""
    check_layer("kv_cache_layer", layer, CACHE_NDIM)
    check_layer("kv_cache_tensor", saved, SAVED_NDIM)
    check_same("the cache layer", layer, "kv_cache_tensor", saved)
    slot = slot_index(batch_idx, len(layer))
    heads, longest = layer.shape[2:4]
    if saved.shape[1] != heads or saved.shape[2] > longest:
        raise ShapeError(f"kv_cache_tensor: expected shape (2, {heads}, n, {layer.shape[-1]}) with n <= {longest}, got {saved.shape}.")
    layer.memory.check_stream(stream)
    return slot_view(layer, slot)


def save_kv_cache_layer_into_tensor(dst: DeviceTensor, src: DeviceTensor, batch_idx: int, *, stream: Any) -> None:
    """Save K and V of one slot of one layer.

    Parameters
    ----------
    dst : DeviceTensor ``[2, H, n, D]``
        Contiguous; overwritten with the first n tokens of the slot.
    src : DeviceTensor ``[B, 2, H, S, D]``
        The combined view of a layer, of any layout; ``n <= S``.
    batch_idx : int
        The slot.
    stream : cuda.core.Stream or GraphBuilder
        The copy is ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, LayoutError, SlotError, ClosedError
        Nothing was changed.

    Notes
    -----
    ``saveKVCacheLayerIntoTensor`` of TensorRT Edge-LLM (seed 004).
    """
    source = _check_single(src, dst, batch_idx, stream)
    backend_of(src.memory).copy_layer(dst, source, dst.shape[2], stream)


def instantiate_kv_cache_layer_from_tensor(dst: DeviceTensor, src: DeviceTensor, batch_idx: int, *, stream: Any) -> None:
    """Instantiate K and V of one slot of one layer from a saved tensor.

    Parameters
    ----------
    dst : DeviceTensor ``[B, 2, H, S, D]``
        The combined view of a layer, of any layout; the first n tokens of the slot are overwritten.
    src : DeviceTensor ``[2, H, n, D]``
        Contiguous; ``n <= S``.
    batch_idx : int
        The slot.
    stream : cuda.core.Stream or GraphBuilder
        The copy is ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, LayoutError, SlotError, ClosedError
        Nothing was changed.

    Notes
    -----
    ``instantiateKVCacheLayerFromTensor`` of TensorRT Edge-LLM (seed 004). Lengths are not changed.
    """
    destination = _check_single(dst, src, batch_idx, stream)
    backend_of(dst.memory).copy_layer(destination, src, src.shape[2], stream)


def _check_batched(cache: KVLayerInfos, saved: KVLayerInfos, batch_idx: int, sequence_length: int, stream: Any) -> tuple[int, int]:
    """Check the arguments of the batched variants; return slot and rows."""
    check_kind("cache layers", cache, saved=False)
    check_kind("saved tensors", saved, saved=True)
    if saved.memory is not cache.memory:
        raise PlaceError(f"saved tensors: expected tensors of {cache.memory.device}, got those of {saved.memory.device}.")
    if saved.dtype != cache.dtype:
        raise DTypeError(f"saved tensors: expected {cache.dtype} as the cache, got {saved.dtype}.")
    if saved.num_layers != cache.num_layers or saved.head_dim != cache.head_dim:
        raise ShapeError(
            f"saved tensors: expected {cache.num_layers} layers of head_dim {cache.head_dim}, "
            f"got {saved.num_layers} of head_dim {saved.head_dim}."
        )
    for index, (mine, other) in enumerate(zip(cache.host, saved.host, strict=True)):
        if mine.num_kv_heads != other.num_kv_heads:
            raise ShapeError(f"saved tensors: layer {index} has {mine.num_kv_heads} heads, got a tensor of {other.num_kv_heads}.")
    slot = slot_index(batch_idx, cache.max_batch_size)
    tokens = int_in_range("sequence_length", sequence_length, 0)
    if saved.tokens_per_row != cache.tokens_per_row:
        raise ShapeError(f"saved tensors: expected rows of {cache.tokens_per_row} tokens, got those of {saved.tokens_per_row}.")
    for name, infos in (("the slots of the cache", cache), ("the saved tensors", saved)):
        if tokens > infos.shortest_sequence:
            raise RangeError(f"sequence_length: {name} hold at most {infos.shortest_sequence} tokens, got {tokens}.")
    cache.check_open()
    saved.check_open()
    cache.memory.check_stream(stream)
    return slot, cache.rows(tokens)


def save_kv_cache_batched(
    src_layer_infos: KVLayerInfos, dst_layer_infos: KVLayerInfos, batch_idx: int, sequence_length: int, *, stream: Any
) -> None:
    """Save the first tokens of one slot of all layers of a head-dim group, in one launch for every 64 layers.

    Parameters
    ----------
    src_layer_infos : KVLayerInfos
        The cache's layers; their heads may differ.
    dst_layer_infos : KVLayerInfos
        As many saved tensors ``[2, H_i, n, D]``, ``n >= sequence_length``.
    batch_idx : int
        The slot.
    sequence_length : int
        Tokens to copy.
    stream : cuda.core.Stream or GraphBuilder
        The copies are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, SlotError, RangeError, ClosedError
        Nothing was changed.

    Notes
    -----
    ``saveKVCacheBatched`` of TensorRT Edge-LLM (seed 004). There ``numLayers``, ``headDim``, ``maxKVHeads`` and ``maxBatchSize`` are
    arguments; here the infos hold them.
    """
    slot, rows = _check_batched(src_layer_infos, dst_layer_infos, batch_idx, sequence_length, stream)
    if rows:
        backend_of(src_layer_infos.memory).save_layers(src_layer_infos, dst_layer_infos, slot, rows, stream)


def instantiate_kv_cache_batched(
    dst_layer_infos: KVLayerInfos, src_layer_infos: KVLayerInfos, batch_idx: int, sequence_length: int, *, stream: Any
) -> None:
    """Instantiate the first tokens of one slot of all layers of a head-dim group, in one launch for every 64 layers.

    Parameters
    ----------
    dst_layer_infos : KVLayerInfos
        The cache's layers; their heads may differ. The first tokens of the slot are overwritten.
    src_layer_infos : KVLayerInfos
        As many saved tensors ``[2, H_i, n, D]``, ``n >= sequence_length``.
    batch_idx : int
        The slot.
    sequence_length : int
        Tokens to copy.
    stream : cuda.core.Stream or GraphBuilder
        The copies are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, SlotError, RangeError, ClosedError
        Nothing was changed.

    Notes
    -----
    ``instantiateKVCacheBatched`` of TensorRT Edge-LLM (seed 004). Lengths are not changed.
    """
    slot, rows = _check_batched(dst_layer_infos, src_layer_infos, batch_idx, sequence_length, stream)
    if rows:
        backend_of(dst_layer_infos.memory).instantiate_layers(dst_layer_infos, src_layer_infos, slot, rows, stream)
