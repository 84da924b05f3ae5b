"""``TorchStep``: the bound tensors of a step, as torch tensors over the same bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.bound_tensors import StepTensors
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.torch_engine.device import TorchDevice
from trt_kvcache.torch_engine.token_trees import TokenTrees


@dataclass(frozen=True, kw_only=True)
class TorchStep:
    """One step of A slots by s new tokens, made again when addresses or shapes change."""

    tensors: StepTensors  # the next four are views of its tensors of these names
    input_ids: torch.Tensor
    start: torch.Tensor
    last: torch.Tensor
    logits: torch.Tensor
    kv: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # K and V [A, H, S, D] of each layer, in either layout; empty if quantized
    combined: tuple[DeviceTensor, ...] | None  # [A, 2, H, S, D] of each layer, for the kernels; None if K and V are separate
    new_lengths: torch.Tensor | None  # int32 [A]; None without recurrent layers
    states: tuple[Mapping[StateKind, tuple[torch.Tensor, torch.Tensor]], ...]  # [A, ...] before and after the step, by recurrent layer
    key: Hashable  # equal for steps of equal addresses and shapes: the two buffers of states give two keys
    bound_ancestors: DeviceTensor | None = None  # int64 [A, s], of trees; None: each new token attends to all before it
    ancestors: torch.Tensor | None = None  # a view of it

    @classmethod
    def over(cls, tensors: StepTensors, device: TorchDevice) -> TorchStep:
        """Return the step over the bound tensors."""
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
            kv=() if tensors.scales else tuple(_k_and_v([device.view(side) for side in cache]) for cache in tensors.caches),
            combined=None if None in combined else tuple(view for view in combined if view is not None),
            new_lengths=None if tensors.new_lengths is None else device.view(tensors.new_lengths),
            states=tuple(
                {kind: (device.view(past), device.view(present)) for kind, (past, present) in layer.items()} for layer in tensors.states
            ),
            key=(tensors.input_ids.shape, tensors.last.shape, *(tensor.ptr for tensor in bound)),
        )

    @property
    def trees(self) -> TokenTrees | None:
        """Trees of the new tokens, computed again each time, as their values change between steps of equal addresses."""
        return None if self.ancestors is None else TokenTrees(self.ancestors)

    @property
    def positions(self) -> torch.Tensor:
        """Positions ``[A, s]`` of the new tokens."""
        trees, width = self.trees, self.input_ids.shape[1]
        return self.start[:, None] + (torch.arange(width, device=self.start.device) if trees is None else trees.depths)

    def over_trees(self, ancestors: DeviceTensor, device: TorchDevice) -> TorchStep:
        """Return the same step of trees. Its key differs, so that it has a CUDA graph of its own."""
        return replace(self, bound_ancestors=ancestors, ancestors=device.view(ancestors), key=(self.key, ancestors.ptr))


def _k_and_v(cache: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = cache if len(cache) > 1 else (cache[0][:, 0], cache[0][:, 1])
    return k, v


def _combined(*cache: DeviceTensor) -> DeviceTensor | None:
    """Return one view ``[A, 2, H, S, D]`` of a layer's cache; None if K and V are not contiguous in one allocation."""
    if len(cache) == 1:
        return cache[0]
    k, v = cache
    if k.allocation is not v.allocation or v.offset < k.offset:
        return None
    strides = (k.strides[0], (v.offset - k.offset) // itemsize(k.dtype), *k.strides[1:])
    return DeviceTensor(k.allocation, shape=(len(k), 2, *k.shape[1:]), dtype=k.dtype, strides=strides, offset=k.offset)
