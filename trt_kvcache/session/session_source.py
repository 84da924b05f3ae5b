"""``SessionSource``: a session to be opened later, from an engine folder or from a Hugging Face folder."""

import os
from dataclasses import dataclass
from typing import Any

from trt_kvcache.builder.build_engine import Progress
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.open_model import EngineChoice
from trt_kvcache.session.session import InferenceSession

_COMMON_OPTIONS = ("engine", "flavour", "device", "prompt_cache_bytes", "cuda_graphs")

#: Options that an engine folder has settled.
_MODEL_OPTIONS = ("max_batch_size", "max_sequence_length", "max_prefill_length", "dtype", "attention")


@dataclass(frozen=True)
class SessionSource:
    """Where a session comes from. Each call opens a new one, which the caller closes.

    Parameters
    ----------
    folder : path
        A folder with ``engine.plan`` is an engine folder, any other a Hugging Face folder.
    engine, flavour, device, prompt_cache_bytes, cuda_graphs
        See ``InferenceSession.open``.
    max_batch_size, max_sequence_length, max_prefill_length, dtype, attention : optional
        See ``InferenceSession.from_model``. For a Hugging Face folder only.
    """

    folder: str | os.PathLike[str]
    engine: EngineChoice = "auto"
    max_batch_size: int | None = None
    max_sequence_length: int | None = None
    max_prefill_length: int | None = None
    dtype: str | None = None
    attention: str | None = None
    flavour: str = "auto"
    device: int = 0
    prompt_cache_bytes: int = 0
    cuda_graphs: bool = True

    def __call__(self, progress: Progress | None = None) -> InferenceSession:
        """Open a session.

        Parameters
        ----------
        progress : callable, optional
            Called as ``progress(stage, fraction)`` during long work.

        Raises
        ------
        ConfigError
            Options that an engine folder has settled were given with one.
        ConfigError, CheckpointError, BuildError, EngineError, CudaError
            As ``InferenceSession.open`` and ``from_model``.
        """
        given = {name: getattr(self, name) for name in _MODEL_OPTIONS if getattr(self, name) is not None}
        common: dict[str, Any] = {name: getattr(self, name) for name in _COMMON_OPTIONS} | {"progress": progress}
        folder = os.fspath(self.folder)
        if not is_engine_folder(folder):
            return InferenceSession.from_model(folder, **common, **given)
        if given:
            raise ConfigError(
                f"{', '.join(given)}: expected with a Hugging Face folder only; {folder} is an engine folder, built with its own."
            )
        return InferenceSession.open(folder, **common)
