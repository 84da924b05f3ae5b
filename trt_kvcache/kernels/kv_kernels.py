"""K and V of slots: save a slot, restore it from saved tensors, compact the slots of a batch."""

from __future__ import annotations

from typing import Any

from trt_kvcache._util.checks import int_in_range, slot_index
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, CompactionPlan, DeviceCompactionPlan, check_plan
from trt_kvcache.kernels.host_arrays import bytes_of, carry_out, moves_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import MAX_SAVED_TENSORS, Grid, blocks_for, launch
from trt_kvcache.kernels.layer_infos import KVLayerInfo, KVLayerInfos, check_kind
from trt_kvcache.kernels.layer_views import CACHE_NDIM, SAVED_NDIM, check_layer, check_same, slot_view
from trt_kvcache.kernels.parallel_layers import for_each_layer
from trt_kvcache.memory.shapes import ROW_GRANULE, row_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Blocks of a launch if only the device knows the live tokens: most of them may have nothing to do.
_MAX_BLOCKS_UNKNOWN = 4096

#: Blocks of a launch with a list of moves: each block reads the list once, then moves several groups of columns.
_MAX_BLOCKS_LISTED = 16384

_INFO_NBYTES = len(KVLayerInfo._fields) * itemsize("int64")


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
    ``saveKVCacheLayerIntoTensor`` of TensorRT Edge-LLM.
    """
    source = _check_single(src, dst, batch_idx, stream)
    copy_layer_kernel(dst, source, dst.shape[2], stream)


def instantiate_kv_cache_layer_from_tensor(dst: DeviceTensor, src: DeviceTensor, batch_idx: int, *, stream: Any) -> None:
    """Restore K and V of one slot of one layer from a saved tensor.

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
    ``instantiateKVCacheLayerFromTensor`` of TensorRT Edge-LLM. Lengths are not changed.
    """
    destination = _check_single(dst, src, batch_idx, stream)
    copy_layer_kernel(destination, src, src.shape[2], stream)


def _check_batched(cache: KVLayerInfos, saved: KVLayerInfos, batch_idx: int, sequence_length: int, stream: Any) -> tuple[int, int]:
    """Check the arguments of the batched variants; return slot and rows."""
    check_kind("cache layers", cache, saved=False)
    check_kind("saved tensors", saved, saved=True)
    if saved.memory is not cache.memory:
        raise PlaceError(f"saved tensors: expected tensors of {cache.memory.device}, got tensors of {saved.memory.device}.")
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
        raise ShapeError(f"saved tensors: expected rows of {cache.tokens_per_row} tokens, got rows of {saved.tokens_per_row}.")
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
    ``saveKVCacheBatched`` of TensorRT Edge-LLM. There ``numLayers``, ``headDim``, ``maxKVHeads`` and ``maxBatchSize`` are
    arguments; here the infos hold them.
    """
    slot, rows = _check_batched(src_layer_infos, dst_layer_infos, batch_idx, sequence_length, stream)
    save_layers_kernel(src_layer_infos, dst_layer_infos, slot, rows, stream)


def instantiate_kv_cache_batched(
    dst_layer_infos: KVLayerInfos, src_layer_infos: KVLayerInfos, batch_idx: int, sequence_length: int, *, stream: Any
) -> None:
    """Restore the first tokens of one slot of all layers of a head-dim group, in one launch for every 64 layers.

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
    ``instantiateKVCacheBatched`` of TensorRT Edge-LLM. Lengths are not changed.
    """
    slot, rows = _check_batched(dst_layer_infos, src_layer_infos, batch_idx, sequence_length, stream)
    instantiate_layers_kernel(dst_layer_infos, src_layer_infos, slot, rows, stream)


def compact_kv_cache_batched(layer_infos: KVLayerInfos, moves: AnyCompactionPlan, *, stream: Any) -> None:
    """Move the live tokens of the kept slots of all layers of a head-dim group to their new slots, in place.

    Parameters
    ----------
    layer_infos : KVLayerInfos
        The cache's layers; their heads may differ.
    moves : CompactionPlan, or DeviceCompactionPlan
        Any permutation if the host knows the mapping. A mapping on the device keeps the order; its lengths are read here, so compact
        them after this.
    stream : cuda.core.Stream, or with a device mapping GraphBuilder
        The launches, one for every 96 moves, are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    MappingError, RangeError, ShapeError, PlaceError, ClosedError
        The plan does not fit the layers. Nothing was changed.
    """
    check_kind("layer_infos", layer_infos, saved=False)
    check_plan(moves, layer_infos.max_batch_size, layer_infos.memory, stream)
    layer_infos.check_open()
    if isinstance(moves, CompactionPlan) and moves.max_tokens > layer_infos.shortest_sequence:
        raise RangeError(f"moves: expected lengths up to {layer_infos.shortest_sequence} tokens, got {moves.max_tokens}.")
    if moves.old_batch:
        compact_layers_kernel(layer_infos, moves, stream)


# --- NumPy, for host memory ---


def _copy_layer_on_host(destination: DeviceTensor, source: DeviceTensor, tokens: int, stream: Any) -> None:
    bytes_of(destination)[:, :, :tokens] = bytes_of(source)[:, :, :tokens]


def _save_layers_on_host(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved_on_host(cache, saved, slot, rows, save=True)


def _instantiate_layers_on_host(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved_on_host(cache, saved, slot, rows, save=False)


def _copy_saved_on_host(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, *, save: bool) -> None:
    def copy(pair: tuple[DeviceTensor, DeviceTensor]) -> None:
        layer, tensor = bytes_of(pair[0])[slot, :, :, :rows], bytes_of(pair[1])[:, :, :rows]
        destination, source = (tensor, layer) if save else (layer, tensor)
        destination[...] = source

    for_each_layer(copy, zip(cache.views, saved.views, strict=True), _nbytes(cache, rows))


def _compact_layers_on_host(layers: KVLayerInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    moves = moves_of(plan, layers.tokens_per_row)

    def compact(layer: DeviceTensor) -> None:
        array = bytes_of(layer)
        # First K, then V: then NumPy sees that slots do not overlap. Otherwise it would copy everything twice.
        for kv in (0, 1):
            carry_out(array[:, kv], moves, whole_slots=False)

    for_each_layer(compact, layers.views, _nbytes(layers, sum([move.tokens for move in moves])))


def _nbytes(infos: KVLayerInfos, rows: int) -> int:
    """Return an upper bound of the bytes of some rows of all layers."""
    return 2 * infos.num_layers * infos.max_kv_heads * rows * infos.row_nbytes


# --- CUDA: launches of plugins/kv.cu ---


def _grid(infos: KVLayerInfos, rows: int, layers: int, **limit: int) -> Grid:
    heads = 2 * infos.max_kv_heads
    return (blocks_for(rows * infos.row_nbytes // ROW_GRANULE, heads * layers, **limit), heads, layers)


def _copy_layer_on_device(destination: DeviceTensor, source: DeviceTensor, tokens: int, stream: Any) -> None:
    _, heads, _, head_dim = destination.shape
    nbytes = tokens * row_nbytes(head_dim, destination.dtype)
    size = itemsize(destination.dtype)
    addresses = (part for tensor in (destination, source) for part in (tensor.ptr, tensor.strides[0] * size, tensor.strides[1] * size))
    if nbytes:
        grid = (blocks_for(nbytes // ROW_GRANULE, 2 * heads), heads, 2)
        launch(destination.memory, "kv", "copy_layer", grid, (*addresses, nbytes), stream)


def _copy_saved_on_device(kernel: str, cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    if not rows:
        return
    infos = cache.device_layer_infos.ptr
    for first in range(0, cache.num_layers, MAX_SAVED_TENSORS):
        addresses = [info.data for info in saved.host[first : first + MAX_SAVED_TENSORS]]
        grid = _grid(cache, rows, len(addresses))
        sizes = (cache.row_nbytes, slot, rows, saved.shortest_rows)
        padding = (0,) * (MAX_SAVED_TENSORS - len(addresses))
        launch(cache.memory, "kv", kernel, grid, (infos + first * _INFO_NBYTES, *sizes, *addresses, *padding), stream)


def _save_layers_on_device(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved_on_device("save_layers", cache, saved, slot, rows, stream)


def _instantiate_layers_on_device(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved_on_device("instantiate_layers", cache, saved, slot, rows, stream)


def _compact_layers_on_device(layers: KVLayerInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    infos, row, count = layers.device_layer_infos.ptr, layers.row_nbytes, layers.num_layers
    if isinstance(plan, DeviceCompactionPlan):
        grid = _grid(layers, layers.shortest_rows, count, max_blocks=_MAX_BLOCKS_UNKNOWN)
        mapped = (infos, row, layers.tokens_per_row, plan.mapping.ptr, plan.lengths.ptr, plan.old_batch)
        launch(layers.memory, "kv", "compact_layers_mapped", grid, mapped, stream)
        return
    for moves in plan.of_rows(layers.tokens_per_row).launches:
        if not moves.max_tokens:
            continue
        listed = (infos, row, moves.max_tokens, moves.count, *moves.packed)
        grid = _grid(layers, moves.max_tokens, count, max_blocks=_MAX_BLOCKS_LISTED)
        launch(layers.memory, "kv", f"compact_layers_{moves.capacity}", grid, listed, stream)


# --- without checks, for engines ---


#: Copy the first tokens of K and V from one view ``[2, H, n, D]`` to another.
copy_layer_kernel = Kernel(_copy_layer_on_host, _copy_layer_on_device)

#: Copy the first rows of a slot of all layers into saved tensors.
save_layers_kernel = Kernel(_save_layers_on_host, _save_layers_on_device)

#: Copy the first rows of saved tensors into a slot of all layers.
instantiate_layers_kernel = Kernel(_instantiate_layers_on_host, _instantiate_layers_on_device)

#: Move the live tokens of the slots of all layers.
compact_layers_kernel = Kernel(_compact_layers_on_host, _compact_layers_on_device)
