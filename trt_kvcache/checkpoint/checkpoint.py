"""A Hugging Face model folder: its configuration and its weights, checked against each other and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, family_names, open_weight_files
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_name, itemsize, numpy_dtype
from trt_kvcache.errors import CheckpointError, ClosedError, ConfigError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, tensor_shapes

CONFIG_FILE = "config.json"

# Optional files of a model folder that a copy of it includes.
COMPANION_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Older exports stored these buffers. They are computed from the configuration instead.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"

_HASH_CHUNK_BYTES = 1 << 22


class Checkpoint:
    """The weights of a model folder. The presence, shape and dtype of every tensor have been checked.

    Create one with :meth:`open`. It is a context manager. The arrays that it returns are read-only views of the memory-mapped files;
    they keep the mapping alive and stay valid after :meth:`close`. A tensor that is stored in another dtype than the model's is
    converted when it is read.

    Parameters
    ----------
    path : Path
        The folder.
    config : ModelConfig
        The model that ``config.json`` describes.
    files : mapping of str to SafetensorsFile
        The file that holds each tensor, by the name that the family has for it.

    Attributes
    ----------
    path : Path
        The folder.
    config : ModelConfig
        The model that ``config.json`` describes.

    Examples
    --------
    >>> from trt_kvcache import Checkpoint
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     print(checkpoint.config.family, checkpoint.config.num_layers)
    ...     print(checkpoint.tensor("model.norm.weight").shape)
    llama 2
    (32,)
    """

    def __init__(self, path: Path, config: ModelConfig, files: Mapping[str, SafetensorsFile]) -> None:
        self.path = path
        self.config = config
        self._shapes = tensor_shapes(config)
        self._files: Mapping[str, SafetensorsFile] | None = files

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a model folder and check it.

        Parameters
        ----------
        path : path
            A folder with ``config.json`` and ``model.safetensors`` (or shards and their index).

        Returns
        -------
        Checkpoint
            The weights are mapped into memory, not read.

        Raises
        ------
        CheckpointError
            The folder is incomplete, a file is damaged, or the model is not supported. The message names the file.

        Warns
        -----
        UserWarning
            Weights are stored in another floating-point dtype than ``config.json`` says (float32 norms in a bfloat16 model, ...). They
            are converted when they are read, as transformers does.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a model folder, got {'a file' if folder.exists() else 'nothing there'}.")
        config_path = folder / CONFIG_FILE
        data = read_json(config_path)
        try:
            config = ModelConfig.from_dict(data, default_dtype="float32")
        except ConfigError as error:
            raise CheckpointError(f"{config_path}: {error}") from error
        files = family_names(open_weight_files(folder), FAMILIES[config.family], folder)
        if data.get("dtype") is None and data.get("torch_dtype") is None and embedding_name(config) in files:
            config = _with_stored_dtype(config, files[embedding_name(config)])
        _check(config, files, folder)
        checkpoint = cls(folder, config, files)
        _warn_of_conversion(config, files, checkpoint.tensor_names, folder)
        return checkpoint

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the model's tensors, from the embedding to the head. A head that is tied to the embedding is not listed."""
        return tuple(self._shapes)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return one tensor, without copying it unless it must be converted.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        ndarray
            Read-only, in host memory, in the dtype of the model (bfloat16 through ml_dtypes).

        Raises
        ------
        CheckpointError
            The model has no such tensor, or it is stored in another dtype and holds values that the dtype of the model cannot.
        ClosedError
            The checkpoint is closed.
        """
        files = self._open_files()
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: expected the name of a tensor of the model, got {name!r}.")
        return _array(files[name], name, self.config.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the model's weights in bytes, in the dtype of the model."""
        self._open_files()
        return sum(math.prod(shape) for shape in self._shapes.values()) * itemsize(self.config.dtype)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that a copy of the model needs: configuration, weights, tokenizer and templates."""
        weights = {file.path for file in self._open_files().values()}
        index = () if self.path / SINGLE_FILE in weights else (self.path / INDEX_FILE,)
        companions = (self.path / name for name in COMPANION_FILES)
        return (self.path / CONFIG_FILE, *index, *sorted(weights), *(file for file in companions if file.is_file()))

    def fingerprint(self, progress: Callable[[int, int], object] | None = None) -> str:
        """Return a hash of the model, equal for equal models wherever the folder is and however it is sharded.

        Parameters
        ----------
        progress : callable, optional
            Called as ``progress(done_bytes, total_bytes)`` while the weights are read; in the last call both are equal.

        Returns
        -------
        str
            SHA-256 in hex over the configuration, the names, dtypes and shapes of the tensors, and their bytes.

        Raises
        ------
        CheckpointError
            As for :meth:`tensor`.
        ClosedError
            The checkpoint is closed.
        """
        self._open_files()
        names = sorted(self._shapes)
        index = [(name, self.config.dtype, self._shapes[name]) for name in names]
        digest = hashlib.sha256(json.dumps([self.config.to_description(), index], sort_keys=True).encode())
        done, total = 0, self.nbytes
        for name in names:
            content = _bytes(self.tensor(name))
            for start in range(0, content.size, _HASH_CHUNK_BYTES):
                chunk = content[start : start + _HASH_CHUNK_BYTES]
                digest.update(chunk.data)
                done += chunk.size
                if progress is not None:
                    progress(done, total)
        return digest.hexdigest()

    def close(self) -> None:
        """Release the files. Arrays that were returned before stay valid. Closing twice is allowed."""
        self._files = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_files(self) -> Mapping[str, SafetensorsFile]:
        if self._files is None:
            raise ClosedError(f"checkpoint {self.path} is closed.")
        return self._files


def _with_stored_dtype(config: ModelConfig, file: SafetensorsFile) -> ModelConfig:
    embedding = embedding_name(config)
    stored = file.tensors[embedding].dtype
    if stored not in MODEL_DTYPES:
        raise CheckpointError(
            f"{file.path}: expected weights in one of {', '.join(MODEL_DTYPES)}, got {embedding} in {stored}. "
            "Convert the checkpoint, or use an unquantised one."
        )
    return replace(config, dtype=stored)


def _check(config: ModelConfig, files: Mapping[str, SafetensorsFile], folder: Path) -> None:
    """Compare the tensors that the configuration requires with those in the files, before anything uses either."""
    shapes = tensor_shapes(config)
    missing = [name for name in shapes if name not in files]
    if missing:
        hint = " If the head is the embedding, config.json must say `tie_word_embeddings: true`." if missing == [HEAD] else ""
        raise CheckpointError(f"{folder}: {len(missing)} tensor(s) of a {config.family} model are missing: {_some(missing)}.{hint}")
    for name, shape in shapes.items():
        stored = files[name].tensors[name]
        if stored.shape != shape:
            raise CheckpointError(f"{files[name].path}: expected {name} of shape {shape} by {CONFIG_FILE}, got {stored.shape}.")
        if stored.dtype not in MODEL_DTYPES:
            raise CheckpointError(
                f"{files[name].path}: expected every tensor in {', '.join(MODEL_DTYPES)}, got {name} in {stored.dtype}. "
                "Quantised weights are not supported."
            )
    tied_head = config.tie_word_embeddings and HEAD in files
    extra = sorted(name for name in files if name not in shapes and not name.endswith(_IGNORED_SUFFIX) and not (tied_head and name == HEAD))
    if extra:
        raise CheckpointError(
            f"{files[extra[0]].path}: {len(extra)} tensor(s) that a {config.family} model by {CONFIG_FILE} does not use: {_some(extra)}. "
            "Leaving them out would run another model."
        )
    if tied_head:
        _check_tied_head(config, files)


def _check_tied_head(config: ModelConfig, files: Mapping[str, SafetensorsFile]) -> None:
    name = embedding_name(config)
    head, embedding = files[HEAD].tensors[HEAD], files[name].tensors[name]
    same = head.shape == embedding.shape and head.dtype in MODEL_DTYPES
    if same:
        arrays = [_bytes(_array(files[tied], tied, config.dtype)) for tied in (HEAD, name)]
        same = np.array_equal(arrays[0], arrays[1])
    if not same:
        raise CheckpointError(f"{files[HEAD].path}: {CONFIG_FILE} says `tie_word_embeddings`, but {HEAD} differs from {name}.")


def _warn_of_conversion(config: ModelConfig, files: Mapping[str, SafetensorsFile], names: Iterable[str], folder: Path) -> None:
    converted = [name for name in names if files[name].tensors[name].dtype != config.dtype]
    if converted:
        stored = sorted({files[name].tensors[name].dtype for name in converted})
        warn_caller(
            f"{folder}: {len(converted)} tensor(s) are stored in {' and '.join(stored)} and are converted to {config.dtype}, "
            f"the dtype of the model by {CONFIG_FILE}: {_some(converted)}.",
            UserWarning,
        )


def _array(file: SafetensorsFile, name: str, dtype: str) -> npt.NDArray[Any]:
    """Return a tensor in a dtype, as a view of the file if it is stored in it."""
    stored = file.array(name)
    if stored.dtype == numpy_dtype(dtype):
        return stored
    with np.errstate(over="ignore"):
        converted = stored.astype(numpy_dtype(dtype))
    if not np.isfinite(converted).all():
        raise CheckpointError(
            f"{file.path}: {name} is stored in {dtype_name(stored.dtype)} and has values that {dtype}, the dtype of the model by "
            f"{CONFIG_FILE}, cannot hold."
        )
    converted.flags.writeable = False
    return converted


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
