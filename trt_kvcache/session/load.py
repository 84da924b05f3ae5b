"""``load``: a session from a folder, a file or a Hugging Face Hub id of a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trt_kvcache._util.progress import Progress
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_options import takes_session_options
from trt_kvcache.session.session_source import SessionSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trt_kvcache.session.session_options import ModelOptions


@takes_session_options
def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[ModelOptions],
) -> InferenceSession:
    """Open a model: a Hugging Face folder, a GGUF file, an engine folder, or a model of the Hugging Face Hub.

    Parameters
    ----------
    path_or_hub_id : path or str
        A folder, a ``.gguf`` file, or an id ``organisation/name`` of the Hub. A folder of that name takes precedence; the network is not
        used then.
    **options
        Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`.
    revision : str, optional
        Branch, tag or commit on the Hub; for a Hub id only.
    progress : callable, optional
        Called as ``progress(stage, fraction)`` during long work, except for the download, which has a bar of its own.

    Returns
    -------
    InferenceSession
        Close it, or use it in a ``with`` block.

    Raises
    ------
    CheckpointError
        There is no such folder, and the Hub has no such model or cannot be reached; or the model is damaged or not supported.
    ConfigError
        An option is out of range, or fixed by the build of an engine folder.
    BuildError, EngineError, CudaError
        An engine cannot be built or run.

    Warns
    -----
    EngineFallbackWarning
        ``engine="auto"`` falls back to PyTorch or the NumPy reference engine.

    Notes
    -----
    The files of a Hub model are downloaded once, into the cache of ``huggingface_hub`` (``HF_HOME``). Files that are in the cache are used
    without a network. With ``HF_HUB_OFFLINE=1`` nothing is downloaded.

    Examples
    --------
    >>> import trt_kvcache
    >>> with trt_kvcache.load("examples/tiny-llama", engine="numpy") as session:
    ...     session.generate("Alice was", max_new_tokens=4).text
    ' beginn'
    """
    return SessionSource(locate_model(path_or_hub_id, revision=revision), **options)(progress)
