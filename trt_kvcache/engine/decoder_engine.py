"""``DecoderEngine``: base of the engines that run a checkpoint without a build, in NumPy or PyTorch."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, AttentionName, cache_layout
from trt_kvcache.engine.bound_engine import BoundEngine
from trt_kvcache.engine.decoder_bindings import DecoderBindings
from trt_kvcache.engine.decoder_cache import cache_layer, state_sizes
from trt_kvcache.engine.decoder_profiles import decoder_profiles, logits_per_slot
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine.embedding_rows import EmbeddingRows
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.slot_adapters import SlotAdapters
from trt_kvcache.engine.step_ancestors import StepAncestors
from trt_kvcache.engine.step_rows import HiddenLayers, ReducedLayers, StepRows, rows_width
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.model_config import ModelConfig


class DecoderEngine(BoundEngine):
    """Tensors, profiles and bindings of an engine that runs a checkpoint. A subclass adds weights and ``enqueue``."""

    _bindings: DecoderBindings

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
        max_embeddings: int = 0,
        hidden_layers: HiddenLayers | None = None,
        rows_dtype: str | None = None,
        adapters: AdapterSet | None = None,
        takes_trees: bool = False,
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
        #: Variant of attention, and with it the layout of K and V.
        self.attention: AttentionName = attention
        self.memory = memory
        tensors = decoder_tensors(model, kv, names, max_logits_per_slot=wanted)
        self.tensors = MappingProxyType({spec.name: spec for spec in tensors})
        self.profiles = decoder_profiles(max_batch_size=kv.max_batch_size, max_prefill_length=width, max_logits_per_slot=wanted)
        capacity = int_in_range("max_embeddings", max_embeddings, 0, MAX_DIMENSION, error=ConfigError)
        if capacity and model.per_layer_embedding is not None:
            raise ConfigError(f"max_embeddings: expected 0 for a model with per-layer embeddings, which are of token ids, got {capacity}.")
        self._bindings = DecoderBindings(type(self).__name__, self.tensors, self.profiles, cache=kv, names=names, memory=memory)
        layers = hidden_layers.layers if isinstance(hidden_layers, ReducedLayers) else hidden_layers
        self._hidden_layers: tuple[int, ...] = layers if isinstance(layers, tuple) else ()
        self._returned_states = hidden_layers
        #: True until :meth:`open_draft_head` has opened the EAGLE-3 head whose projection reduces the hidden states.
        self._lacks_head = isinstance(hidden_layers, ReducedLayers)
        self._rows_dtype, tokens = rows_dtype or computed, kv.max_batch_size * width
        #: Hidden states of each token of the last enqueue; None unless they are asked for.
        self.hidden_states: StepRows | None = None
        #: Hidden states of each token of the next enqueue; None unless the model is a draft head.
        self.hidden_inputs: StepRows | None = None
        self.embeddings: EmbeddingRows | None = None
        #: Adapters of the slots of the next enqueue; None for an engine without.
        self.slot_adapters: SlotAdapters | None = None
        #: Trees of the new tokens of the next enqueue; None for an engine that takes chains only, as all with states do.
        self.ancestors: StepAncestors | None = None
        with ExitStack() as undo:
            undo.callback(self._close_rows)
            self.hidden_states = self._step_rows(tokens, rows_width(hidden_layers, model))
            self.hidden_inputs = self._step_rows(tokens, model.hidden_inputs_width)
            if capacity:
                sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
                self.embeddings = EmbeddingRows(memory, capacity=capacity, dtype=computed, **sizes)
            if adapters is not None:
                self.slot_adapters = SlotAdapters(memory, adapters, max_slots=kv.max_batch_size, dtype=computed)
            if takes_trees and kv.mamba is None:
                self.ancestors = StepAncestors(memory, max_slots=kv.max_batch_size)
            undo.pop_all()

    @abstractmethod
    def open_draft_head(
        self,
        checkpoint: Checkpoint,
        *,
        kv: DecoderCacheConfig,
        max_prefill_length: int,
        max_logits_per_slot: int = 1,
        hidden_layers: HiddenLayers,
    ) -> DecoderEngine:
        """Return an engine of a draft head or an assistant of the model, in the same memory and dtype, with the tensors that they share.

        From then on, this engine reduces its hidden states with the projection of an EAGLE-3 head.
        """

    def close(self) -> None:
        """Release the weights and the bound tensors. Idempotent."""
        self._bindings.release()
        self._close_rows()

    def _close_rows(self) -> None:
        for rows in (self.embeddings, self.hidden_states, self.hidden_inputs, self.slot_adapters, self.ancestors):
            if rows is not None:
                rows.close()

    def _step_rows(self, tokens: int, width: int) -> StepRows | None:
        return StepRows(self.memory, max_tokens=tokens, width=width, dtype=self._rows_dtype) if width else None

    def _check_head(self, head: ModelConfig) -> None:
        """Refuse a draft head that reads other hidden states than this engine returns, and a second EAGLE-3 head."""
        own, size = head.eagle3_input, self._config.hidden_size
        for reader in (own, head.assistant_input):
            if reader is not None and reader.state_size != size:
                raise ConfigError(f"draft head: expected one for the hidden size {size} of the model, got one for {reader.state_size}.")
        expected = ReducedLayers.of_head(head, self._config.num_layers) or "final_norm"
        if self._returned_states != expected:
            raise ConfigError(f"hidden_layers: expected {expected!r}, which the draft head reads, got {self._returned_states!r}.")
        if own is not None and not self._lacks_head:
            raise ConfigError("draft head: expected one EAGLE-3 head of an engine, got a second one.")

    def _check_reduction(self) -> None:
        """Refuse a step without the projection of its hidden states: a step that is captured without would be replayed without."""
        if self._lacks_head:
            raise EngineError(
                f"hidden_layers: expected an EAGLE-3 head for {self._returned_states} before a step, got none. Call open_draft_head."
            )

    def _check_values(
        self,
        input_ids: npt.NDArray[np.int32],
        last: npt.NDArray[np.int32],
        start: npt.NDArray[np.int32],
        new_lengths: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Refuse input values that a device would read as addresses outside a tensor. The inputs are on the host."""
        names = self._names
        end = self._config.vocab_size if self.embeddings is None else self.embeddings.end
        for name, values, highest in (
            (names.input_ids, input_ids, end - 1),
            (names.last_token_ids, last, input_ids.shape[1] - 1),
            (names.kvcache_start_index, start, self._kv.max_sequence_length),
            *(() if new_lengths is None else ((names.new_lengths, new_lengths, input_ids.shape[1]),)),
        ):
            wrong = np.argwhere((values < 0) | (values > highest))
            if len(wrong):
                index = tuple(int(i) for i in wrong[0])
                raise EngineError(f"`{name}`: expected values from 0 to {highest}, got {values[index]} at {list(index)}.")


def _computed_dtype(cache: DecoderCacheConfig, dtype: str | None) -> str:
    """Return the dtype of computation."""
    if cache.kv is None or not cache.kv.has_scales:
        if dtype not in (None, cache.dtype):
            raise ConfigError(f"dtype: expected {cache.dtype} as the cache, got {dtype!r}.")
        return cache.dtype
    one_of(f"dtype with K and V in {cache.kv.dtype}", dtype, MODEL_DTYPES)
    return str(dtype)


def _check_cache(config: ModelConfig, cache: DecoderCacheConfig, dtype: str) -> None:
    """Refuse a cache that does not fit the model or the dtype of computation."""
    kv, mamba = cache.kv, cache.mamba
    attention, recurrent = config.kv_layers, config.recurrent_layers
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
        what = "the dtype of K and V" if kv.dtype == dtype else "the dtype of computation"
        raise ConfigError(f"conv_dtype: expected {dtype}, {what}, got {mamba.conv_dtype}.")
