"""``AssistantDrafter``: drafts of an assistant, which reads K and V of the large model in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.draft_steps import InPlaceDraftSteps
from trt_kvcache.session.head_drafter import HeadDrafter
from trt_kvcache.session.slots import Slot

if TYPE_CHECKING:
    from trt_kvcache.session.open_model import SessionParts


class AssistantDrafter(HeadDrafter):
    """Generates drafts with an assistant. Its slots are those of the large model, and hold nothing of their own."""

    # All tokens of a draft run at the position of the last token in the cache, and attend to the rows up to it. vLLM does the same
    # (vllm/v1/spec_decode/gemma4.py), and SGLang (frozen_kv_mtp_utils.py); `generate` of transformers takes the position after it. The
    # first token of a draft reads the hidden state of the model there, the others that of the assistant.

    def __init__(self, parts: SessionParts, *, vocab_size: int) -> None:
        super().__init__(parts, vocab_size=vocab_size)
        self._steps = InPlaceDraftSteps(self._runner, self._batch, vocab_size=vocab_size)

    def _slots_of(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        return [one.slot for one in sequences]

    def _kept(self, sequence: DraftedSequence, slot: int) -> int:
        return sequence.length - 1

    def _tokens(self, sequence: DraftedSequence, kept: int) -> list[int]:
        return [*sequence.pending]

    def _take_slots(self, sequences: Mapping[int, DraftedSequence], kept: Mapping[int, int]) -> None:
        runner, slots = self._runner, range(self._parts.cache.max_batch_size)
        lengths = [kept.get(slot, 0) for slot in slots]
        states = {slot: self._last_state(sequence) for slot, sequence in sequences.items()}
        with runner.work():
            runner.cache.reset_for_new_sequences(lengths, stream=runner.stream)
            self._inputs.continue_from(states, stream=runner.stream)
            runner.apply([Slot([], length) for length in lengths])

    def _last_state(self, sequence: DraftedSequence) -> DeviceTensor:
        states = sequence.hidden_states
        assert states is not None
        return self._on_device(states[len(states) - 1 : len(states)])
