"""For the draft head that ``draft=`` names: the hidden states that the large model's engine returns."""

from __future__ import annotations

from pathlib import Path

from trt_kvcache.checkpoint import Checkpoint
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


def hidden_layers_for(draft: str | None, model: ModelConfig) -> HiddenLayers | None:
    """Return the hidden states of a model that its drafter reads, after checking that the head fits the model. Raises ConfigError."""
    if draft == MTP:
        return "final_norm"
    folder = draft_head_folder(draft)
    if folder is None:
        return None
    head = Checkpoint.read_eagle3_config(folder)
    own = head.eagle3_input
    assert own is not None
    for name, expected, given in (
        ("hidden size", model.hidden_size, own.state_size),
        ("vocabulary of", model.vocab_size, head.vocab_size),
    ):
        if given != expected:
            raise ConfigError(f"draft: {draft}: expected an EAGLE-3 head for the {name} {expected} of the model, got one for {given}.")
    return ReducedLayers.of_head(head, model.num_layers)
