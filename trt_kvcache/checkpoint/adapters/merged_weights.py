"""Base weights with an adapter merged into them when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.adapters.changed_weights import changed_weights, made_for
from trt_kvcache.checkpoint.adapters.lora_adapter import LoraAdapter, LowRankUpdate
from trt_kvcache.checkpoint.gguf.weights import GGUFWeights
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, tensor_shapes

#: Elements of a matrix whose update is computed at a time: the memory of the product.
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class MergedWeight:
    """A :class:`~trt_kvcache.checkpoint.weight_file.WeightFile` of one matrix: a base weight with its update, in float32."""

    base: WeightFile
    name: str
    update: LowRankUpdate
    adapter: Path

    #: float32 is kept, so that the sum is rounded once, to the dtype of an engine.
    keeps_stored_dtype = True

    @property
    def path(self) -> Path:
        """File of the base weight."""
        return self.base.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files of the base weight."""
        return self.base.paths

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The matrix."""
        stored = self.base.tensors[self.name]
        return {self.name: replace(stored, dtype="float32", nbytes=4 * stored.shape[0] * stored.shape[1])}

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the merged matrix in new memory, read-only. Raises CheckpointError for values that float32 cannot hold."""
        merged = self.base.array(name).astype(np.float32)
        self.base.release(name)
        right = self.update.right.astype(np.float32)
        step = max(1, _CHUNK // merged.shape[1])
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for first in range(0, len(merged), step):
                rows = slice(first, first + step)
                product = self.update.left[rows].astype(np.float32) @ right
                product *= np.float32(self.update.scale)
                merged[rows] += product
                if self.update.magnitude is not None:
                    norms = np.linalg.norm(merged[rows], axis=1)
                    merged[rows] *= (self.update.magnitude[rows].astype(np.float32) / norms)[:, None]
        if not np.isfinite(merged).all():
            raise CheckpointError(f"{self.adapter}: expected finite values of {name} after the merge, got others.")
        merged.flags.writeable = False
        return merged

    def release(self, name: str) -> None:
        """Drop the pages of the base weight."""
        self.base.release(name)

    def rename(self, names: Mapping[str, str]) -> None:
        """Keep the name: a merged weight has the family's name already."""


def with_untied_head(
    adapter: LoraAdapter, config: ModelConfig, files: Mapping[str, WeightFile]
) -> tuple[ModelConfig, dict[str, WeightFile]]:
    """Return model and files with a head of its own if an adapter changes the head or the embedding, as in PEFT.

    The base weight of the head is still the stored embedding.
    """
    own = FAMILIES[config.family].own_name
    tied = {embedding_name(config), HEAD}
    if not config.tie_word_embeddings or not any(own(name) in tied for name in adapter.changed):
        return config, dict(files)
    found = dict(files)
    if HEAD not in found:
        file = found[embedding_name(config)]
        assert isinstance(file, SafetensorsFile)
        file.add_name(HEAD, embedding_name(config))
        found[HEAD] = file
    return replace(config, tie_word_embeddings=False), found


def check_base(files: Mapping[str, WeightFile], quantized_title: str | None, folder: Path) -> None:
    """Raise CheckpointError for a base model into whose weights no adapter can be merged."""
    is_gguf = any(isinstance(file, GGUFWeights) for file in files.values())
    if is_gguf or quantized_title is not None:
        got = "a GGUF file" if is_gguf else f"weights in {quantized_title}"
        raise CheckpointError(
            f"adapter: expected a base model of safetensors in 16 or 32 bits, got {got} in {folder}. "
            "adapters= runs adapters next to quantized weights. Or open the 16-bit model from which it was made, with the adapter and with "
            "quantize=..., which rounds the merged weights."
        )


def merged_weights(adapter: LoraAdapter, config: ModelConfig, files: Mapping[str, WeightFile]) -> dict[str, WeightFile]:
    """Return the merged weights by name. Raises CheckpointError for a module or a shape that the model does not have."""
    merged: dict[str, WeightFile] = {}
    for name, stored in changed_weights(adapter, config).items():
        if stored in adapter.replaced:
            merged[name] = _whole(adapter, stored, name, tensor_shapes(config)[name])
        else:
            update = adapter.updates[stored.removesuffix(".weight")]
            merged[name] = MergedWeight(base=files[name], name=name, update=update, adapter=adapter.path)
    _check_copies(adapter, config, files)
    return merged


def _whole(adapter: LoraAdapter, stored: str, name: str, shape: tuple[int, ...]) -> SafetensorsFile:
    """Return the file of an adapter, with the name of a tensor that it has in place of the model's."""
    adapter.file.add_name(name, adapter.replaced[stored])
    found = adapter.file.tensors[name].shape
    if found != shape:
        hint = "The vocabulary of an embedding may have been resized."
        raise CheckpointError(f"{adapter.path}: expected {stored} of shape {shape}, got {found}. {hint}{made_for(adapter)}")
    return adapter.file


def _check_copies(adapter: LoraAdapter, config: ModelConfig, files: Mapping[str, WeightFile]) -> None:
    """Compare base weights that PEFT stored next to the adapter with those of the model: they may be of another vocabulary."""
    for module, copy in adapter.base_copies.items():
        name = FAMILIES[config.family].own_name(f"{module}.weight")
        if name not in files:  # of a tower
            continue
        base = files[name].array(name)
        if copy.shape != base.shape or not np.array_equal(copy.astype(base.dtype), base):
            raise CheckpointError(
                f"{adapter.path}: expected the base weight of {module} {base.shape} that the model has, got another of shape {copy.shape}. "
                f"The vocabulary may have been resized.{made_for(adapter)}"
            )
