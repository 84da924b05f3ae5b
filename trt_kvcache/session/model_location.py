"""Location of a model: a folder, or a repository of the Hugging Face Hub, which is downloaded into the Hub's cache."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trt_kvcache.checkpoint.adapters.lora_adapter import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from trt_kvcache.errors import CheckpointError, ConfigError

#: Files of a model repository that are downloaded. Weights in other formats, and copies of weights in subfolders, are left out.
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
UNNEEDED_FILES = ("*/*", "consolidated*")

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` replaced by the home folder."""
    return Path(os.path.expanduser(os.fspath(path)))


def locate_model(path_or_hub_id: str | os.PathLike[str], *, revision: str | None = None, files: Sequence[str] = NEEDED_FILES) -> Path:
    """Return the folder of a model or an engine; a model of the Hugging Face Hub is downloaded first.

    A folder called ``organisation/name`` takes precedence over the Hub, and then nothing uses the network.
    """
    path = expanded(path_or_hub_id)
    if path.exists():
        if revision is not None:
            raise ConfigError(f"revision: expected with an id of the Hugging Face Hub only; {path} is a folder here.")
        return path
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(
            f"{path}: expected a model folder, an engine folder, or an id of the Hugging Face Hub such as Qwen/Qwen3-0.6B, "
            "got nothing there."
        )
    return _download(path_or_hub_id, revision, files)


def locate_adapter(path_or_hub_id: str) -> str:
    """Return the folder of an adapter; one of the Hub is downloaded first. Any other text stays: opening it says what is wrong."""
    if expanded(path_or_hub_id).exists() or not _HUB_ID.fullmatch(path_or_hub_id):
        return path_or_hub_id
    return str(_download(path_or_hub_id, None, (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)))


def _download(hub_id: str, revision: str | None, files: Sequence[str]) -> Path:
    """Return the folder of a Hub model in the local cache, after what is missing of it was downloaded."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        text = f"{hub_id}: there is no such folder here. To load it from the Hugging Face Hub: pip install 'trt-kvcache[models]'."
        raise ConfigError(text) from None
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files), ignore_patterns=list(UNNEEDED_FILES)))
    except Exception as error:  # of the library, of the network libraries below it, of the file system
        raise CheckpointError(
            f"{hub_id}: expected a folder, or a model of the Hugging Face Hub. There is no folder {Path(hub_id).absolute()}, "
            f"and {_reason(error, revision)}"
        ) from error


def _reason(error: Exception, revision: str | None) -> str:
    """Say why a model of the Hub is not to be had."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "the model is gated on the Hub: accept the terms on its page there, and log in with `hf auth login`."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model has no revision {revision} on the Hub."
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hub has no such model, or it is private (`hf auth login`)."
    if constants.HF_HUB_OFFLINE:
        return "the model is not in the local cache of the Hub; HF_HUB_OFFLINE forbids to download it."
    if isinstance(error, (errors.LocalEntryNotFoundError, ConnectionError)):
        return "the model is not in the local cache of the Hub, which cannot be reached."
    first = next(iter(str(error).splitlines()), "")
    return f"the download failed: {type(error).__name__}: {first}"
