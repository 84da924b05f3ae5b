"""``TorchStep``: what is bound for a step, as torch tensors over the same bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.bound_tensors import StepTensors
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.torch_engine.device import TorchDevice


@dataclass(frozen=True, kw_only=True)
class TorchStep:
    """One step of A slots by s new tokens. It is made when addresses or shapes change, and used until they change again."""

    tensors: StepTensors
    input_ids: torch.Tensor
    start: torch.Tensor
    last: torch.Tensor
    logits: torch.Tensor
    sides: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    combined: tuple[DeviceTensor, ...] | None
    new_lengths: torch.Tensor | None
    states: tuple[Mapping[StateKind, tuple[torch.Tensor, torch.Tensor]], ...]
    key: Hashable

    @classmethod
    def over(cls, tensors: StepTensors, device: TorchDevice) -> TorchStep:
        """Return the step over what is bound."""
        inputs = (tensors.input_ids, tensors.start, tensors.last, tensors.logits)
        caches = [side for cache in tensors.caches for side in cache]
        states = [state for layer in tensors.states for pair in layer.values() for state in pair]
        bound = (*inputs, *caches, *tensors.scales, *states, *(() if tensors.new_lengths is None else (tensors.new_lengths,)))
        combined = [_combined(*cache) for cache in tensors.caches]
        return cls(
            tensors=tensors,
            input_ids=device.view(tensors.input_ids),
            start=device.view(tensors.start),
            last=device.view(tensors.last),
            logits=device.view(tensors.logits),
            sides=() if tensors.scales else tuple(_sides([device.view(side) for side in cache]) for cache in tensors.caches),
            combined=None if None in combined else tuple(view for view in combined if view is not None),
            new_lengths=None if tensors.new_lengths is None else device.view(tensors.new_lengths),
            states=tuple(
                {kind: (device.view(past), device.view(present)) for kind, (past, present) in layer.items()} for layer in tensors.states
            ),
            key=(tensors.input_ids.shape, tensors.last.shape, *(tensor.ptr for tensor in bound)),
        )


def _sides(cache: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = cache if len(cache) > 1 else (cache[0][:, 0], cache[0][:, 1])
    return k, v


def _combined(*cache: DeviceTensor) -> DeviceTensor | None:
    """Return one view ``[A, 2, H, S, D]`` of a layer's cache, or None if K and V do not follow each other in one allocation."""
    if len(cache) == 1:
        return cache[0]
    k, v = cache
    if k.allocation is not v.allocation or v.offset < k.offset:
        return None
    strides = (k.strides[0], (v.offset - k.offset) // itemsize(k.dtype), *k.strides[1:])
    return DeviceTensor(k.allocation, shape=(len(k), 2, *k.shape[1:]), dtype=k.dtype, strides=strides, offset=k.offset)
