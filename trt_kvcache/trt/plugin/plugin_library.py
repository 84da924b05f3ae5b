"""Plugin libraries: shared libraries that TensorRT loads, with creators of this package's plugins in place of those in Python.

A library stays loaded until the process ends. ``deregister_library`` is never called: with it TensorRT for RTX would unload the
library, but keep the creators in it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.errors import ConfigError
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import PLUGIN_ABIS, PLUGIN_NAME, PLUGIN_NAMESPACE

#: Functions that TensorRT looks up in a plugin library.
_FUNCTIONS = ("getCreators", "setLoggerFinder")

#: The symbol of TensorRT that a library needs to register its plugins itself.
_REGISTRY = b"\0getPluginRegistry\0"

_HINT = "`make plugin-library` builds one: see docs/plugin-library.md."

#: Libraries whose creators are registered, by TensorRT and version of the plugin.
_LIBRARIES: dict[tuple[TensorRT, str], tuple[Path, FileRecord]] = {}


def check_library_file(path: Path) -> None:
    """Check that a plugin library is there, before anything else of a build."""
    if not path.is_file():
        raise ConfigError(f"plugin_library: expected the file of a plugin library, got {path}, which is none. {_HINT}")


def use_library(tensorrt: TensorRT, path: Path, version: str) -> FileRecord:
    """Register the creators of a library in place of those in Python, for the rest of this process; it must have a version of the plugin.

    Returns the record of its file.
    """
    check_library_file(path)
    library = (path.resolve(), FileRecord.of([path.read_bytes()]))
    used = _LIBRARIES.get((tensorrt, version))
    if used is None:
        _load(tensorrt, *library)
        used = _LIBRARIES.get((tensorrt, version))
    if used is None:
        versions = [known for (_, known), found in _LIBRARIES.items() if found == library]
        got = f"version {', '.join(versions)}" if versions else "no version of it"
        raise ConfigError(
            f"plugin_library: expected {PLUGIN_NAME} version {version} (namespace {PLUGIN_NAMESPACE}) in {path}, got {got}. {_HINT}"
        )
    if used != library:
        raise ConfigError(
            f"plugin_library: expected {used[0]} as it was when this process loaded it, got {path}: a plugin has one creator. "
            "Build in another process."
        )
    return library[1]


def creator_of_library(tensorrt: TensorRT, version: str) -> Any:
    """Return the creator that a library has registered for a version of the plugin, or None."""
    return _creator(tensorrt, version) if (tensorrt, version) in _LIBRARIES else None


def _creator(tensorrt: TensorRT, version: str) -> Any:
    return tensorrt.module.get_plugin_registry().get_creator(PLUGIN_NAME, version, PLUGIN_NAMESPACE)


def _load(tensorrt: TensorRT, path: Path, record: FileRecord) -> None:
    """Load a library. If it fails, or for versions that it lacks, the creators of before are registered."""
    registry = tensorrt.module.get_plugin_registry()
    before = {version: creator for version in PLUGIN_ABIS if (creator := _creator(tensorrt, version)) is not None}
    for creator in before.values():
        registry.deregister_creator(creator)
    try:
        _check_library(path)
        with tensorrt.log.collect() as messages:
            if registry.load_library(str(path)) is None:
                messages.fail(
                    ConfigError, f"plugin_library: expected plugins that are not registered yet, {tensorrt} refused to load {path}"
                )
        _LIBRARIES.update({(tensorrt, version): (path, record) for version in PLUGIN_ABIS if _creator(tensorrt, version) is not None})
    finally:
        for version, creator in before.items():
            if _creator(tensorrt, version) is None:
                registry.register_creator(creator, PLUGIN_NAMESPACE)


def _check_library(path: Path) -> None:
    """Check that a file is a plugin library whose plugins TensorRT registers: TensorRT says nothing about one that it refuses."""
    if _REGISTRY in path.read_bytes():  # opened already, it would register nothing more, and look like one that does not
        raise ConfigError(
            f"plugin_library: expected a library whose plugins TensorRT registers, got {path}, which registers them itself. Give "
            "libtrt_kvcache_plugins.so."
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"plugin_library: expected a shared library for this machine, got {path}: {error}.") from None
    missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
    if missing:
        raise ConfigError(f"plugin_library: expected a library with {' and '.join(_FUNCTIONS)}, {path} has no {missing[0]}. {_HINT}")
