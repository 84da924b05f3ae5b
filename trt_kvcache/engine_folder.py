"""``EngineFolder``: an engine on disk, with all that is needed to run it.

    engine.plan          what TensorRT deserialises
    config.json          EngineConfig
    tokenizer.json ...   what the checkpoint had beside its weights
    checkpoint/          a copy of the checkpoint, only if it was embedded

It appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.checkpoint import COMPANION_FILES
from trt_kvcache.engine_config import EngineConfig
from trt_kvcache.errors import CheckpointError, ConfigError, EngineError
from trt_kvcache.new_folder import new_folder

PLAN_FILE = "engine.plan"
CONFIG_FILE = "config.json"
CHECKPOINT_FOLDER = "checkpoint"

_KNOWN_ENTRIES = frozenset({PLAN_FILE, CONFIG_FILE, CHECKPOINT_FOLDER, *COMPANION_FILES})


def is_engine_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds an engine: one with an ``engine.plan``."""
    return (Path(path) / PLAN_FILE).is_file()


@dataclass(frozen=True)
class EngineFolder:
    """An engine folder that was read and checked; made by :meth:`open`.

    Parameters
    ----------
    path : Path
    config : EngineConfig
    """

    path: Path
    config: EngineConfig

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EngineFolder:
        """Read and check a folder. Needs neither TensorRT nor a GPU, and does not read the plan.

        Raises
        ------
        EngineError
            A file is missing or is not JSON, the format is newer than this package, the configuration disagrees with itself,
            or the plan has another size than recorded.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise EngineError(f"{folder}: expected an engine folder, got {'a file' if folder.exists() else 'nothing there'}.")
        for name in (PLAN_FILE, CONFIG_FILE):
            if not (folder / name).is_file():
                raise EngineError(f"{folder}: expected an engine folder, but it has no {name}. `trt-kvcache build` makes one.")
        config_path = folder / CONFIG_FILE
        try:
            data = json.loads(config_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"{config_path}: cannot be read as JSON: {error}.") from error
        if not isinstance(data, dict):
            raise EngineError(f"{config_path}: expected a JSON object, got {type(data).__name__}.")
        try:
            config = EngineConfig.from_dict(data)
        except EngineError as error:
            raise EngineError(f"{config_path}: {error}") from error
        found = (folder / PLAN_FILE).stat().st_size
        if found != config.plan.nbytes:
            raise EngineError(f"{folder / PLAN_FILE}: expected {config.plan.nbytes} bytes by {CONFIG_FILE}, got {found}. Build it anew.")
        return cls(folder, config)

    @property
    def plan_path(self) -> Path:
        """The serialised engine."""
        return self.path / PLAN_FILE

    @property
    def checkpoint_path(self) -> Path:
        """Where an embedded checkpoint is."""
        return self.path / CHECKPOINT_FOLDER

    def read_plan(self) -> mmap.mmap:
        """Return the serialised engine as a read-only memory map, after comparing it with its recorded hash.

        Raises
        ------
        EngineError
            It was changed since the build.
        """
        with self.plan_path.open("rb") as file:
            plan = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = hashlib.sha256(plan).hexdigest()
        if found != self.config.plan.sha256:
            plan.close()
            raise EngineError(
                f"{self.plan_path}: it was changed since the build (SHA-256 {found[:12]}..., recorded {self.config.plan.sha256[:12]}...). "
                "Build it anew."
            )
        return plan

    def open_checkpoint(self, progress: Callable[[int, int], object] | None = None) -> Checkpoint:
        """Open the checkpoint that the engine was built from: the copy in the folder if there is one, else where it was.

        Parameters
        ----------
        progress : callable, optional
            Called as ``progress(done_bytes, total_bytes)`` while the weights are hashed.

        Raises
        ------
        CheckpointError
            It is in neither place, is damaged, or is not the one that the engine was built from.
        """
        record = self.config.checkpoint
        places = (self.checkpoint_path, Path(record.path))
        place = next((place for place in places if place.is_dir()), None)
        if place is None:
            raise CheckpointError(
                f"{self.path}: the checkpoint of this engine is gone: it is neither at {places[1]}, where it was at the build, "
                f"nor at {places[0]}. Put it back, or build with embedded weights."
            )
        checkpoint = Checkpoint.open(place)
        try:
            found = checkpoint.fingerprint(progress)
            if found != record.fingerprint:
                raise CheckpointError(
                    f"{place}: this checkpoint was changed since engine {self.path} was built from it (fingerprint {found[:12]}..., "
                    f"recorded {record.fingerprint[:12]}...). Build the engine anew."
                )
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint


def check_target(engine_path: Path, model_path: Path) -> None:
    """Check that an engine folder can be made at ``engine_path``, before the work of building it.

    Raises
    ------
    ConfigError
        Something else is there, it would take the place of the model itself, or the place cannot be written to.
    """
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
        if engine_path.resolve() in (model_path.resolve(), *model_path.resolve().parents):
            raise ConfigError(f"engine path {engine_path}: the model {model_path} is in it and would be replaced. Choose another path.")
    parent = next(place for place in engine_path.absolute().parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"engine path {engine_path}: nothing can be written to {parent}. Choose another path.")


def write_engine_folder(target: Path, *, config: EngineConfig, plan: Any, checkpoint: Checkpoint) -> EngineFolder:
    """Write an engine folder, which appears complete or not at all; one that is there is replaced.

    Parameters
    ----------
    config : EngineConfig
        ``config.checkpoint.embedded`` says whether to copy the checkpoint.
    plan : buffer
        The serialised engine; written from where it lies.
    checkpoint : Checkpoint
        Where tokenizer files and embedded weights are copied from.
    """
    with new_folder(target) as folder:
        (folder / PLAN_FILE).write_bytes(memoryview(plan))
        for name in COMPANION_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
        if config.checkpoint.embedded:
            copy = folder / CHECKPOINT_FOLDER
            copy.mkdir()
            for file in checkpoint.files:
                shutil.copyfile(file, copy / file.name)
        text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    return EngineFolder(target, config)
