"""K/V of slots on the device: ``plugins/kv.cu``."""

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.cuda.launch import Grid, blocks_for, launch
from trt_kvcache.kernels.launch_limits import MAX_SAVED_TENSORS
from trt_kvcache.kernels.layer_infos import KVLayerInfo, KVLayerInfos
from trt_kvcache.memory.shapes import ROW_GRANULE, row_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Blocks of a launch whose host does not know how many tokens are live: most of them may find nothing to do.
_MAX_BLOCKS_UNKNOWN = 4096

#: Blocks of a launch with a list of moves: each block reads the list once and then moves several groups of columns.
_MAX_BLOCKS_LISTED = 16384

_INFO_NBYTES = len(KVLayerInfo._fields) * itemsize("int64")


def _grid(infos: KVLayerInfos, rows: int, layers: int, **limit: int) -> Grid:
    heads = 2 * infos.max_kv_heads
    return (blocks_for(rows * infos.row_nbytes // ROW_GRANULE, heads * layers, **limit), heads, layers)


def copy_layer(destination: DeviceTensor, source: DeviceTensor, tokens: int, stream: Any) -> None:
    _, heads, _, head_dim = destination.shape
    nbytes = tokens * row_nbytes(head_dim, destination.dtype)
    size = itemsize(destination.dtype)
    to, of = ((tensor.ptr, tensor.strides[0] * size, tensor.strides[1] * size) for tensor in (destination, source))
    if nbytes:
        grid = (blocks_for(nbytes // ROW_GRANULE, 2 * heads), heads, 2)
        launch(destination.memory, "kv", "copy_layer", grid, (*to, *of, nbytes), stream)


def _copy_saved(kernel: str, cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    infos = cache.device_layer_infos.ptr
    for first in range(0, cache.num_layers, MAX_SAVED_TENSORS):
        addresses = [info.data for info in saved.host[first : first + MAX_SAVED_TENSORS]]
        grid = _grid(cache, rows, len(addresses))
        sizes = (cache.row_nbytes, slot, rows, saved.shortest_rows)
        padding = (0,) * (MAX_SAVED_TENSORS - len(addresses))
        launch(cache.memory, "kv", kernel, grid, (infos + first * _INFO_NBYTES, *sizes, *addresses, *padding), stream)


def save_layers(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved("save_layers", cache, saved, slot, rows, stream)


def instantiate_layers(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved("instantiate_layers", cache, saved, slot, rows, stream)


def compact_layers(layers: KVLayerInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    infos, row, count = layers.device_layer_infos.ptr, layers.row_nbytes, layers.num_layers
    if isinstance(plan, DeviceCompactionPlan):
        grid = _grid(layers, layers.shortest_rows, count, max_blocks=_MAX_BLOCKS_UNKNOWN)
        mapped = (infos, row, layers.tokens_per_row, plan.mapping.ptr, plan.lengths.ptr, plan.old_batch)
        launch(layers.memory, "kv", "compact_layers_mapped", grid, mapped, stream)
        return
    for moves in plan.launches:
        listed = (infos, row, moves.max_tokens, moves.count, *moves.packed)
        grid = _grid(layers, moves.max_tokens, count, max_blocks=_MAX_BLOCKS_LISTED)
        launch(layers.memory, "kv", f"compact_layers_{moves.capacity}", grid, listed, stream)
