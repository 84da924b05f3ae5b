"""Sampling: a token for each row of logits, with the parameters of that row."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.layer_views import check_memory, check_open
from trt_kvcache.kernels.sampling_rows import ROW_PARAMS, ROW_RESULT, SamplingRows
from trt_kvcache.kernels.sampling_workspace import SamplingWorkspace
from trt_kvcache.memory.tensor import DeviceTensor


def _check(name: str, tensor: DeviceTensor, shape: tuple[int, ...], dtype: str, like: DeviceTensor) -> None:
    if not isinstance(tensor, DeviceTensor):
        raise PlaceError(f"{name}: expected a DeviceTensor, got {type(tensor).__name__}.")
    check_memory(name, tensor, like.memory)
    check_open(name, tensor)
    if tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {tensor.dtype}.")
    if tensor.shape != shape or not tensor.is_contiguous or tensor.offset % itemsize(dtype):
        raise ShapeError(f"{name}: expected a dense tensor of shape {shape}, got {tensor!r}.")


def choose_tokens(logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, *, workspace: SamplingWorkspace, stream: Any) -> None:
    """Choose a token for each row of logits, and advance the rows.

    Parameters
    ----------
    logits : DeviceTensor (B, vocab) float32
        As the model gave them. Rows may be strided. Not changed.
    rows : SamplingRows
        Parameters of the B rows. Counters advance, ``uses`` counts the tokens, ``results`` has the token or the error of each active row.
    tokens : DeviceTensor (B,) int32
        The tokens; -1 for a row with an error. Rows that are not active keep theirs.
    workspace : SamplingWorkspace
        Large enough for these rows. Calls that share one must not run at the same time.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph: a replay chooses the next tokens.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    :mod:`trt_kvcache.kernels.host.token_weights` defines which token is chosen; host and device choose the same.
    """
    if not isinstance(logits, DeviceTensor):
        raise PlaceError(f"logits: expected a DeviceTensor, got {type(logits).__name__}.")
    check_open("logits", logits)
    if logits.dtype != "float32":
        raise DTypeError(f"logits: expected float32, got {logits.dtype}.")
    if logits.ndim != 2 or not all(logits.shape):
        raise ShapeError(f"logits: expected [B, vocab], got {logits!r}.")
    if logits.strides[1] != 1 or logits.offset % itemsize("float32"):
        raise LayoutError(f"logits: expected dense rows, got {logits!r}.")
    batch, vocab_size = logits.shape
    _check("tokens", tokens, (batch,), "int32", logits)
    _check("rows.params", rows.params, (batch, ROW_PARAMS.itemsize), "uint8", logits)
    _check("rows.results", rows.results, (batch, ROW_RESULT.itemsize), "uint8", logits)
    if rows.uses is not None:
        _check("rows.uses", rows.uses, (batch, vocab_size), "int32", logits)
    if rows.bias is not None:
        _check("rows.bias", rows.bias, (batch, vocab_size), "float32", logits)
    check_memory("workspace", workspace.meeting, logits.memory)
    check_open("workspace", workspace.meeting)
    if batch > workspace.rows or vocab_size > workspace.vocab_size:
        raise ShapeError(f"workspace: expected one for [{batch}, {vocab_size}], got one for [{workspace.rows}, {workspace.vocab_size}].")
    logits.memory.check_stream(stream)
    backend_of(logits.memory).choose_tokens(logits, rows, tokens, workspace, stream)
