"""``SessionSource``: a session to be opened later, from an engine folder or a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trt_kvcache._util.progress import Progress
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.session.model_location import locate_adapter, locate_model
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_options import SessionOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trt_kvcache.session.session_options import ModelOptions


@dataclass(frozen=True, init=False)
class SessionSource:
    """A model or engine folder with options. Each call opens a new session, which the caller closes.

    Parameters
    ----------
    folder : path or str
        A folder with ``engine.plan`` is an engine folder, any other a Hugging Face folder. A text ``organisation/name`` that is no folder
        is a model of the Hugging Face Hub, downloaded when a session is opened.
    **options
        Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`.

    Raises
    ------
    ConfigError, RangeError
        An option is out of range.

    Examples
    --------
    >>> from trt_kvcache import SessionSource
    >>> source = SessionSource("examples/tiny-llama", engine="numpy", max_batch_size=2)
    >>> with source() as session:
    ...     session.prefill([[5, 6, 7]]).shape
    (1, 320)
    """

    folder: str | os.PathLike[str]
    options: SessionOptions

    def __init__(self, folder: str | os.PathLike[str], **options: Unpack[ModelOptions]) -> None:
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "options", SessionOptions.of(options))

    def replace(self, folder: str | os.PathLike[str] | None = None, **options: Unpack[ModelOptions]) -> SessionSource:
        """Return a source with another folder, if one is given, and some options replaced.

        Parameters
        ----------
        folder : path, optional
            An engine folder or a Hugging Face folder. The same folder if left out.
        **options
            Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`. Those that are left out stay as they are.

        Returns
        -------
        SessionSource
            A new one; this one is not changed.

        Raises
        ------
        ConfigError, RangeError
            An option is out of range.
        """
        return SessionSource(self.folder if folder is None else folder, **{**vars(self.options), **options})

    def __call__(self, progress: Progress | None = None) -> InferenceSession:
        """Open a session."""
        folder = locate_model(self.folder)
        given = {name: value for name, value in vars(self.options).items() if value is not None}
        if self.options.adapter is not None:
            given["adapter"] = locate_adapter(self.options.adapter)
        if self.options.adapters is not None:
            given["adapters"] = {name: locate_adapter(adapter) for name, adapter in self.options.adapters.items()}
        if is_engine_folder(folder):
            return InferenceSession.open(folder, progress=progress, **given)
        return InferenceSession.from_model(folder, progress=progress, **given)
