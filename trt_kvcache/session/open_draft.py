"""``with_draft``: add the drafter that ``draft=`` names to the parts of a session. A small model or a draft head is opened here."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from trt_kvcache._util.progress import Progress
from trt_kvcache.builder.options import DEFAULT_MAX_PREFILL_LENGTH
from trt_kvcache.checkpoint import Checkpoint, Tokenizer
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.assistant_drafter import AssistantDrafter
from trt_kvcache.session.draft_heads import assistant_folder, draft_head_folder
from trt_kvcache.session.head_drafter import HeadDrafter
from trt_kvcache.session.model_drafter import ModelDrafter
from trt_kvcache.session.model_location import expanded, locate_model
from trt_kvcache.session.open_model import (
    EngineFallbackWarning,
    SessionParts,
    open_assistant,
    open_draft_head,
    open_engine_folder,
    open_model,
)
from trt_kvcache.session.session_options import MTP, NGRAM, SessionOptions


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
        if options.draft == MTP:
            drafter: ModelDrafter = _mtp_drafter(folder, parts, options)
        elif assistant is not None:
            drafter = _assistant_drafter(options.draft, assistant, parts, options)
        elif head is not None:
            drafter = _eagle3_drafter(options.draft, head, parts, options)
        else:
            small = _open(options.draft, parts, options, progress)
            undo.callback(small.close)
            _check(options.draft, small, parts)
            if options.draft_tree is not None:
                _check_takes_trees("draft model", small)
            drafter = ModelDrafter(small, vocab_size=parts.model.vocab_size, tree_tokens=_tree_tokens(options))
        undo.pop_all()
    return replace(parts, draft=drafter, on_close=_both(parts.on_close, drafter.close))


def _mtp_drafter(folder: str | PathLike[str], parts: SessionParts, options: SessionOptions) -> HeadDrafter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the weights: shown when the model was opened
        checkpoint = Checkpoint.open_mtp_head(expanded(folder), quantize=options.quantize)
    with checkpoint, ExitStack() as undo:
        head = open_draft_head(checkpoint, parts, options, hidden_layers="final_norm")
        undo.callback(head.close)
        drafter = HeadDrafter(head, vocab_size=parts.model.vocab_size, tree_tokens=_tree_tokens(options))
        undo.pop_all()
    return drafter


def _eagle3_drafter(draft: str, folder: Path, parts: SessionParts, options: SessionOptions) -> HeadDrafter:
    with Checkpoint.open_eagle3_head(folder) as checkpoint, ExitStack() as undo:
        model, own = checkpoint.config, checkpoint.config.eagle3_input
        if own is not None and (own.shares_embedding or own.shares_head) and model.hidden_size != parts.model.hidden_size:
            lacking = "embedding" if own.shares_embedding else "language model head"
            raise ConfigError(f"draft: {draft}: expected an {lacking} of width {model.hidden_size} in the files of the head, got none.")
        head = open_draft_head(checkpoint, parts, options, hidden_layers=(model.num_layers,))
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
