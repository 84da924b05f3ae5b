"""What commands say of quantized weights, which they do not read."""

from pathlib import Path

from trt_kvcache.checkpoint.model_files import CONFIG_FILE, ModelFiles
from trt_kvcache.checkpoint.stored_format import stored_format
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import CheckpointError, ConfigError


def weights_format(folder: Path) -> str | None:
    """Return how the weights of a model folder are quantized, or None if they are not, or if it is an engine folder."""
    files = ModelFiles(folder)
    if is_engine_folder(folder) or not files.has(CONFIG_FILE):
        return None
    try:
        found = stored_format(files.json(CONFIG_FILE), folder)
    except ConfigError as error:
        raise CheckpointError(f"{files.source(CONFIG_FILE)}: {error}") from error
    return None if found is None else found.title
