"""``DecoderEngine``: what the engines that run a checkpoint themselves have in common, whatever they compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.recurrent_states import StateKind, state_storages
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, AttentionName, cache_layout
from trt_kvcache.engine.bound_tensors import BoundTensors
from trt_kvcache.engine.decoder_cache import DecoderCacheConfig, cache_layer, state_sizes
from trt_kvcache.engine.decoder_profiles import decoder_profiles, logits_per_slot
from trt_kvcache.engine.decoder_tensors import decoder_tensors, step_shape
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.errors import ClosedError, ConfigError, EngineError, RangeError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What is bound for one step of A slots by s new tokens, in the shapes of that step."""

    input_ids: DeviceTensor
    start: DeviceTensor
    last: DeviceTensor
    logits: DeviceTensor
    caches: tuple[tuple[DeviceTensor, ...], ...]
    new_lengths: DeviceTensor | None
    states: tuple[Mapping[StateKind, tuple[DeviceTensor, DeviceTensor]], ...]
    scales: tuple[DeviceTensor, ...] = ()


class DecoderEngine(Uncopyable):
    """Tensors, profiles and bindings of an engine that runs a checkpoint. A subclass adds weights and ``enqueue``."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        kv: DecoderCacheConfig,
        dtype: str | None,
        max_prefill_length: int,
        attention: AttentionName,
        max_logits_per_slot: int | Literal["all"],
        names: TensorNames,
        memory: Memory,
    ) -> None:
        computed = _computed_dtype(kv, dtype)
        _check_cache(model, kv, computed)
        one_of("attention", attention, ATTENTION_VARIANTS)
        if kv.kv is not None and kv.kv.has_scales and attention != "plugin":
            raise ConfigError(f"attention: expected 'plugin' for K and V in {kv.kv.dtype}, got {attention!r}.")
        if kv.kv is not None and kv.kv.layout is not cache_layout(attention):
            raise ConfigError(f"kv.layout: expected {cache_layout(attention)} for attention {attention!r}, got {kv.kv.layout}.")
        width = int_in_range("max_prefill_length", max_prefill_length, 1, kv.max_sequence_length, error=ConfigError)
        wanted = logits_per_slot(max_logits_per_slot, max_prefill_length=width)
        self._config = model
        self._kv = kv
        self._dtype = computed
        self._names = names
        self._closed = False
        self.memory = memory
        tensors = decoder_tensors(model, kv, names, max_logits_per_slot=wanted)
        self.tensors = MappingProxyType({spec.name: spec for spec in tensors})
        self.profiles = decoder_profiles(max_batch_size=kv.max_batch_size, max_prefill_length=width, max_logits_per_slot=wanted)
        # States with two buffers have two addresses: a set of bindings for each of them.
        num_sets = 1 if kv.mamba is None else kv.mamba.num_buffers
        self._bound = [[BoundTensors(self.tensors, profile, names, memory) for profile in self.profiles] for _ in range(num_sets)]
        self._profile, self._set = 0, 0

    def use_profile(self, index: int) -> None:
        """Choose the profile that ``bind``, ``set_input_shape`` and ``enqueue`` act on.

        Parameters
        ----------
        index : int
            Index into ``profiles``.

        Raises
        ------
        RangeError
            There is no such profile.
        ClosedError
            The engine is closed.
        """
        self._check_open()
        self._profile = int_in_range("profile", index, 0, len(self.profiles) - 1, error=RangeError)

    def use_bindings(self, index: int) -> None:
        """Choose the set of bindings that ``bind``, ``set_input_shape`` and ``enqueue`` act on.

        Parameters
        ----------
        index : int
            0, or 1 for the other one of two buffers of states.

        Raises
        ------
        RangeError
            There is no such set.
        ClosedError
            The engine is closed.
        """
        self._check_open()
        self._set = int_in_range("bindings", index, 0, len(self._bound) - 1, error=RangeError)

    @property
    def _current(self) -> BoundTensors:
        return self._bound[self._set][self._profile]

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Bind a tensor of the engine to the address of ``tensor``, which is kept alive.

        Parameters
        ----------
        name : str
            An input or output of the engine.
        tensor : DeviceTensor
            A dense view in the engine's memory, aligned to 256 bytes.

        Raises
        ------
        BindingError
            The name is unknown, or the tensor has another dtype or is in another memory.
        LayoutError
            The view is not dense, or not aligned to 256 bytes.
        ClosedError
            The engine is closed.
        """
        self._check_open()
        self._current.bind(name, tensor)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues.

        Parameters
        ----------
        name : str
            An input of the engine.
        shape : sequence of int
            Within the current profile.

        Raises
        ------
        BindingError
            The name is not an input's, or the shape is outside the profile.
        ClosedError
            The engine is closed.
        """
        self._check_open()
        self._current.set_input_shape(name, shape)

    def close(self) -> None:
        """Release the weights and the bound tensors. Idempotent."""
        self._closed = True
        for profiles in self._bound:
            for bound in profiles:
                bound.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed.")

    def _step_tensors(self) -> StepTensors:
        """Return what is bound in the profile in use. Raises EngineError where something is missing or does not fit together."""
        names, bound = self._names, self._current
        slots, width = bound.shape(names.input_ids)
        for name, spec in self.tensors.items():
            if spec.mode is TensorMode.INPUT and -1 in spec.shape and bound.shape(name)[0] != slots:
                raise EngineError(f"`{name}`: expected {slots} slots as `{names.input_ids}` has, got shape {bound.shape(name)}.")
        last = bound.shape(names.last_token_ids)
        logits = step_shape(self.tensors[names.logits], names, batch=slots, width=width, logits=last[1])
        kv, mamba = self._kv.kv, self._kv.mamba
        storages = {} if mamba is None else state_storages(mamba)
        return StepTensors(
            input_ids=bound.tensor(names.input_ids, (slots, width)),
            start=bound.tensor(names.kvcache_start_index, (slots,)),
            last=bound.tensor(names.last_token_ids, last),
            logits=bound.tensor(names.logits, logits),
            caches=()
            if kv is None
            else tuple(
                tuple(self._pair(*pair, slots)[1] for pair in names.layer_pairs(layer, combined=kv.layout is KVLayout.COMBINED))
                for layer in range(kv.num_layers)
            ),
            scales=() if kv is None or not kv.has_scales else tuple(self._scales(layer, kv, slots) for layer in range(kv.num_layers)),
            new_lengths=None if mamba is None else bound.tensor(names.new_lengths, (slots,)),
            states=tuple(
                {kind: self._pair(*names.state_pair(kind, layer), slots) for kind in storages}
                for layer in range(0 if mamba is None else mamba.num_layers)
            ),
        )

    def _scales(self, layer: int, kv: KVCacheConfig, slots: int) -> DeviceTensor:
        """Return the scales of a layer."""
        past, present = self._names.scales_pair(layer)
        return self._pair(past, present, slots)[1] if kv.scales_by_token else self._current.tensor(past, self.tensors[past].shape)

    def _pair(self, past: str, present: str, slots: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return a cache tensor before and after the step: at one address where it is updated in place."""
        shape = (slots, *self.tensors[past].shape[1:])
        return self._current.tensor(past, shape), self._current.tensor(present, shape)

    def _check_values(
        self,
        input_ids: npt.NDArray[np.int32],
        last: npt.NDArray[np.int32],
        start: npt.NDArray[np.int32],
        new_lengths: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Refuse input values that a device would read as addresses outside a tensor. The arguments are the inputs, on the host."""
        names = self._names
        for name, values, highest in (
            (names.input_ids, input_ids, self._config.vocab_size - 1),
            (names.last_token_ids, last, input_ids.shape[1] - 1),
            (names.kvcache_start_index, start, self._kv.max_sequence_length),
            *(() if new_lengths is None else ((names.new_lengths, new_lengths, input_ids.shape[1]),)),
        ):
            wrong = np.argwhere((values < 0) | (values > highest))
            if len(wrong):
                index = tuple(int(i) for i in wrong[0])
                raise EngineError(f"`{name}`: expected values from 0 to {highest}, got {values[index]} at {list(index)}.")


def _computed_dtype(cache: DecoderCacheConfig, dtype: str | None) -> str:
    """Return what an engine computes in."""
    if cache.kv is None or not cache.kv.has_scales:
        if dtype not in (None, cache.dtype):
            raise ConfigError(f"dtype: expected {cache.dtype} as the cache, got {dtype!r}.")
        return cache.dtype
    one_of(f"dtype with K and V in {cache.kv.dtype}", dtype, MODEL_DTYPES)
    return str(dtype)


def _check_cache(config: ModelConfig, cache: DecoderCacheConfig, dtype: str) -> None:
    """Refuse a cache that does not fit the model, or what is computed in."""
    kv, mamba = cache.kv, cache.mamba
    attention, recurrent = config.attention_layers, config.recurrent_layers
    if (0 if kv is None else kv.num_layers) != len(attention):
        raise ConfigError(f"kv.layers: expected {len(attention)} as the model has, got {0 if kv is None else kv.num_layers}.")
    for index, (layer, mixer) in enumerate(zip(() if kv is None else kv.layers, attention, strict=True)):
        if (layer.num_kv_heads, layer.head_dim) != (mixer.num_kv_heads, mixer.head_dim):
            raise ConfigError(f"kv.layers[{index}]: expected {cache_layer(mixer)} as the model has, got {layer}.")
    if (0 if mamba is None else mamba.num_layers) != len(recurrent):
        raise ConfigError(
            f"layers with states: expected {len(recurrent)} as the model has, got {0 if mamba is None else mamba.num_layers}."
        )
    for index, recurrence in enumerate(recurrent):
        for name, size in state_sizes(recurrence).items():
            if getattr(mamba, name) != size:
                raise ConfigError(f"states of layer {index}: expected {name} {size} as the model has, got {getattr(mamba, name)}.")
    if kv is not None and mamba is not None and mamba.conv_dtype != dtype:
        what = "the dtype of K and V" if kv.dtype == dtype else "what is computed in"
        raise ConfigError(f"conv_dtype: expected {dtype}, {what}, got {mamba.conv_dtype}.")
