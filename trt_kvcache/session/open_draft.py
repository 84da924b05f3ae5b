"""``with_draft``: add the drafter that ``draft=`` names to the parts of a session. A small model or a draft head is opened here."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from trt_kvcache._util.progress import Progress
from trt_kvcache.builder.options import DEFAULT_MAX_PREFILL_LENGTH, MTP
from trt_kvcache.checkpoint import Checkpoint, Tokenizer
from trt_kvcache.engine.step_rows import hidden_layers_of
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.assistant_drafter import AssistantDrafter
from trt_kvcache.session.draft_heads import assistant_folder, built_head, draft_head_folder, names_head
from trt_kvcache.session.head_drafter import HeadDrafter
from trt_kvcache.session.model_drafter import ModelDrafter
from trt_kvcache.session.model_location import expanded, locate_model
from trt_kvcache.session.open_model import (
    EngineFallbackWarning,
    SessionParts,
    open_assistant,
    open_built_head,
    open_draft_head,
    open_engine_folder,
    open_model,
)
from trt_kvcache.session.session_options import NGRAM, DTypeChoice, SessionOptions


def with_draft(
    parts: SessionParts, options: SessionOptions, folder: str | PathLike[str], *, progress: Progress | None = None
) -> SessionParts:
    """Return the parts of a session of a folder with its drafter. The parts are closed if that fails."""
    if options.draft is None:
        return parts
    if options.draft == NGRAM:
        return replace(parts, draft="ngram")
    with ExitStack() as undo:
        undo.callback(parts.close)
        if options.draft_tree is not None:
            _check_takes_trees("model", parts)
        assistant, head = assistant_folder(options.draft), draft_head_folder(options.draft)
        if parts.folder is not None and names_head(options.draft):
            drafter: ModelDrafter = _built_drafter(parts, options)
        elif options.draft == MTP:
            drafter = _mtp_drafter(*_model_of(folder, options), parts)
        elif assistant is not None:
            drafter = _assistant_drafter(options.draft, assistant, parts, options)
        elif head is not None:
            _, of_model = _model_of(folder, options)
            drafter = _eagle3_drafter(options.draft, head, parts, of_model)
        else:
            small = _open(options.draft, parts, options, progress)
            undo.callback(small.close)
            _check(options.draft, small, parts)
            if options.draft_tree is not None:
                _check_takes_trees("draft model", small)
            drafter = ModelDrafter(small, vocab_size=parts.model.vocab_size, tree_tokens=_tree_tokens(options))
        undo.pop_all()
    return replace(parts, draft=drafter, on_close=_both(parts.on_close, drafter.close))


def _built_drafter(parts: SessionParts, options: SessionOptions) -> HeadDrafter:
    """Return the drafter of a head with a TensorRT engine of its own."""
    assert parts.folder is not None
    assert options.draft is not None
    with ExitStack() as undo:
        head = open_built_head(built_head(options.draft, parts.folder), parts, options)
        undo.callback(head.close)
        if options.draft_tree is not None:
            _check_takes_trees("draft head", head)
        if head.cache.max_batch_size < parts.cache.max_batch_size:
            raise ConfigError(
                f"draft: expected an engine of {parts.cache.max_batch_size} slots or more, got one of {head.cache.max_batch_size}."
            )
        drafter = HeadDrafter(head, vocab_size=parts.model.vocab_size, tree_tokens=_tree_tokens(options))
        undo.pop_all()
    return drafter


def _model_of(folder: str | PathLike[str], options: SessionOptions) -> tuple[Path, SessionOptions]:
    """Return the model folder of a session, and its options; those of an engine folder are fixed by the build."""
    place = expanded(folder)
    if not is_engine_folder(place):
        return place, options
    engine = EngineFolder.open(place)
    model, record = engine.find_checkpoint(), engine.config.checkpoint
    assert model is not None, "the session has opened it"
    return model, replace(options, dtype=cast(DTypeChoice, engine.config.dtype), quantize=record.quantize or None)


def _mtp_drafter(folder: Path, options: SessionOptions, parts: SessionParts) -> HeadDrafter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the weights: shown when the model was opened
        checkpoint = Checkpoint.open_mtp_head(folder, quantize=options.quantize)
    with checkpoint, ExitStack() as undo:
        head = open_draft_head(checkpoint, parts, options, hidden_layers="final_norm")
        undo.callback(head.close)
        drafter = HeadDrafter(head, vocab_size=parts.model.vocab_size, tree_tokens=_tree_tokens(options))
        undo.pop_all()
    return drafter


def _eagle3_drafter(draft: str, folder: Path, parts: SessionParts, options: SessionOptions) -> HeadDrafter:
    with Checkpoint.open_eagle3_head(folder) as checkpoint, ExitStack() as undo:
        hidden_layers_of(checkpoint.config, parts.model, option=f"draft: {draft}")  # what it shares is known now
        head = open_draft_head(checkpoint, parts, options, hidden_layers=(checkpoint.config.num_layers,))
        undo.callback(head.close)
        drafter = HeadDrafter(head, vocab_size=parts.model.vocab_size, tree_tokens=_tree_tokens(options))
        undo.pop_all()
    return drafter


def _assistant_drafter(draft: str, folder: Path, parts: SessionParts, options: SessionOptions) -> AssistantDrafter:
    if options.draft_tree is not None:
        raise ConfigError(f"draft_tree: expected none with the assistant {draft}, which proposes chains, got {options.draft_tree}.")
    with Checkpoint.open_assistant(folder) as checkpoint, ExitStack() as undo:
        assistant = open_assistant(checkpoint, parts)
        undo.callback(assistant.close)
        drafter = AssistantDrafter(assistant, vocab_size=parts.model.vocab_size)
        undo.pop_all()
    return drafter


def _open(draft: str, parts: SessionParts, options: SessionOptions, progress: Progress | None) -> SessionParts:
    """Open the small model on the same device, with as many slots, and with the same S, limited by the small model's positions."""
    place = locate_model(draft)
    same = SessionOptions(engine=options.engine, flavour=options.flavour, device=options.device, cuda_graphs=options.cuda_graphs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineFallbackWarning)  # shown when the large model was opened
        if is_engine_folder(place):
            return open_engine_folder(place, same, draft_tree=options.draft_tree, progress=progress)
        length = min(parts.cache.lengths.max_sequence_length, Checkpoint.read_config(place).max_position_embeddings)
        sized = replace(same, max_batch_size=parts.cache.max_batch_size, max_sequence_length=length, dtype=options.dtype)
        if options.draft_tree is not None:
            sized = replace(sized, max_logits_per_slot=min(options.draft_tree, length, DEFAULT_MAX_PREFILL_LENGTH))
        return open_model(place, sized, draft_tree=options.draft_tree, progress=progress)


def _check(draft: str, small: SessionParts, parts: SessionParts) -> None:
    """Check that a small model has the vocabulary of the large one, and at least as many slots."""
    if small.cache.max_batch_size < parts.cache.max_batch_size:
        raise ConfigError(
            f"draft: {draft}: expected an engine of {parts.cache.max_batch_size} slots or more, got one of {small.cache.max_batch_size}. "
            "Build it with max_batch_size."
        )
    if _vocabulary(small.tokenizer) != _vocabulary(parts.tokenizer):
        raise ConfigError(f"draft: {draft}: expected a model with the tokenizer of the large one, got one with another vocabulary.")
    if parts.tokenizer is None and small.model.vocab_size < parts.model.vocab_size:
        raise ConfigError(
            f"draft: {draft}: expected a model with at least the {parts.model.vocab_size} token ids of the large one, "
            f"got one with {small.model.vocab_size}."
        )


def _tree_tokens(options: SessionOptions) -> int:
    """Return the most tokens of a tree without the token before it; 0 for chains."""
    return 0 if options.draft_tree is None else options.draft_tree - 1


def _check_takes_trees(what: str, parts: SessionParts) -> None:
    if getattr(parts.engine, "ancestors", None) is None:
        name = "one with recurrent states" if parts.cache.states is not None else f"a {type(parts.engine).__name__}"
        raise ConfigError(f"draft_tree: expected a {what} in an engine that takes trees, got {name}. Leave draft_tree out for chains.")


def _vocabulary(tokenizer: Tokenizer | None) -> Any:
    """Return the vocabulary of a tokenizer, without added tokens, because models of a family have different added tokens."""
    return None if tokenizer is None else json.loads(tokenizer.to_json())["model"].get("vocab")


def _both(first: Any, second: Any) -> Any:
    """Return a function that calls both functions, the second one even if the first raises. The first may be None."""

    def call() -> None:
        with ExitStack() as stack:
            stack.callback(second)
            if first is not None:
                stack.callback(first)

    return call
