"""Tensors of a TensorRT engine with hidden states, which it binds itself: those that it returns, and those that a draft head reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine.step_rows import HiddenLayers, ReducedLayers, rows_width
from trt_kvcache.errors import EngineError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model import ModelConfig

#: Output ``[B, s, width]``: hidden states of each token of an enqueue.
HIDDEN_STATES = "hidden_states"

#: Input ``[tokens, width]`` of a draft head: hidden states of the tokens of an enqueue, ``B * s`` rows, the others are not read.
HIDDEN_INPUTS = "hidden_inputs"


def most_tokens(profiles: Sequence[EngineProfile]) -> int:
    """Return the most tokens of an enqueue, padding included."""
    return max(profile.max_batch * profile.max_width for profile in profiles)


def hidden_tensors(
    model: ModelConfig, hidden_layers: HiddenLayers | None, profiles: Sequence[EngineProfile], dtype: str
) -> tuple[TensorSpec, ...]:
    """Return the tensors of hidden states of an engine, inputs first; none of an engine without."""
    read, returned = model.hidden_inputs_width, rows_width(hidden_layers, model)
    inputs = [TensorSpec.input(HIDDEN_INPUTS, (most_tokens(profiles), read), dtype)] if read else []
    outputs = [TensorSpec.output(HIDDEN_STATES, (-1, -1, returned), dtype)] if returned else []
    return (*inputs, *outputs)


def hidden_states_nbytes(
    model: ModelConfig,
    head: ModelConfig,
    *,
    slots: int,
    max_sequence_length: int,
    max_prefill_length: int,
    dtype: str,
) -> int:
    """Return the bytes of hidden states of a session with a draft head: of all tokens in the cache, and of those of an enqueue.

    The head reads those of an enqueue and returns its own, and has one of each slot.
    """
    returned = head.hidden_size if head.eagle3_input is not None else model.state_size
    rows = slots * (max_sequence_length + max_prefill_length)
    of_head = slots * (2 * min(max_prefill_length, head.max_position_embeddings) + 1)
    return (rows * returned + of_head * head.hidden_size) * itemsize(dtype)


def to_plain(hidden_layers: HiddenLayers | None) -> Any:
    """Return plain JSON values that :func:`from_plain` reads back."""
    if isinstance(hidden_layers, ReducedLayers):
        return {"layers": list(hidden_layers.layers), "width": hidden_layers.width}
    return {"layers": list(hidden_layers)} if isinstance(hidden_layers, tuple) else hidden_layers


def from_plain(data: Any, model: ModelConfig) -> HiddenLayers | None:
    """Read what :func:`to_plain` wrote. Raises EngineError for anything else, or for layers that the model does not have."""
    if data is None:
        return None
    if data == "final_norm":
        return "final_norm"
    if not isinstance(data, Mapping) or not isinstance(data.get("layers"), list) or not data["layers"] or data.keys() - {"layers", "width"}:
        raise EngineError(f"hidden_layers: expected null, final_norm, or an object with layers and width, got {short_repr(data)}.")
    layers = tuple(int_in_range("hidden_layers.layers", layer, 0, model.num_layers, error=EngineError) for layer in data["layers"])
    if "width" not in data:
        return layers
    return ReducedLayers(layers, int_in_range("hidden_layers.width", data["width"], 1, MAX_DIMENSION, error=EngineError))
