"""The options that say what is run and how, which several commands share, and the session they open."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trt_kvcache.cli.console import progress_bar
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.reference import Attention
from trt_kvcache.session.open_model import DEFAULT_MAX_SEQUENCE_LENGTH, EngineChoice
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_source import SessionSource

DTYPE_HELP = "float16, bfloat16 or float32: of weights, K and V. The checkpoint's if left out."
MAX_SEQUENCE_LENGTH_HELP = f"Tokens a slot can hold; the model's, at most {DEFAULT_MAX_SEQUENCE_LENGTH}, if left out."

_PANEL, _MODEL_PANEL = "Engine", "For a model folder (an engine folder has them from its build)"


DTypeName = Literal["float16", "bfloat16", "float32"]
FlavourName = Literal["auto", "tensorrt", "tensorrt_rtx"]

Folder = Annotated[
    Path, typer.Argument(metavar="ENGINE|MODEL", help="An engine folder (it has engine.plan), or a Hugging Face model folder.")
]
EngineOption = Annotated[
    EngineChoice,
    typer.Option(
        "--engine", help="auto takes TensorRT where a GPU is, else the NumPy reference engine, with a warning.", rich_help_panel=_PANEL
    ),
]
FlavourOption = Annotated[FlavourName, typer.Option("--flavour", help="Which TensorRT, where both are installed.", rich_help_panel=_PANEL)]
CudaGraphs = Annotated[bool, typer.Option(help="Decode steps of an engine in segments become CUDA graphs.", rich_help_panel=_PANEL)]
MaxBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Slots of the cache; one per prompt if left out.", rich_help_panel=_MODEL_PANEL)
]
MaxSequenceLength = Annotated[int | None, typer.Option(min=1, help=MAX_SEQUENCE_LENGTH_HELP, rich_help_panel=_MODEL_PANEL)]
DTypeOption = Annotated[DTypeName | None, typer.Option("--dtype", metavar="DTYPE", help=DTYPE_HELP, rich_help_panel=_MODEL_PANEL)]
AttentionOption = Annotated[
    Attention | None,
    typer.Option(
        "--attention",
        help="native if left out; mask reads no stale row (a defect of TensorRT 11.x); plugin is our own (head dims 64, 80, 96, 128, 256).",
        rich_help_panel=_MODEL_PANEL,
    ),
]


def session_source(given: dict[str, Any], *, slots: int, **instead: Any) -> SessionSource:
    """Return where the session of a command comes from.

    Parameters
    ----------
    given : dict
        The parameters of the command by name: those that a :class:`SessionSource` has are passed on.
    slots : int
        How many are needed: for a model folder without ``max_batch_size``.
    instead
        What holds in place of the parameters.
    """
    fields = SessionSource.__dataclass_fields__
    options = {name: value for name, value in given.items() if name in fields} | instead
    if not is_engine_folder(options["folder"]):
        options["max_batch_size"] = options.get("max_batch_size") or slots
    return SessionSource(**options)


def open_session(source: SessionSource) -> InferenceSession:
    """Open a session, with a progress bar for long work."""
    with progress_bar() as progress:
        return source(progress)
