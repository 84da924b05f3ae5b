"""``HeadDrafter``: drafts of a head, a model of one layer that reads hidden states of the large model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.generation.request import Request
from trt_kvcache.session.batch import Logits
from trt_kvcache.session.model_drafter import ModelDrafter

if TYPE_CHECKING:
    from trt_kvcache.session.open_model import SessionParts


class HeadDrafter(ModelDrafter):
    """Generates drafts with an MTP or EAGLE-3 head that has a cache of its own."""

    # At position t the head reads the token at t + 1 and the hidden state of the model at t, in a draft its own hidden state; its logits
    # are of the next token. vLLM drafts in the same way (vllm/v1/spec_decode/eagle.py): after a verification, the head reads the hidden
    # states of the model.

    def __init__(self, parts: SessionParts, *, vocab_size: int) -> None:
        super().__init__(parts, vocab_size=vocab_size)
        assert self._runner.hidden_inputs is not None
        assert self._runner.hidden_states is not None
        self._inputs, self._states = self._runner.hidden_inputs, self._runner.hidden_states
        #: True for a multi-token prediction (MTP) head.
        self.is_mtp = parts.model.merge_norm is not None
        # Position of the first hidden state that the slot of each request holds.
        self._firsts: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def _limits(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        # No hidden state is known if all tokens were copied, nor is that of a pending token before another one.
        limits = super()._limits(sequences)
        return [limit if _num_states(one) and len(one.pending) == 1 else 0 for one, limit in zip(sequences, limits, strict=True)]

    def _new_tokens(self, sequence: DraftedSequence, slot: int) -> list[int]:
        """Rewind a slot to what the head has read of a sequence, and return the other tokens, with their hidden states as inputs."""
        assert sequence.hidden_states is not None
        total = _num_states(sequence)
        first = sequence.length - total
        count = min(self._known(sequence, slot), total - 1) if self._firsts.get(sequence.request) == first else 0
        self._take_slot(sequence, slot, count, total)
        self._firsts[sequence.request] = first
        self._inputs[slot][count:total] = sequence.hidden_states[count:]
        return sequence.tokens_from(first + 1 + count)

    def _append_drafted(self, rows: dict[int, list[int]]) -> Logits:
        for slot in rows:
            length = self._batch[slot].length
            self._inputs[slot][length] = self._states[slot][length - 1]
        return super()._append_drafted(rows)


def _num_states(sequence: DraftedSequence) -> int:
    return 0 if sequence.hidden_states is None else len(sequence.hidden_states)
