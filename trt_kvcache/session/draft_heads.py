"""For the draft head or assistant that ``draft=`` names: its folder, and the hidden states that the large model's engine returns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trt_kvcache.builder.options import MTP
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.assistant_files import is_assistant_folder
from trt_kvcache.checkpoint.eagle3_files import is_draft_head_folder
from trt_kvcache.engine.step_rows import HiddenLayers, check_sizes, hidden_layers_of
from trt_kvcache.engine_folder.folder import DRAFT_HEAD_FOLDER, EngineFolder, is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session_options import NGRAM, SessionOptions


def with_located_draft(options: SessionOptions) -> SessionOptions:
    """Return options whose ``draft`` is a folder in place of an id of the Hub, which is looked up and downloaded here, once."""
    draft = options.draft
    return options if draft in (None, NGRAM, MTP) else replace(options, draft=str(locate_model(draft)))


def draft_head_folder(draft: str | None) -> Path | None:
    """Return the folder of a draft head of its own, or of the engine of a head, which ``draft=`` names; None for other drafts."""
    if draft in (None, NGRAM, MTP):
        return None
    place = locate_model(draft)
    if is_engine_folder(place):
        return place if EngineFolder.open(place).config.model.hidden_inputs_width else None
    return place if is_draft_head_folder(place) else None


def names_head(draft: str | None) -> bool:
    """Return True if ``draft=`` names a draft head."""
    return draft == MTP or draft_head_folder(draft) is not None


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
        check_sizes(f"draft: {draft}", "an assistant", model, assistant.assistant_input.state_size, assistant.vocab_size)
        assistant.assistant_input.kv_places(model.kv_layers)
        return "final_norm"
    folder = draft_head_folder(draft)
    if folder is None:
        return None
    if is_engine_folder(folder):
        raise ConfigError(f"draft: expected the folder of an EAGLE-3 head, got {draft}, an engine of one for the engine folder around it.")
    return hidden_layers_of(Checkpoint.read_eagle3_config(folder), model, option=f"draft: {draft}")


def built_head(draft: str, folder: EngineFolder) -> EngineFolder:
    """Return the engine of the draft head that ``draft=`` names, for the engine in a folder. Raises ConfigError."""
    expected = folder.config.draft_head
    if not expected:
        raise ConfigError(f"draft: expected an engine that was built with draft_head for {draft}, got {folder.path} without. Build it so.")
    place = draft_head_folder(draft)
    if place is not None and is_engine_folder(place):
        head = EngineFolder.open(place)
        found = head.config.checkpoint.fingerprint
    else:
        head = EngineFolder.open(folder.path / DRAFT_HEAD_FOLDER)
        found = head.config.checkpoint.fingerprint
        if place is not None:
            with Checkpoint.open_eagle3_head(place) as checkpoint:
                found = checkpoint.fingerprint()
        elif head.config.model.merge_norm is None:
            found = ""
    if found != expected:
        raise ConfigError(f"draft: expected the draft head for which {folder.path} was built (draft_head), got {draft}, another one.")
    return head
