"""``HeadDrafter``: drafts of a head, a model of one layer that reads hidden states of the large model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.generation.request import Request
from trt_kvcache.session.batch import Logits
from trt_kvcache.session.model_drafter import ModelDrafter

if TYPE_CHECKING:
    from trt_kvcache.session.open_model import SessionParts


class HeadDrafter(ModelDrafter):
    """Generates drafts with a head that has a cache of its own.

    ``of_model``, ``of_head``: columns of its input for hidden states of the model, and for one of its own. The other ones are zero.
    """

    # At position t the head reads the token at t + 1 and the hidden states of the model at t, in a draft its own hidden state; its logits
    # are of the next token. vLLM drafts in the same way (vllm/v1/spec_decode/eagle.py): after a verification, the head reads the hidden
    # states of the model.

    def __init__(self, parts: SessionParts, *, vocab_size: int, of_model: slice, of_head: slice) -> None:
        super().__init__(parts, vocab_size=vocab_size)
        assert self._runner.hidden_inputs is not None
        assert self._runner.hidden_states is not None
        self._inputs, self._states = self._runner.hidden_inputs, self._runner.hidden_states
        self._of_model, self._of_head = of_model, of_head
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
        inputs = self._inputs[slot][count:total]
        inputs[...] = 0
        inputs[:, self._of_model] = sequence.hidden_states[count:]
        return sequence.tokens_from(first + 1 + count)

    def _append_drafted(self, rows: dict[int, list[int]]) -> Logits:
        for slot in rows:
            length = self._batch[slot].length
            inputs = self._inputs[slot][length]
            inputs[...] = 0
            inputs[self._of_head] = self._states[slot][length - 1]
        return super()._append_drafted(rows)


class MtpDrafter(HeadDrafter):
    """Drafts of a multi-token prediction (MTP) head, which reads one hidden state, of the model or its own."""

    def __init__(self, parts: SessionParts, *, vocab_size: int) -> None:
        super().__init__(parts, vocab_size=vocab_size, of_model=slice(None), of_head=slice(None))


class Eagle3Drafter(HeadDrafter):
    """Drafts of an EAGLE-3 head, which reads several hidden states of the model, or one of its own.

    ``tokens``: token ids of its logits; None if they are of all token ids.
    """

    def __init__(self, parts: SessionParts, *, vocab_size: int, tokens: np.ndarray[tuple[int], np.dtype[np.int64]] | None) -> None:
        assert parts.model.eagle3_input is not None
        width = parts.model.eagle3_input.states_width
        super().__init__(parts, vocab_size=vocab_size, of_model=slice(width), of_head=slice(width, None))
        self._tokens = tokens
        self._logits = np.full(vocab_size, -np.inf, np.float32)  # of ids that the head cannot propose, always

    def _choose(self, request: Request, logits: Logits, count: int) -> int | None:
        if self._tokens is None:
            return super()._choose(request, logits, count)
        self._logits[self._tokens] = logits
        return super()._choose(request, self._logits, count)


def _num_states(sequence: DraftedSequence) -> int:
    return 0 if sequence.hidden_states is None else len(sequence.hidden_states)
