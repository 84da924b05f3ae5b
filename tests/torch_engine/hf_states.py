"""A ``Cache`` of Hugging Face transformers whose K, V, conv and recurrent states lie in our cache: ``cache_over``.

A model of transformers computes as it always does, attention included. What it keeps between its calls is ours to capture, restore and
move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from trt_kvcache import HybridCacheConfig, HybridCacheManager
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import AttentionConfig, ModelConfig

View = Callable[[DeviceTensor], torch.Tensor]


def config_for(model: ModelConfig, *, slots: int, length: int, dtype: str) -> HybridCacheConfig:
    """Return the cache of a model as transformers uses it: it updates states in place."""
    config = decoder_cache_config(model, max_batch_size=slots, max_sequence_length=length, dtype=dtype)
    assert isinstance(config, HybridCacheConfig)
    assert config.mamba is not None
    return replace(config, mamba=replace(config.mamba, ping_pong=False))


def cache_over(model: ModelConfig, manager: HybridCacheManager, view: View, stream: Any) -> Cache:
    """Return a cache over the active slots, which hold equally many tokens. A call of the model commits the length of what it appends.

    Parameters
    ----------
    model : ModelConfig
        Whose layers are those of transformers.
    manager : HybridCacheManager
        Of :func:`config_for`, with at least one attention layer.
    view : callable
        Returns a tensor of torch over the bytes of one of ours.
    stream : cuda.core.Stream, or HostStream
        The one that torch computes on.
    """
    rows, states, last = count(), count(), len(model.attention_layers) - 1
    layers = []
    for layer in model.layers:
        if layer.parallel_mixer is not None:
            layers.append(RowsAndStates(manager, next(rows), last, next(states), view, stream))
        elif isinstance(layer.mixer, AttentionConfig):
            layers.append(KVRows(manager, next(rows), last, view, stream))
        else:
            layers.append(LinearAttentionLayer() if layer.mixer is None else States(manager, next(states), view))
    return Cache(layers=layers)


class KVRows(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Rows of K and V of an attention layer."""

    is_compileable = is_sliding = False

    def __init__(self, manager: HybridCacheManager, index: int, last: int, view: View, stream: Any) -> None:
        super().__init__()
        assert manager.kv_cache_manager is not None
        self._manager, self._is_last, self._stream = manager, index == last, stream
        self._sides = [view(side) for side in manager.kv_cache_manager.get_separate_kv_cache(index)]

    def lazy_initialization(self, *_: Any) -> None:
        """See ``CacheLayerMixin``. Nothing is to be allocated."""
        self.is_initialized = True

    def update(self, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Write the new rows ``[B, H, s, D]`` and return all that are live. The last layer commits them."""
        slots, start, width = len(k), self.get_seq_length(), k.shape[2]
        for side, rows in zip(self._sides, (k, v), strict=True):
            side[:slots, :, start : start + width] = rows
        if self._is_last:
            self._manager.commit_sequence_length(width, stream=self._stream)
        return tuple(side[:slots, :, : start + width] for side in self._sides)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See ``CacheLayerMixin``."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens that each slot holds."""
        return max(self._manager.host_kv_cache_lengths)

    def get_max_length(self) -> int:
        """Return S."""
        return self._manager.config.max_sequence_length


class States(LinearAttentionLayer):  # type: ignore[misc]
    """The states of a layer, which transformers overwrites in place."""

    def __init__(self, manager: HybridCacheManager, index: int, view: View) -> None:
        super().__init__()
        states, slots = manager.states, manager.active_batch_size
        assert states is not None
        found = {kind: view(states.current(kind).layers[index])[:slots] for kind in states.kinds}
        self.conv_states[0], self.recurrent_states[0] = found[StateKind.CONV], found.get(StateKind.RECURRENT)
        self.is_conv_states_initialized[0], self.is_recurrent_states_initialized[0] = True, StateKind.RECURRENT in found
        self.conv_kernel_size[0] = found[StateKind.CONV].shape[2]
        self.dtype, self.device = found[StateKind.CONV].dtype, found[StateKind.CONV].device
        self.has_previous_state[0] = max(manager.host_kv_cache_lengths) > 0


class RowsAndStates(States, KVRows):
    """Rows of K and V and the states of a layer that has both."""

    def __init__(self, manager: HybridCacheManager, rows: int, last: int, states: int, view: View, stream: Any) -> None:
        KVRows.__init__(self, manager, rows, last, view, stream)
        States.__init__(self, manager, states, view)
