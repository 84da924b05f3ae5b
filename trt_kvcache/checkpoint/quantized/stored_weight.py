"""Quantized weights in the files of a folder: found, checked, and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trt_kvcache.checkpoint.quantized.format import QuantizedFormat, StoredPart
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import CheckpointError, ConfigError

Files = Mapping[str, WeightFile]


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A quantized weight in files."""

    quantized: QuantizedFormat
    module: str  # name of the weight without ".weight"
    shape: tuple[int, int]  # [out, in]
    parts: tuple[tuple[str, str], ...]  # of each tensor that is there: suffix in the format, and suffix in the files

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return tuple(f"{self.module}.{stored}" for _, stored in self.parts)

    def nbytes(self, files: Files) -> int:
        """Return the stored size in bytes."""
        return sum(files[name].tensors[name].nbytes for name in self.tensor_names)

    def value_kind(self, files: Files) -> str:
        """Return the kind of its quantized values: see ``VALUE_BITS`` of ``trt_kvcache/checkpoint/quantized/quantized_values.py``."""
        return self.read(files).quantized_values.kind

    def read(self, files: Files) -> QuantizedWeight:
        """Return the weight over the memory of the files. Raises CheckpointError if values contradict ``config.json``."""
        arrays = {part: files[name].array(name) for (part, _), name in zip(self.parts, self.tensor_names, strict=True)}
        try:
            return self.quantized.weight(self.module, arrays, self.shape)
        except ConfigError as error:
            raise CheckpointError(f"{files[self.tensor_names[0]].path}: {error}") from error


def stored_weight(quantized: QuantizedFormat, name: str, shape: tuple[int, ...], files: Files) -> StoredWeight | None:
    """Return a quantized weight after checking its tensors; None for a plain one. Raises CheckpointError for a wrong shape or dtype."""
    module, _, kind = name.rpartition(".")
    if kind != "weight" or len(shape) != 2:
        return None
    main = f"{module}.{quantized.main_part(module)}"
    if main not in files or (main == name and files[main].tensors[main].dtype in MODEL_DTYPES):
        return None
    try:
        parts = quantized.parts(module, (shape[0], shape[1]))
    except ConfigError as error:
        raise CheckpointError(f"{files[main].path}: {error}") from error
    found = []
    for part, rule in parts.items():
        stored = next((name for name in (part, rule.other_name) if name is not None and f"{module}.{name}" in files), None)
        if stored is not None:
            _check_part(f"{module}.{stored}", rule, quantized, files)
            found.append((part, stored))
        elif rule.is_required:
            raise CheckpointError(
                f"{files[main].path}: expected {module}.{part} next to {main}, got nothing there. "
                f"Weights of {quantized.title} need it: fetch or convert the checkpoint again."
            )
    return StoredWeight(quantized=quantized, module=module, shape=(shape[0], shape[1]), parts=tuple(found))


def _check_part(name: str, rule: StoredPart, quantized: QuantizedFormat, files: Files) -> None:
    stored = files[name].tensors[name]
    if stored.dtype not in rule.dtypes:
        raise CheckpointError(
            f"{files[name].path}: expected {name} in {' or '.join(rule.dtypes)}, as {quantized.title} stores it, got {stored.dtype}."
        )
    if stored.shape not in rule.shapes:
        raise CheckpointError(
            f"{files[name].path}: expected {name} of shape {' or '.join(map(str, rule.shapes))}, as {quantized.title} stores it by "
            f"config.json, got {stored.shape}. Bits or group size of `quantization_config` may belong to another checkpoint."
        )
