"""``EngineFolder``: an engine on disk, with everything that is needed to run it.

    engine.plan             the serialised engine; for an engine in segments, the plans of all segments one after another
    constants.safetensors   only for an engine in segments: its constants, such as the embedding table
    config.json             EngineFolderConfig
    tokenizer.json ...      the other files of the checkpoint
    checkpoint/             a copy of the checkpoint, if it was embedded
    adapter/                a copy of the merged adapter, likewise
    draft_head/             the engine folder of the draft head, for a build with one: plan, configuration, copy of its checkpoint

A folder appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_kvcache._util.atomic_folder import atomic_folder
from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache._util.regular_file import open_regular, read_regular
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.checkpoint import COMPANION_FILES
from trt_kvcache.checkpoint.json_file import MAX_JSON_NBYTES
from trt_kvcache.checkpoint.model_files import ModelFiles
from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.config_reader import read_config
from trt_kvcache.engine_folder.decoder_segments import decoder_constants
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.errors import CheckpointError, ConfigError, EngineError

PLAN_FILE = "engine.plan"
CONFIG_FILE = "config.json"
CONSTANTS_FILE = "constants.safetensors"
CHECKPOINT_FOLDER = "checkpoint"
ADAPTER_FOLDER = "adapter"
DRAFT_HEAD_FOLDER = "draft_head"

_FOLDERS = (CHECKPOINT_FOLDER, ADAPTER_FOLDER, DRAFT_HEAD_FOLDER)
_KNOWN_ENTRIES = frozenset({PLAN_FILE, CONFIG_FILE, CONSTANTS_FILE, *_FOLDERS, *COMPANION_FILES})


def is_engine_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has an ``engine.plan``."""
    return (Path(path) / PLAN_FILE).is_file()


@dataclass(frozen=True)
class EngineFolder:
    """An engine folder that was read and checked. Made by :meth:`open`."""

    path: Path
    config: EngineFolderConfig

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EngineFolder:
        """Read and check a folder. Needs neither TensorRT nor a GPU, and does not read the plan."""
        folder = Path(path)
        if not folder.is_dir():
            raise EngineError(f"{folder}: expected an engine folder, got {'a file' if folder.exists() else 'nothing there'}.")
        for name in (PLAN_FILE, CONFIG_FILE):
            if not (folder / name).is_file():
                raise EngineError(f"{folder}: expected an engine folder, but it has no {name}. `trt-kvcache build` makes one.")
        config_path = folder / CONFIG_FILE
        try:
            data = parse_json(read_regular(config_path, MAX_JSON_NBYTES))
        except (OSError, JSONTextError) as error:
            raise EngineError(f"{config_path}: cannot be read as JSON: {error}.") from error
        if not isinstance(data, dict):
            raise EngineError(f"{config_path}: expected a JSON object, got {type(data).__name__}.")
        try:
            config = read_config(data)
        except EngineError as error:
            raise EngineError(f"{config_path}: {error}") from error
        files = {PLAN_FILE: config.plan} | ({} if config.segments is None else {CONSTANTS_FILE: config.segments.constants})
        for name, record in files.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if found != record.nbytes:
                raise EngineError(f"{folder / name}: expected {record.nbytes} bytes as {CONFIG_FILE} records, got {found}. Build it again.")
        return cls(folder, config)

    @property
    def plan_path(self) -> Path:
        """The file of the serialised engine."""
        return self.path / PLAN_FILE

    @property
    def checkpoint_path(self) -> Path:
        """The folder of the embedded checkpoint, which exists only if the checkpoint was embedded."""
        return self.path / CHECKPOINT_FOLDER

    def read_plan(self) -> mmap.mmap:
        """Return a read-only memory map of the serialised engine, after comparing it with its recorded hash."""
        return _read_file(self.plan_path, self.config.plan)

    def read_constants(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the constants of an engine in segments as read-only arrays, after comparing them with their recorded hash."""
        assert self.config.segments is not None
        path = self.path / CONSTANTS_FILE
        _read_file(path, self.config.segments.constants).close()
        file, constants = SafetensorsFile(path), {}
        for spec in decoder_constants(self.config.model, self.config.cache, dtype=self.config.dtype):
            stored = file.tensors.get(spec.name)
            if stored is None or (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
                raise EngineError(f"{path}: expected `{spec.name}` {spec.dtype} {spec.shape}, got {stored}. Build it again.")
            constants[spec.name] = file.array(spec.name)
        return constants

    def find_checkpoint(self) -> Path | None:
        """Return the folder of the checkpoint: the embedded copy, else the original, or None if that is gone too."""
        return _first_of(self.checkpoint_path, Path(self.config.checkpoint.path))

    def find_adapter(self) -> Path | None:
        """Return the folder of the merged adapter: the embedded copy, else the original, or None if that is gone or none was merged."""
        recorded = self.config.checkpoint.adapter
        places = (self.path / ADAPTER_FOLDER, Path(recorded)) if recorded else ()
        return _first_of(*places)

    @property
    def has_checkpoint(self) -> bool:
        """True if the checkpoint, and the adapter that was merged into it, still exist."""
        return self.find_checkpoint() is not None and (not self.config.checkpoint.adapter or self.find_adapter() is not None)

    def open_checkpoint(self, progress: Callable[[int, int], object] | None = None) -> Checkpoint:
        """Open the checkpoint of the build: the embedded copy, else the original. ``progress(done_bytes, total_bytes)`` while hashing."""
        record, found_at = self.config.checkpoint, self.find_checkpoint()
        if found_at is None:
            raise CheckpointError(
                f"{self.path}: the checkpoint of this engine is gone: it is neither at {record.path}, where it was at the build, "
                f"nor at {self.checkpoint_path}. Put it back, or build with embed_weights=True."
            )
        adapter = self.find_adapter()
        if record.adapter and adapter is None:
            raise CheckpointError(
                f"{self.path}: the adapter of this engine is gone: it is not at {record.adapter}, where it was at the build. "
                "Put it back, or build with embed_weights=True."
            )
        checkpoint = Checkpoint.open(found_at, quantize=record.quantize or None, adapter=adapter)
        try:
            if checkpoint.adapter is not None and checkpoint.adapter.fingerprint() != record.adapter_fingerprint:
                raise CheckpointError(f"{adapter}: this adapter was changed since engine {self.path} was built with it. Build it again.")
            found = checkpoint.fingerprint(progress)
            if found != record.fingerprint:
                raise CheckpointError(
                    f"{found_at}: this checkpoint was changed since engine {self.path} was built from it (fingerprint {found[:12]}..., "
                    f"recorded {record.fingerprint[:12]}...). Build the engine again."
                )
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint


def _first_of(*places: Path) -> Path | None:
    """Return the first path that exists. One that no system takes, of a damaged file, does not: ``Path.exists`` would raise."""
    return next((place for place in places if os.path.exists(place)), None)


def _read_file(path: Path, record: FileRecord) -> mmap.mmap:
    """Return a file as a read-only memory map, after comparing it with its recorded hash. Raises EngineError."""
    try:
        with open_regular(path) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError, MemoryError) as error:  # a file may be empty, or larger than an address space
        raise EngineError(f"{path}: cannot be read: {error}.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != record.sha256:
        content.close()
        raise EngineError(
            f"{path}: it was changed since the build (SHA-256 {found[:12]}..., recorded {record.sha256[:12]}...). Build it again."
        )
    return content


@dataclass(frozen=True, kw_only=True)
class EngineFiles:
    """An engine that is written into an engine folder, and its open checkpoint."""

    config: EngineFolderConfig
    plans: Sequence[Any]  # buffers
    checkpoint: Checkpoint
    constants: Sequence[Any] | None = None  # buffers, of an engine in segments


def check_target(engine_path: Path, model_path: Path, adapter_path: Path | None = None) -> None:
    """Check that an engine folder can be made, before the build. A symbolic link is followed."""
    place = Path(os.path.realpath(engine_path))
    if place.is_symlink():
        raise ConfigError(f"engine path {engine_path}: expected a folder to make or an engine folder to replace, got a link to itself.")
    if engine_path.exists() and not engine_path.is_dir():
        raise ConfigError(f"engine path {engine_path}: expected a folder to make or an engine folder to replace, got a file.")
    if engine_path.is_dir():
        entries = {entry.name for entry in engine_path.iterdir()}
        other = sorted(entries if PLAN_FILE not in entries else entries - _KNOWN_ENTRIES)
        if other:
            raise ConfigError(
                f"engine path {engine_path}: expected a folder to make or an engine folder to replace, but it holds {', '.join(other[:3])}"
                f"{', ...' if len(other) > 3 else ''}. Choose another path."
            )
        for what, source in {"model": model_path, "adapter": adapter_path}.items():
            if source is not None and place in (source.resolve(), *source.resolve().parents):
                raise ConfigError(f"engine path {engine_path}: the {what} {source} is in it and would be replaced. Choose another path.")
    parent = next(folder for folder in place.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"engine path {engine_path}: nothing can be written to {parent}. Choose another path.")


def write_engine_folder(
    target: Path,
    *,
    config: EngineFolderConfig,
    plans: Sequence[Any],
    checkpoint: Checkpoint,
    constants: Sequence[Any] | None = None,
    draft_head: EngineFiles | None = None,
) -> EngineFolder:
    """Write an engine folder, which appears complete or not at all. A folder of this name is replaced."""
    with atomic_folder(target) as folder:
        of_model = ModelFiles(checkpoint.path)
        for name in COMPANION_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
            elif of_model.has(name):  # in the metadata of a GGUF file
                (folder / name).write_bytes(of_model.text(name).encode())
        if config.checkpoint.embedded:
            # An MTP head is in the folder of the model, maybe in files of its own.
            has_mtp_head = draft_head is not None and draft_head.checkpoint.path == checkpoint.path
            _copy((*checkpoint.files, *(draft_head.checkpoint.files if draft_head and has_mtp_head else ())), folder / CHECKPOINT_FOLDER)
            if checkpoint.adapter is not None:
                _copy(checkpoint.adapter.files, folder / ADAPTER_FOLDER)
        if draft_head is not None:
            (folder / DRAFT_HEAD_FOLDER).mkdir()
            if draft_head.config.checkpoint.embedded:
                _copy(draft_head.checkpoint.files, folder / DRAFT_HEAD_FOLDER / CHECKPOINT_FOLDER)
            _write_engine(folder / DRAFT_HEAD_FOLDER, draft_head)
        _write_engine(folder, EngineFiles(config=config, plans=plans, checkpoint=checkpoint, constants=constants))
    return EngineFolder(target, config)


def _write_engine(folder: Path, files: EngineFiles) -> None:
    """Write plans, constants and the configuration."""
    for name, chunks in ((PLAN_FILE, files.plans), (CONSTANTS_FILE, files.constants)):
        if chunks is not None:
            with (folder / name).open("wb") as file:
                for chunk in chunks:
                    file.write(memoryview(chunk))
    text = json.dumps(files.config.to_dict(), indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _copy(paths: Sequence[Path], folder: Path) -> None:
    """Copy files into a folder, which is made, each once."""
    folder.mkdir()
    for path in dict.fromkeys(paths):
        shutil.copyfile(path, folder / path.name)
