"""``with_draft``: add the drafter that ``draft=`` names to the parts of a session. A small model or an MTP head is opened here."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from typing import Any

from trt_kvcache._util.progress import Progress
from trt_kvcache.checkpoint import Checkpoint, Tokenizer
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.model_drafter import ModelDrafter
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.mtp_drafter import MtpDrafter
from trt_kvcache.session.open_model import EngineFallbackWarning, SessionParts, open_engine_folder, open_model, open_mtp_head
from trt_kvcache.session.session_options import MTP, SessionOptions


def with_draft(
    parts: SessionParts, options: SessionOptions, folder: str | PathLike[str], *, progress: Progress | None = None
) -> SessionParts:
    """Return the parts of a session of a folder with its drafter. The parts are closed if that fails."""
    if options.draft is None:
        return parts
    if options.draft == "ngram":
        return replace(parts, draft="ngram")
    with ExitStack() as undo:
        undo.callback(parts.close)
        if options.draft == MTP:
            small = open_mtp_head(folder, parts, options)
            undo.callback(small.close)
            drafter: ModelDrafter = MtpDrafter(small, vocab_size=parts.model.vocab_size)
        else:
            small = _open(options.draft, parts, options, progress)
            undo.callback(small.close)
            _check(options.draft, small, parts)
            drafter = ModelDrafter(small, vocab_size=parts.model.vocab_size)
        undo.pop_all()
    return replace(parts, draft=drafter, on_close=_both(parts.on_close, drafter.close))


def _open(draft: str, parts: SessionParts, options: SessionOptions, progress: Progress | None) -> SessionParts:
    """Open the small model on the same device, with as many slots, and with the same S, limited by the small model's positions."""
    place = locate_model(draft)
    same = SessionOptions(engine=options.engine, flavour=options.flavour, device=options.device, cuda_graphs=options.cuda_graphs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineFallbackWarning)  # shown when the large model was opened
        if is_engine_folder(place):
            return open_engine_folder(place, same, progress=progress)
        length = min(parts.cache.lengths.max_sequence_length, Checkpoint.read_config(place).max_position_embeddings)
        sized = replace(same, max_batch_size=parts.cache.max_batch_size, max_sequence_length=length, dtype=options.dtype)
        return open_model(place, sized, progress=progress)


def _check(draft: str, small: SessionParts, parts: SessionParts) -> None:
    """Check that a small model has the vocabulary of the large one, and at least as many slots."""
    if small.cache.max_batch_size < parts.cache.max_batch_size:
        raise ConfigError(
            f"draft: {draft}: expected an engine of {parts.cache.max_batch_size} slots or more, got one of {small.cache.max_batch_size}. "
            "Build it with max_batch_size."
        )
    if _vocabulary(small.tokenizer) != _vocabulary(parts.tokenizer):
        raise ConfigError(f"draft: {draft}: expected a model with the tokenizer of the large one, got one with another vocabulary.")


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
