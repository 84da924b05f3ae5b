"""Polygraphy loaders of sessions, engine folders and networks.

Each loader has a function in ``snake_case`` that loads immediately, as Polygraphy's own loaders do. Errors are ``PolygraphyException``,
and warnings go through ``G_LOGGER``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polygraphy import util
from polygraphy.backend.base import BaseLoader

from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.polygraphy.failures import as_polygraphy
from trt_kvcache.polygraphy.network_script import NetworkScript
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_source import SessionSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trt_kvcache.builder.options import BuildKeywords
    from trt_kvcache.session.session_options import ModelOptions

StrPath = str | os.PathLike[str]


class SessionFromFolder(BaseLoader):  # type: ignore[misc]  # polygraphy has no types
    """Opens a session. A runner may be given one: it opens a session at each activation, and closes it.

    Parameters
    ----------
    folder : path
        A Hugging Face folder, an engine folder, or an id of the Hugging Face Hub.
    **options
        Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`.

    Examples
    --------
    >>> from trt_kvcache.polygraphy import SessionFromFolder, SessionRunner, make_feed
    >>> load_session = SessionFromFolder("examples/tiny-llama", engine="numpy", max_batch_size=2)
    >>> with SessionRunner(load_session) as runner:
    ...     outputs = runner.infer(make_feed([[5, 6, 7], [8]], reset=True))
    >>> outputs["logits"].shape
    (2, 320)
    """

    def __init__(self, folder: StrPath, **options: Unpack[ModelOptions]) -> None:
        self._folder = folder
        self._options = options

    @util.check_called_by("__call__")  # type: ignore[untyped-decorator]
    def call_impl(self) -> InferenceSession:
        """Open the session.

        Returns
        -------
        InferenceSession
            The session; the caller closes it.

        Raises
        ------
        PolygraphyException
            The folder or an option is not valid, or the engine cannot run.
        """
        with as_polygraphy():
            return SessionSource(locate_model(self._folder), **self._options)()


class EngineFolderFromModel(BaseLoader):  # type: ignore[misc]
    """Builds an engine folder from a Hugging Face folder.

    Parameters
    ----------
    model : path or callable
        The folder, or a loader that returns one.
    engine : path
        The engine folder to make.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`.

    Examples
    --------
    >>> from trt_kvcache.polygraphy import EngineFolderFromModel
    >>> build = EngineFolderFromModel("examples/tiny-llama", "tiny-engine", flavour="tensorrt_rtx")
    >>> folder = build()  # doctest: +SKIP
    """

    def __init__(self, model: Any, engine: StrPath, **options: Unpack[BuildKeywords]) -> None:
        self._model = model
        self._engine = engine
        self._options = options

    @util.check_called_by("__call__")  # type: ignore[untyped-decorator]
    def call_impl(self) -> Path:
        """Build the engine.

        Returns
        -------
        Path
            The engine folder.

        Raises
        ------
        PolygraphyException
            The model or an option is not valid, or TensorRT refused something.
        """
        model, _ = util.invoke_if_callable(self._model)
        with as_polygraphy():
            return build_engine(locate_model(model), self._engine, **self._options).path


class NetworkFromModel(BaseLoader):  # type: ignore[misc]
    """Defines the TensorRT network of a Hugging Face folder, for Polygraphy's ``CreateConfig`` and ``EngineBytesFromNetwork``.

    Parameters
    ----------
    model : path or callable
        The folder, or a loader that returns one.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`, as for :class:`~trt_kvcache.polygraphy.network_script.NetworkScript`.

    Examples
    --------
    >>> from trt_kvcache.polygraphy import NetworkFromModel
    >>> load_network = NetworkFromModel("examples/tiny-llama", max_batch_size=2, max_sequence_length=64, max_prefill_length=16)
    >>> builder, network = load_network()  # doctest: +SKIP
    """

    def __init__(self, model: Any, **options: Unpack[BuildKeywords]) -> None:
        self._model = model
        self._options = options

    @util.check_called_by("__call__")  # type: ignore[untyped-decorator]
    def call_impl(self) -> tuple[Any, Any]:
        """Define the network.

        Returns
        -------
        builder : IBuilder
            The builder that owns the network.
        network : INetworkDefinition
            The decoder.

        Raises
        ------
        PolygraphyException
            The model or an option is not valid, or TensorRT refused something.
        """
        model, _ = util.invoke_if_callable(self._model)
        with as_polygraphy():
            return NetworkScript(locate_model(model), **self._options).load_network()


def session_from_folder(folder: StrPath, **options: Unpack[ModelOptions]) -> InferenceSession:
    """Open a session at once: :class:`SessionFromFolder`.

    Parameters
    ----------
    folder : path
        A Hugging Face folder, an engine folder, or an id of the Hugging Face Hub.
    **options
        Fields of :class:`~trt_kvcache.session.session_options.SessionOptions`.

    Returns
    -------
    InferenceSession
        The session; the caller closes it.

    Raises
    ------
    PolygraphyException
        The folder or an option is not valid, or the engine cannot run.

    Examples
    --------
    >>> from trt_kvcache.polygraphy import session_from_folder
    >>> with session_from_folder("examples/tiny-llama", engine="numpy") as session:
    ...     session.vocab_size
    320
    """
    session: InferenceSession = SessionFromFolder(folder, **options)()
    return session


def engine_folder_from_model(model: Any, engine: StrPath, **options: Unpack[BuildKeywords]) -> Path:
    """Build an engine folder at once: :class:`EngineFolderFromModel`.

    Parameters
    ----------
    model : path or callable
        A Hugging Face folder, or a loader that returns one.
    engine : path
        The engine folder to make.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`.

    Returns
    -------
    Path
        The engine folder.

    Raises
    ------
    PolygraphyException
        The model or an option is not valid, or TensorRT refused something.

    Examples
    --------
    >>> from trt_kvcache.polygraphy import engine_folder_from_model
    >>> folder = engine_folder_from_model("examples/tiny-llama", "tiny-engine", flavour="tensorrt_rtx")  # doctest: +SKIP
    """
    folder: Path = EngineFolderFromModel(model, engine, **options)()
    return folder


def network_from_model(model: Any, **options: Unpack[BuildKeywords]) -> tuple[Any, Any]:
    """Define the network of a Hugging Face folder at once: :class:`NetworkFromModel`.

    Parameters
    ----------
    model : path or callable
        A Hugging Face folder, or a loader that returns one.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`, as for :class:`~trt_kvcache.polygraphy.network_script.NetworkScript`.

    Returns
    -------
    builder : IBuilder
        The builder that owns the network.
    network : INetworkDefinition
        The decoder.

    Raises
    ------
    PolygraphyException
        The model or an option is not valid, or TensorRT refused something.

    Examples
    --------
    >>> from trt_kvcache.polygraphy import network_from_model
    >>> sizes = {"max_batch_size": 2, "max_sequence_length": 64, "max_prefill_length": 16}
    >>> builder, network = network_from_model("examples/tiny-llama", **sizes)  # doctest: +SKIP
    """
    made: tuple[Any, Any] = NetworkFromModel(model, **options)()
    return made
