"""``decoder_tensors``: inputs and outputs of an engine of a model, and their shapes in an enqueue."""

from collections.abc import Sequence
from dataclasses import dataclass

from trt_kvcache.cache.config import DecoderCacheConfig, KVCacheConfig, MambaCacheConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.recurrent_states import StateKind, state_storages
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.kernels.scale_views import saved_scales
from trt_kvcache.model import ModelConfig


def decoder_tensors(
    model: ModelConfig, cache: DecoderCacheConfig, names: TensorNames, *, max_logits_per_slot: int = 1
) -> tuple[TensorSpec, ...]:
    """Return the inputs and outputs of an engine, inputs first. States share memory with their input unless they have two buffers.

    With one logit per slot, logits are ``[B, vocab]``, else ``[B, m, vocab]`` for ``last_token_ids`` ``[B, m]``.
    """
    last_token_ids, logits = logits_tensors(model, names, max_logits_per_slot=max_logits_per_slot)
    inputs = [
        TensorSpec.input(names.input_ids, (-1, -1), "int32"),
        TensorSpec.input(names.kvcache_start_index, (-1,), "int32"),
        last_token_ids,
    ]
    if cache.mamba is not None:
        inputs.append(TensorSpec.input(names.new_lengths, (-1,), "int32"))
    outputs = []
    if cache.kv is not None:
        for index in range(cache.kv.num_layers):
            before, after = kv_tensors(cache.kv, names, index)
            inputs += before
            outputs += after
    if cache.mamba is not None:
        for kind in state_storages(cache.mamba):
            for index in range(cache.mamba.num_layers):
                past_state, present_state = state_tensors(cache.mamba, names, index)[kind]
                inputs.append(past_state)
                outputs.append(present_state)
    return (*inputs, *outputs, logits)


def kv_tensors(kv: KVCacheConfig, names: TensorNames, index: int) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of K and V of an attention layer, and of their scales."""
    layer, combined = kv.layers[index], kv.layout is KVLayout.COMBINED
    shape = (-1, *((2,) if combined else ()), layer.num_kv_heads, kv.max_sequence_length, layer.head_dim)
    pairs = names.layer_pairs(index, combined=combined)
    scales = scale_tensors(kv, names, index)
    return (
        [*(TensorSpec.input(past, shape, kv.dtype) for past, _ in pairs), *scales[:1]],
        [*(TensorSpec.output(present, shape, kv.dtype, alias=past) for past, present in pairs), *scales[1:]],
    )


def scale_tensors(kv: KVCacheConfig, names: TensorNames, index: int) -> tuple[TensorSpec, ...]:
    """Return the scales of an attention layer: nothing, an input ``[2, H]`` of static ones, or by token ``[B, 2, H, S']`` in and out."""
    if not kv.has_scales:
        return ()
    past, present = names.scales_pair(index)
    heads = kv.layers[index].num_kv_heads
    if not kv.scales_by_token:
        return (TensorSpec.input(past, (2, heads), "float32"),)
    shape = (-1, 2, heads, saved_scales(kv.max_sequence_length))
    return TensorSpec.input(past, shape, "float32"), TensorSpec.output(present, shape, "float32", alias=past)


def state_tensors(mamba: MambaCacheConfig, names: TensorNames, index: int) -> dict[StateKind, tuple[TensorSpec, TensorSpec]]:
    """Return the input and the output of each state of a layer with states, recurrent states first."""
    found = {}
    for kind, storage in state_storages(mamba).items():
        past, present = names.state_pair(kind, index)
        shape = (-1, *storage.slot_shape)
        output = TensorSpec.output(present, shape, storage.dtype, alias=None if mamba.ping_pong else past)
        found[kind] = (TensorSpec.input(past, shape, storage.dtype), output)
    return found


@dataclass(frozen=True)
class CacheIndices:
    """Indices of a layer in the cache: of its K and V, or those of another layer if it reads these, and of its states; None without."""

    kv: int | None
    states: int | None


def cache_indices(model: ModelConfig) -> tuple[CacheIndices, ...]:
    """Return the indices of each layer in the cache."""
    kv = dict(zip(model.attention_indices, model.kv_of_attention, strict=True))
    states = {layer: index for index, layer in enumerate(model.recurrent_indices)}
    return tuple(CacheIndices(kv.get(layer), states.get(layer)) for layer in range(model.num_layers))


def logits_tensors(model: ModelConfig, names: TensorNames, *, max_logits_per_slot: int) -> tuple[TensorSpec, TensorSpec]:
    """Return ``last_token_ids``, the indices of the new tokens whose logits are wanted, and ``logits``."""
    last, many = ((-1, 1), ()) if max_logits_per_slot == 1 else ((-1, -1), (-1,))
    return (
        TensorSpec.input(names.last_token_ids, last, "int32"),
        TensorSpec.output(names.logits, (-1, *many, model.vocab_size), "float32"),
    )


def shape_at(shape: Sequence[int], batch: int, width: int) -> tuple[int, ...]:
    """Return a shape with ``batch`` for the first ``-1`` and ``width`` for the second."""
    sizes = iter((batch, width))
    return tuple(next(sizes) if size < 0 else size for size in shape)


def step_shape(spec: TensorSpec, names: TensorNames, *, batch: int, width: int, logits: int) -> tuple[int, ...]:
    """Return the shape of an input or output in an enqueue; of ``last_token_ids`` and ``logits``, the second size is ``logits``."""
    per_slot = logits if spec.name in (names.last_token_ids, names.logits) else width
    return shape_at(spec.shape, batch, per_slot)
