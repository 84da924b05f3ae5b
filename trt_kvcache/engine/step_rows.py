"""``StepRows``: hidden states of each token of an enqueue, which an engine reads or writes beside its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model.model_config import ModelConfig


@dataclass(frozen=True)
class ReducedLayers:
    """The residual stream before each of some layers, concatenated, times ``fc.weight [width, ...]`` of an EAGLE-3 head."""

    layers: tuple[int, ...]
    width: int

    @classmethod
    def of_head(cls, head: ModelConfig, num_layers: int) -> ReducedLayers | None:
        """Return the hidden states of a model of ``num_layers`` that an EAGLE-3 head reads; None for another head. Raises ConfigError."""
        own = head.eagle3_input
        return None if own is None else cls(own.layers_of(num_layers), head.hidden_size)


#: Hidden states that an engine returns with the logits: the output of the final norm (of an assistant, its projection), or the residual
#: stream before each of some layers, by index, side by side or reduced. The number of layers stands for the end of the residual stream.
HiddenLayers = Literal["final_norm"] | tuple[int, ...] | ReducedLayers


def hidden_layers_of(head: ModelConfig, model: ModelConfig, *, option: str) -> HiddenLayers:
    """Return the hidden states of a model that a draft head reads, after checking that it fits. Raises ConfigError about ``option``."""
    own = head.eagle3_input
    if own is None:
        return "final_norm"
    check_sizes(option, "an EAGLE-3 head", model, own.state_size, head.vocab_size)
    if (own.shares_embedding or own.shares_head) and head.hidden_size != model.hidden_size:
        lacking = "embedding" if own.shares_embedding else "language model head"
        raise ConfigError(f"{option}: expected an {lacking} of width {head.hidden_size} in the files of the head, got none.")
    return ReducedLayers(own.layers_of(model.num_layers), head.hidden_size)


def check_sizes(option: str, what: str, model: ModelConfig, state_size: int, vocab_size: int) -> None:
    """Refuse a head for another hidden size or another vocabulary than those of a model. Raises ConfigError about ``option``."""
    for name, expected, given in (("hidden size", model.hidden_size, state_size), ("vocabulary of", model.vocab_size, vocab_size)):
        if given != expected:
            raise ConfigError(f"{option}: expected {what} for the {name} {expected} of the model, got one for {given}.")


def rows_width(hidden_layers: HiddenLayers | None, model: ModelConfig) -> int:
    """Return the elements of the hidden states that an engine returns of a token; 0 for none."""
    if isinstance(hidden_layers, ReducedLayers):
        return hidden_layers.width
    return model.state_size if hidden_layers == "final_norm" else model.hidden_size * len(hidden_layers or ())


class StepRows:
    """Rows ``[A, s, width]`` of the last enqueue, or of the next one, at an address that never changes."""

    def __init__(self, memory: Memory, *, max_tokens: int, width: int, dtype: str) -> None:
        self.memory = memory
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes((max_tokens, width), dtype), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self.table = DeviceTensor(self._allocation, shape=(max_tokens, width), dtype=dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Most tokens of an enqueue, and the elements of each."""
        return self.table.shape[0], self.table.shape[1]

    @property
    def dtype(self) -> str:
        """Dtype of the elements."""
        return self.table.dtype

    def of_step(self, slots: int, width: int) -> DeviceTensor:
        """Return the rows of an enqueue of ``width`` tokens in each slot."""
        return self.table[: slots * width].reshape(slots, width, self.table.shape[1])

    def close(self) -> None:
        """Release the rows. Idempotent."""
        self._allocation.close()
