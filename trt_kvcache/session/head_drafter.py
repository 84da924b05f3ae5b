"""``HeadDrafter``: drafts of a head, a model of one layer that reads hidden states of the large model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.generation.request import Request
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.model_drafter import ModelDrafter, known_tokens

if TYPE_CHECKING:
    from trt_kvcache.session.open_model import SessionParts


class HeadDrafter(ModelDrafter):
    """Generates drafts with an MTP or EAGLE-3 head that has a cache of its own."""

    #: Hidden states of sequences may stay on the device.
    takes_device_states = True

    # At position t the head reads the token at t + 1 and the hidden state of the model at t, in a draft its own hidden state; its logits
    # are of the next token. vLLM drafts in the same way (vllm/v1/spec_decode/eagle.py): after a verification, the head reads the hidden
    # states of the model.

    def __init__(self, parts: SessionParts, *, vocab_size: int, tree_tokens: int = 0) -> None:
        super().__init__(parts, vocab_size=vocab_size, tree_tokens=tree_tokens)
        assert self._runner.hidden_inputs is not None
        self._inputs = self._runner.hidden_inputs
        #: True for a multi-token prediction (MTP) head.
        self.is_mtp = parts.model.merge_norm is not None
        # Position of the first hidden state that the slot of each request holds.
        self._firsts: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def _limits(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        # No hidden state is known if all tokens were copied, nor is that of a pending token before another one.
        limits = super()._limits(sequences)
        return [limit if _num_states(one) and len(one.pending) == 1 else 0 for one, limit in zip(sequences, limits, strict=True)]

    def _kept(self, sequence: DraftedSequence, slot: int) -> int:
        # Position 0 of the head is that of the first hidden state that is known.
        total = _num_states(sequence)
        first = sequence.length - total
        return min(self._known(sequence, slot), total - 1) if self._firsts.get(sequence.request) == first else 0

    def _tokens(self, sequence: DraftedSequence, kept: int) -> list[int]:
        return known_tokens(sequence, sequence.length - _num_states(sequence) + 1 + kept)

    def _num_known(self, sequence: DraftedSequence) -> int:
        return _num_states(sequence)

    def _take_slots(self, sequences: Mapping[int, DraftedSequence], kept: Mapping[int, int]) -> None:
        super()._take_slots(sequences, kept)
        for slot, sequence in sequences.items():
            self._firsts[sequence.request] = sequence.length - _num_states(sequence)
            self._inputs.read_from(slot, self._on_device(sequence.hidden_states))

    def _on_device(self, states: Any) -> DeviceTensor:
        """Return hidden states in the memory of the head: a drafter of the caller may hand them on from the host."""
        if isinstance(states, DeviceTensor):
            return states
        runner = self._runner
        return runner.cache.memory.to_device(states.astype(numpy_dtype(self._inputs.dtype)), stream=runner.stream)


def _num_states(sequence: DraftedSequence) -> int:
    return 0 if sequence.hidden_states is None else len(sequence.hidden_states)
