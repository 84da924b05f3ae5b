"""Sampling: a token for each row of logits, with the parameters of that row."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.layer_views import check_memory, check_open, check_place
from trt_kvcache.kernels.sampling_rows import ROW_PARAMS, ROW_RESULT, SamplingRows
from trt_kvcache.kernels.sampling_workspace import MAX_TOP_LOGPROBS, SamplingWorkspace
from trt_kvcache.memory.tensor import DeviceTensor


def _check(name: str, tensor: DeviceTensor, shape: tuple[int, ...], dtype: str, like: DeviceTensor) -> None:
    check_place(name, tensor, like)
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
        The tokens; 0 for a row with an error, so that an engine can run them before the host looks. Rows that are not active keep theirs.
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
    batch, vocab_size = _check_logits(logits, rows, workspace, stream)
    _check("tokens", tokens, (batch,), "int32", logits)
    if rows.uses is not None:
        _check("rows.uses", rows.uses, (batch, vocab_size), "int32", logits)
    if rows.bias is not None:
        _check("rows.bias", rows.bias, (batch, vocab_size), "float32", logits)
    if workspace.edited is None and (rows.uses is not None or rows.bias is not None):
        raise ShapeError("workspace: expected one with room for penalties and bias, got one without. Use edits=True.")
    backend_of(logits.memory).choose_tokens(logits, rows, tokens, workspace, stream)


def token_logprobs(logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, *, workspace: SamplingWorkspace, stream: Any) -> None:
    """Compute log-probabilities of the tokens that :func:`choose_tokens` chose, and of the most likely ones.

    Parameters
    ----------
    logits : DeviceTensor (B, vocab) float32
        As the model gave them. Rows may be strided. Not changed.
    rows : SamplingRows
        Of the call before. Only rows with the flag ``LOGPROBS``, and without an error, are looked at.
    out : DeviceTensor (B, 1 + 2 * top) int32
        For each of these rows: the log-probability of the token as the bits of a float32; ``top`` most likely tokens, the most likely
        first, of equally likely ones the lowest id first, and -1 where the vocabulary has no more; theirs, again as bits. At most 20.
    workspace : SamplingWorkspace
        That of the call before.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.
    """
    batch, _ = _check_logits(logits, rows, workspace, stream)
    words = out.shape[1] if isinstance(out, DeviceTensor) and out.ndim == 2 else 0
    if not 1 <= words <= 1 + 2 * MAX_TOP_LOGPROBS or words % 2 != 1:
        raise ShapeError(f"out: expected [{batch}, 1 + 2 * top] with top from 0 to {MAX_TOP_LOGPROBS}, got {out!r}.")
    _check("out", out, (batch, words), "int32", logits)
    backend_of(logits.memory).token_logprobs(logits, rows, out, workspace, stream)


def _check_logits(logits: DeviceTensor, rows: SamplingRows, workspace: SamplingWorkspace, stream: Any) -> tuple[int, int]:
    """Check what all calls have in common, and return the shape of the logits."""
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
    _check("rows.params", rows.params, (batch, ROW_PARAMS.itemsize), "uint8", logits)
    _check("rows.results", rows.results, (batch, ROW_RESULT.itemsize), "uint8", logits)
    check_memory("workspace", workspace.meeting, logits.memory)
    check_open("workspace", workspace.meeting)
    if batch > workspace.rows or vocab_size > workspace.vocab_size:
        raise ShapeError(f"workspace: expected one for [{batch}, {vocab_size}], got one for [{workspace.rows}, {workspace.vocab_size}].")
    logits.memory.check_stream(stream)
    return batch, vocab_size
