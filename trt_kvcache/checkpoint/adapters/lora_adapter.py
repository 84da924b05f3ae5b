"""``LoraAdapter``: the weights of a PEFT folder, checked against its configuration."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.adapters.adapter_config import AdapterConfig
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import CheckpointError, ConfigError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"

#: Prefix of all names in the file.
_PREFIX = "base_model.model."

#: Ends of the names of A and B, of a linear layer and of an embedding.
_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")

#: End of the names of magnitudes, of a linear layer with DoRA.
_MAGNITUDE = ".lora_magnitude_vector"

#: End of a base weight that PEFT stores next to the adapter of an embedding.
_BASE = ".base_layer.weight"


def adapter_folder(path: object) -> str:
    """Return the folder that an option names, as a text. Raises ConfigError for any other value."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ConfigError(f"adapter: expected a folder of PEFT, got {short_repr(path)}.")
    return os.path.expanduser(os.fspath(path))


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRankUpdate:
    """An update of a matrix ``[out, in]``: the sum with ``scale * left @ right``, whose rows DoRA scales to norms of their own."""

    left: npt.NDArray[Any]  # [out, r]
    right: npt.NDArray[Any]  # [r, in]
    scale: float
    magnitude: npt.NDArray[Any] | None = None  # [out], the norms of the rows with DoRA

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Its arrays."""
        return (self.left, self.right, *(() if self.magnitude is None else (self.magnitude,)))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.left.shape[0], self.right.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraAdapter:
    """A LoRA adapter. Made by :meth:`open`."""

    path: Path
    config: AdapterConfig
    updates: Mapping[str, LowRankUpdate]  # by module
    embeddings: frozenset[str]  # modules of updates that are embeddings
    base_copies: Mapping[str, npt.NDArray[Any]]  # base weights in the file, by module
    replaced: Mapping[str, str]  # tensors of the model that the file has whole, with their names there
    file: SafetensorsFile

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LoraAdapter:
        """Read a folder of PEFT. Raises CheckpointError for one that is incomplete, damaged, or not read as a plain LoRA adapter."""
        folder = Path(adapter_folder(path))
        if not folder.is_dir():
            raise CheckpointError(
                f"adapter: expected a folder of PEFT, got {folder}, which is {'a file' if folder.exists() else 'absent'}."
            )
        source, weights = folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_WEIGHTS_FILE
        if not source.is_file() or not weights.is_file():
            found = sorted(file.name for file in folder.iterdir() if file.name.startswith("adapter_")) or ["neither"]
            raise CheckpointError(
                f"{folder}: expected {ADAPTER_CONFIG_FILE} and {ADAPTER_WEIGHTS_FILE}, got {', '.join(found[:3])}. "
                "Weights in another format (adapter_model.bin) must be converted to safetensors first."
            )
        try:
            config = AdapterConfig.read(read_json(source))
        except ConfigError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return _adapter(folder, config, SafetensorsFile(weights, keeps_stored_dtype=True))

    @property
    def changed(self) -> tuple[str, ...]:
        """PEFT's names of the model weights that the adapter changes."""
        return (*(f"{module}.weight" for module in self.updates), *sorted(self.replaced))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the folder that are read."""
        return self.path / ADAPTER_CONFIG_FILE, self.path / ADAPTER_WEIGHTS_FILE

    def fingerprint(self) -> str:
        """Return a hash of the adapter, equal for adapters of equal updates wherever the folder is."""
        names = sorted(self.updates)
        index = [(name, self.updates[name].scale, name in self.embeddings) for name in names]
        whole = sorted(self.replaced)
        arrays = [array for name in names for array in self.updates[name].arrays] + [self.file.array(self.replaced[name]) for name in whole]
        digest = hashlib.sha256(json.dumps([index, whole, [(str(array.dtype), array.shape) for array in arrays]]).encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def _adapter(folder: Path, config: AdapterConfig, file: SafetensorsFile) -> LoraAdapter:
    """Return the adapter in a file, whose tensors are all used."""
    updates: dict[str, LowRankUpdate] = {}
    embeddings, base_copies, replaced = set(), {}, _replaced(config, file)
    for name in sorted(file.tensors.keys() - replaced.values()):
        module, end = _split(name, file.path, has_magnitudes=config.use_dora)
        if end == _BASE:
            base_copies[module] = _finite(file, name)
            continue
        ends = _EMBEDDING if end in _EMBEDDING else _LINEAR
        names = [f"{_PREFIX}{module}{one}" for one in (*ends, *((_MAGNITUDE,) if config.use_dora else ()))]
        missing = next((one for one in names if one not in file.tensors), None)
        if missing is not None:
            raise CheckpointError(f"{file.path}: expected {missing} with {name}, got none. The file may be damaged: fetch it again.")
        if not config.targets(module):
            raise CheckpointError(
                f"{file.path}: expected modules that {ADAPTER_CONFIG_FILE} targets, got {module}. The files may be of different adapters."
            )
        if ends is _EMBEDDING:
            embeddings.add(module)
        if end == ends[0]:
            if module in updates:
                raise CheckpointError(
                    f"{file.path}: expected one pair of A and B for {module}, got one as a linear layer and as an embedding."
                )
            updates[module] = _update(config, file, module, names, is_embedding=ends is _EMBEDDING)
    if not updates:
        raise CheckpointError(f"{file.path}: expected tensors such as {_PREFIX}...{_LINEAR[0]}, got none.")
    stray = next((module for module in base_copies if module not in embeddings and module not in updates), None)
    if stray is not None:
        raise CheckpointError(f"{file.path}: expected an adapter of {stray}, whose base weight is there, got none.")
    return LoraAdapter(
        path=folder,
        config=config,
        updates=updates,
        embeddings=frozenset(embeddings),
        base_copies=base_copies,
        replaced=replaced,
        file=file,
    )


def _replaced(config: AdapterConfig, file: SafetensorsFile) -> dict[str, str]:
    """Return the tensors of the model that a file has whole, with their names there."""
    found: dict[str, str] = {}
    for name in file.tensors:
        tensor = name.removeprefix(_PREFIX).replace(".base_layer.", ".")  # of a bias next to an update
        is_update = name.endswith((*_LINEAR, *_EMBEDDING, _MAGNITUDE))
        if is_update or not name.startswith(_PREFIX) or not config.replaces(tensor):
            continue
        _check_dtype(file, name)
        if tensor in found:
            raise CheckpointError(f"{file.path}: expected {tensor} once, got {found[tensor]} and {name}.")
        found[tensor] = name
    absent = next((name for name in sorted(config.modules_to_save) if not any(f".{name}." in f".{tensor}" for tensor in found)), None)
    if absent is not None:
        raise CheckpointError(f"{file.path}: expected tensors of {absent}, which modules_to_save lists, got none.")
    return found


def _split(name: str, path: Path, *, has_magnitudes: bool) -> tuple[str, str]:
    """Return the module and the end of a tensor's name. Raises CheckpointError for a tensor that a LoRA adapter does not have."""
    expected = (*_LINEAR, _MAGNITUDE) if has_magnitudes else (*_LINEAR, *_EMBEDDING)
    end = next((end for end in (*expected, _BASE) if name.endswith(end)), None)
    if end is None or not name.startswith(_PREFIX):
        raise CheckpointError(
            f"{path}: expected tensors {_PREFIX}MODULE with {', '.join(end[1:] for end in expected)}, got {name}. "
            "Leaving it out would run another model."
        )
    return name.removeprefix(_PREFIX).removesuffix(end), end


def _update(config: AdapterConfig, file: SafetensorsFile, module: str, names: list[str], *, is_embedding: bool) -> LowRankUpdate:
    """Return the update of a module. Raises CheckpointError for shapes that disagree with the rank or with each other."""
    rank = config.rank_of(module)
    shapes = [file.tensors[name].shape for name in names]
    for name, shape, expected in zip(names, shapes, ((rank, "in"), ("out", rank)), strict=False):
        if len(shape) != 2 or shape[expected.index(rank)] != rank:
            wanted = ", ".join(map(str, expected))
            raise CheckpointError(f"{file.path}: expected {name} of shape ({wanted}) by {ADAPTER_CONFIG_FILE}, got {shape}.")
    a, b, *magnitudes = (_finite(file, name) for name in names)
    if magnitudes and magnitudes[0].shape != (len(b),):
        raise CheckpointError(f"{file.path}: expected {names[2]} of shape ({len(b)},), got {magnitudes[0].shape}.")
    if is_embedding:
        return LowRankUpdate(left=a.T, right=b.T, scale=config.scale_of(module))
    return LowRankUpdate(left=b, right=a, scale=config.scale_of(module), magnitude=magnitudes[0] if magnitudes else None)


def _finite(file: SafetensorsFile, name: str) -> npt.NDArray[Any]:
    """Return a tensor of finite floating-point numbers."""
    _check_dtype(file, name)
    array = file.array(name)
    if not np.isfinite(array.astype(np.float32)).all():
        raise CheckpointError(f"{file.path}: expected finite values of {name}, got others. The file may be damaged: fetch it again.")
    return array


def _check_dtype(file: SafetensorsFile, name: str) -> None:
    dtype = file.tensors[name].dtype
    if dtype not in MODEL_DTYPES:
        raise CheckpointError(f"{file.path}: expected every tensor in {', '.join(MODEL_DTYPES)}, got {name} in {dtype}.")
