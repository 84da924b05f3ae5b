"""Files of an EAGLE-3 head: the tensors that it has in common with its model, and the token ids of its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.model_files import CONFIG_FILE
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.checkpoint.weight_files import SINGLE_FILE
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.eagle3 import TOKEN_OFFSETS, is_draft_head
from trt_kvcache.model.families.family import EAGLE3_PROJECTION
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, merge_names

#: Dtypes of token ids, as safetensors names them.
_INTEGERS = ("I64", "I32")


def is_draft_head_folder(folder: Path) -> bool:
    """Return True for the folder of a draft head: by ``config.json``, or by a tensor ``fc.weight``, which no model has."""
    config, file = folder / CONFIG_FILE, folder / SINGLE_FILE
    if not config.is_file():
        return False
    return is_draft_head(read_json(config)) or (file.is_file() and EAGLE3_PROJECTION in SafetensorsFile(file).tensors)


def with_shared_tensors(config: ModelConfig, files: Mapping[str, WeightFile], folder: Path) -> ModelConfig:
    """Return the configuration of an EAGLE-3 head that names what is not in its files; of another model, the configuration itself."""
    own, names = config.eagle3_input, merge_names(config)
    if own is None or names is None:
        return config
    projection, hidden = names[2], config.hidden_size
    if projection in files and files[projection].tensors[projection].shape == (hidden, 2 * hidden) and own.states_width != 2 * hidden:
        raise CheckpointError(
            f"{folder}: expected an EAGLE-3 head, whose {projection} is of shape {(hidden, own.states_width)}, got a head of EAGLE 1 or 2."
        )
    shares_head = HEAD not in files
    if shares_head and own.num_logits != config.vocab_size:
        raise CheckpointError(
            f"{folder}: expected {HEAD} of {own.num_logits} rows, since draft_vocab_size is not vocab_size={config.vocab_size}, got none."
        )
    return replace(config, eagle3_input=replace(own, shares_embedding=embedding_name(config) not in files, shares_head=shares_head))


def draft_tokens(config: ModelConfig, offsets: WeightFile | None, folder: Path) -> npt.NDArray[np.int64] | None:
    """Return the token ids of the logits of an EAGLE-3 head: id of the logit, plus its offset."""
    if config.eagle3_input is None:
        return None
    count = config.num_logits
    if offsets is None:
        if count != config.vocab_size:
            raise CheckpointError(f"{folder}: expected {TOKEN_OFFSETS}, the token ids of {count} logits, got none.")
        return None
    stored = offsets.tensors[TOKEN_OFFSETS]
    if stored.shape != (count,) or stored.dtype not in _INTEGERS:
        raise CheckpointError(f"{folder}: expected {TOKEN_OFFSETS} of shape {(count,)} in int64, got {stored.shape} in {stored.dtype}.")
    tokens = np.arange(count) + offsets.array(TOKEN_OFFSETS).astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= config.vocab_size or len(np.unique(tokens)) < count:
        raise CheckpointError(
            f"{folder}: expected offsets in {TOKEN_OFFSETS} to {count} different token ids from 0 to {config.vocab_size - 1}, got others."
        )
    return tokens
