"""K/V of slots in NumPy."""

from __future__ import annotations

from typing import Any

from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan
from trt_kvcache.kernels.host.arrays import bytes_of, move, steps_of
from trt_kvcache.kernels.host.layers import for_each_layer
from trt_kvcache.kernels.layer_infos import KVLayerInfos
from trt_kvcache.tensor import DeviceTensor


def copy_layer(destination: DeviceTensor, source: DeviceTensor, tokens: int, stream: Any) -> None:
    """Copy the first tokens of K and V from one view ``[2, H, n, D]`` to another."""
    bytes_of(destination)[:, :, :tokens] = bytes_of(source)[:, :, :tokens]


def save_layers(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, tokens: int, stream: Any) -> None:
    """Copy the first tokens of a slot of all layers into saved tensors."""

    def save(pair: tuple[DeviceTensor, DeviceTensor]) -> None:
        layer, tensor = pair
        bytes_of(tensor)[:, :, :tokens] = bytes_of(layer)[slot, :, :, :tokens]

    for_each_layer(save, zip(cache.views, saved.views, strict=True), _nbytes(cache, tokens))


def instantiate_layers(cache: KVLayerInfos, saved: KVLayerInfos, slot: int, tokens: int, stream: Any) -> None:
    """Copy the first tokens of saved tensors into a slot of all layers."""

    def instantiate(pair: tuple[DeviceTensor, DeviceTensor]) -> None:
        layer, tensor = pair
        bytes_of(layer)[slot, :, :, :tokens] = bytes_of(tensor)[:, :, :tokens]

    for_each_layer(instantiate, zip(cache.views, saved.views, strict=True), _nbytes(cache, tokens))


def compact_layers(layers: KVLayerInfos, plan: AnyCompactionPlan, stream: Any) -> None:
    """Move the live tokens of the slots of all layers.

    K and V are moved apart: so slots lie one behind the other, and NumPy sees that they do not overlap. Else it would copy
    everything twice.
    """
    steps = list(steps_of(plan))

    def compact(layer: DeviceTensor) -> None:
        array = bytes_of(layer)
        for kv in (0, 1):
            move(array[:, kv], steps, whole=False)

    for_each_layer(compact, layers.views, _nbytes(layers, sum(step.tokens for step in steps)))


def _nbytes(infos: KVLayerInfos, tokens: int) -> int:
    """Return the bytes of so many tokens of all layers, or somewhat more."""
    return 2 * infos.num_layers * infos.max_kv_heads * tokens * infos.row_nbytes
