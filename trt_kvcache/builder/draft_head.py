"""The draft head of a build: opening it, and weights that it and its model have in common."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache.builder.network.weights import TensorSource
from trt_kvcache.builder.options import MTP
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.eagle3_files import is_draft_head_folder
from trt_kvcache.checkpoint.quantized.offset_blocks import OffsetBlocks
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.families.family import EAGLE3_PROJECTION
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, shared_tensors


def open_draft_head(draft_head: str, model: Path, *, quantize: str | None) -> Checkpoint:
    """Open the draft head that ``draft_head=`` of a build names."""
    if draft_head == MTP:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the weights: shown when the model was opened
            return Checkpoint.open_mtp_head(model, quantize=quantize)
    place = Path(os.path.expanduser(draft_head))
    if not is_draft_head_folder(place):
        raise ConfigError(f"draft_head: expected {MTP} or the folder of an EAGLE-3 head, got {draft_head}.")
    return Checkpoint.open_eagle3_head(place)


class JoinedTensors:
    """Weights of a checkpoint, some of which another one has (a ``TensorSource``). ``names``: their names there."""

    def __init__(self, own: TensorSource, other: TensorSource, names: Mapping[str, str]) -> None:
        self._own, self._other, self._names = own, other, names

    @classmethod
    def of_model(cls, model: Checkpoint, head: Checkpoint) -> JoinedTensors:
        """Return the weights of a model, and the projection of an EAGLE-3 head, which reduces hidden states."""
        return cls(model, head, {EAGLE3_PROJECTION: EAGLE3_PROJECTION})

    @classmethod
    def of_head(cls, head: Checkpoint, model: Checkpoint) -> JoinedTensors:
        """Return the weights of a draft head, with embedding and language model head of its model if it shares them."""
        embedding = embedding_name(model.config)
        of_model = {embedding_name(head.config): embedding, HEAD: embedding if model.config.tie_word_embeddings else HEAD}
        return cls(head, model, {name: of_model[name] for name in shared_tensors(head.config)})

    def _source(self, name: str) -> tuple[TensorSource, str]:
        return (self._other, self._names[name]) if name in self._names else (self._own, name)

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """See :class:`TensorSource`."""
        source, stored = self._source(name)
        return source.tensor(stored)

    def quantized_weight(self, name: str) -> QuantizedWeight | None:
        """See :class:`TensorSource`."""
        source, stored = self._source(name)
        return source.quantized_weight(stored)

    def super_blocks(self, name: str) -> SuperBlocks | None:
        """See :class:`TensorSource`."""
        source, stored = self._source(name)
        return source.super_blocks(stored)

    def offset_blocks(self, name: str) -> OffsetBlocks | None:
        """See :class:`TensorSource`."""
        source, stored = self._source(name)
        return source.offset_blocks(stored)

    def release(self, name: str) -> None:
        """See :class:`TensorSource`."""
        source, stored = self._source(name)
        source.release(stored)
