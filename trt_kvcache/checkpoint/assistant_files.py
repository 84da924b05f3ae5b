"""Files of an assistant: the token ids by cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.model_files import CONFIG_FILE
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.gemma4_assistant import TOKEN_ORDERING, is_assistant
from trt_kvcache.model.model_config import ModelConfig

#: Dtypes of token ids, as safetensors names them.
_INTEGERS = ("I64", "I32")


def is_assistant_folder(folder: Path) -> bool:
    """Return True for the folder of an assistant."""
    return (folder / CONFIG_FILE).is_file() and is_assistant(read_json(folder / CONFIG_FILE))


def token_clusters(config: ModelConfig, ordering: WeightFile | None, folder: Path) -> npt.NDArray[np.int64] | None:
    """Return the token ids ``[clusters, n]`` of each cluster of an assistant; None for another model, or one without clusters."""
    clusters = None if config.assistant_input is None else config.assistant_input.clusters
    if clusters is None:
        return None
    size = config.vocab_size
    if ordering is None:
        raise CheckpointError(f"{folder}: expected {TOKEN_ORDERING}, the {size} token ids by cluster, got none.")
    stored = ordering.tensors[TOKEN_ORDERING]
    if stored.shape != (size,) or stored.dtype not in _INTEGERS:
        raise CheckpointError(f"{folder}: expected {TOKEN_ORDERING} of shape {(size,)} in int64, got {stored.shape} in {stored.dtype}.")
    tokens = ordering.array(TOKEN_ORDERING).astype(np.int64)
    if not np.array_equal(np.sort(tokens), np.arange(size)):
        raise CheckpointError(f"{folder}: expected each token id from 0 to {size - 1} once in {TOKEN_ORDERING}, got others.")
    return tokens.reshape(clusters.count, -1)
