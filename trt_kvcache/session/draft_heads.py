"""For the draft head or assistant that ``draft=`` names: the hidden states that the large model's engine returns."""

from __future__ import annotations

from pathlib import Path

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.assistant_files import is_assistant_folder
from trt_kvcache.checkpoint.eagle3_files import is_draft_head_folder
from trt_kvcache.engine.step_rows import HiddenLayers, ReducedLayers
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session_options import MTP, NGRAM


def draft_head_folder(draft: str | None) -> Path | None:
    """Return the folder of a draft head of its own, which ``draft=`` names; None for other drafts."""
    if draft in (None, NGRAM, MTP):
        return None
    place = locate_model(draft)
    return place if is_draft_head_folder(place) else None


def assistant_folder(draft: str | None) -> Path | None:
    """Return the folder of an assistant, which ``draft=`` names; None for other drafts."""
    if draft in (None, NGRAM, MTP):
        return None
    place = locate_model(draft)
    return place if is_assistant_folder(place) else None


def hidden_layers_for(draft: str | None, model: ModelConfig) -> HiddenLayers | None:
    """Return the hidden states of a model that its drafter reads, after checking that the head fits the model. Raises ConfigError."""
    if draft == MTP:
        return "final_norm"
    folder = assistant_folder(draft)
    if folder is not None:
        assistant = Checkpoint.read_assistant_config(folder)
        assert assistant.assistant_input is not None
        _check_sizes(draft, "an assistant", model, assistant.assistant_input.state_size, assistant.vocab_size)
        assistant.assistant_input.kv_places(model.kv_layers)
        return "final_norm"
    folder = draft_head_folder(draft)
    if folder is None:
        return None
    head = Checkpoint.read_eagle3_config(folder)
    own = head.eagle3_input
    assert own is not None
    _check_sizes(draft, "an EAGLE-3 head", model, own.state_size, head.vocab_size)
    return ReducedLayers.of_head(head, model.num_layers)


def _check_sizes(draft: str | None, what: str, model: ModelConfig, state_size: int, vocab_size: int) -> None:
    for name, expected, given in (
        ("hidden size", model.hidden_size, state_size),
        ("vocabulary of", model.vocab_size, vocab_size),
    ):
        if given != expected:
            raise ConfigError(f"draft: {draft}: expected {what} for the {name} {expected} of the model, got one for {given}.")
