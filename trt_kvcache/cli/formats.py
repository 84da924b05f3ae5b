"""Names of quantized formats for people: of the weights of a folder, and of K and V."""

from pathlib import Path

from trt_kvcache.checkpoint.model_files import CONFIG_FILE, ModelFiles
from trt_kvcache.checkpoint.stored_format import stored_format
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import CheckpointError, ConfigError


def weights_format(folder: Path) -> str | None:
    """Return the format of quantized weights in a model folder, from ``config.json``. None if they are not quantized."""
    files = ModelFiles(folder)
    if is_engine_folder(folder) or not files.has(CONFIG_FILE):
        return None
    try:
        found = stored_format(files.json(CONFIG_FILE), folder)
    except ConfigError as error:
        raise CheckpointError(f"{files.source(CONFIG_FILE)}: {error}") from error
    return None if found is None else found.title


def kv_format(dtype: str, scales: str | None) -> str:
    """Return the format of K and V; ``scales`` is None if they are not quantized."""
    if scales is None:
        return dtype
    return f"{dtype}, {'scales by token' if scales == 'token' else f'static scales by {scales}'}"
