"""K/V of slots in host memory."""

from typing import Any

from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan
from trt_kvcache.kernels.host.arrays import bytes_of, carry_out, moves_of
from trt_kvcache.kernels.host.layers import for_each_layer
from trt_kvcache.kernels.layer_infos import KVLayerInfos
from trt_kvcache.memory.tensor import DeviceTensor


def copy_layer(destination: DeviceTensor, source: DeviceTensor, tokens: int, stream: Any) -> None:
    bytes_of(destination)[:, :, :tokens] = bytes_of(source)[:, :, :tokens]


def save_layers(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved(cache, saved, slot, rows, save=True)


def instantiate_layers(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
    _copy_saved(cache, saved, slot, rows, save=False)


def _copy_saved(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, *, save: bool) -> None:
    def copy(pair: tuple[DeviceTensor, DeviceTensor]) -> None:
        layer, tensor = bytes_of(pair[0])[slot, :, :, :rows], bytes_of(pair[1])[:, :, :rows]
        into, of = (tensor, layer) if save else (layer, tensor)
        into[...] = of

    for_each_layer(copy, zip(cache.views, saved.views, strict=True), _nbytes(cache, rows))


def compact_layers(layers: KVLayerInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    moves = list(moves_of(plan, layers.tokens_per_row))

    def compact(layer: DeviceTensor) -> None:
        array = bytes_of(layer)
        # First K, then V: so NumPy sees that slots do not overlap. Otherwise it would copy everything twice.
        for kv in (0, 1):
            carry_out(array[:, kv], moves, whole_slots=False)

    for_each_layer(compact, layers.views, _nbytes(layers, sum(move.tokens for move in moves)))


def _nbytes(infos: KVLayerInfos, rows: int) -> int:
    """Return the bytes of so many rows of all layers, or somewhat more."""
    return 2 * infos.num_layers * infos.max_kv_heads * rows * infos.row_nbytes
