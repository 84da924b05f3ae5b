"""Sampling: a token for each row of logits, with the parameters of that row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels.attention_tiles import share_nbytes
from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.kernels.layer_views import check_memory, check_open, check_place
from trt_kvcache.kernels.most_likely import log_probabilities
from trt_kvcache.kernels.philox import random_bits
from trt_kvcache.kernels.sampling_rows import (
    ACTIVE,
    BAD_LOGITS,
    BIASED,
    GREEDY,
    IN_PROMPT,
    LOGPROBS,
    NO_ERROR,
    NOTHING_LEFT,
    PENALISED,
    ROW_PARAMS,
    ROW_RESULT,
    SamplingRows,
)
from trt_kvcache.kernels.sampling_workspace import BLOCKS_PER_SM, LOGPROBS_BLOCKS, MAX_BLOCKS_OF_ROW, SamplingWorkspace
from trt_kvcache.kernels.token_choice import ChoiceParams, choose_token
from trt_kvcache.memory.tensor import DeviceTensor

#: Threads of a block.
ROW_THREADS = 512

#: Tokens of a block at least: with fewer, the blocks of a row wait for each other longer than they compute.
_MIN_TOKENS_OF_BLOCK = 2048

#: Shared memory of a block of ``choose_tokens`` besides its logits: bins, sums, and up to 1 KiB of padding.
_BINS_NBYTES = 26 * 1024


def choose_tokens(logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, *, workspace: SamplingWorkspace, stream: Any) -> None:
    """Choose a token for each row of logits, and advance the rows.

    Parameters
    ----------
    logits : DeviceTensor (B, vocab) float32
        Logits of the model. Rows may be strided. Not changed.
    rows : SamplingRows
        Parameters of the B rows. Counters advance, ``uses`` counts the tokens, ``results`` has the token or the error of each active row.
    tokens : DeviceTensor (B,) int32
        The tokens; 0 for a row with an error, so that an engine can run them before the host reads errors. Inactive rows are not written.
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
    :mod:`trt_kvcache.kernels.token_weights` defines the chosen token; host and device choose the same.
    """
    batch, vocab_size = _check_logits(logits, rows, workspace, stream)
    _check("tokens", tokens, (batch,), "int32", logits)
    if rows.uses is not None:
        _check("rows.uses", rows.uses, (batch, vocab_size), "int32", logits)
    if rows.bias is not None:
        _check("rows.bias", rows.bias, (batch, vocab_size), "float32", logits)
    if workspace.edited is None and (rows.uses is not None or rows.bias is not None):
        raise ShapeError("workspace: expected one with room for penalties and bias, got one without. Use edits=True.")
    choose_tokens_kernel(logits, rows, tokens, workspace, stream)


def token_logprobs(logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, *, workspace: SamplingWorkspace, stream: Any) -> None:
    """Compute log-probabilities of the tokens that :func:`choose_tokens` chose, and of the most likely ones.

    Parameters
    ----------
    logits : DeviceTensor (B, vocab) float32
        Logits of the model. Rows may be strided. Not changed.
    rows : SamplingRows
        Rows of the call of :func:`choose_tokens` before. Only rows with the flag ``LOGPROBS``, and without an error, are written.
    out : DeviceTensor (B, 1 + 2 * top) int32
        For each of these rows: the log-probability of the token as the bits of a float32; the ``top`` most likely tokens (at most
        ``max_top`` of the workspace, 20 unless it was made with more), the most likely first, of equally likely ones the lowest id
        first, -1 past the end of the vocabulary; and their log-probabilities, again as bits.
    workspace : SamplingWorkspace
        Workspace of the call before.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.
    """
    batch, _ = _check_logits(logits, rows, workspace, stream)
    words = out.shape[1] if isinstance(out, DeviceTensor) and out.ndim == 2 else 0
    if not 1 <= words <= 1 + 2 * workspace.max_top or words % 2 != 1:
        raise ShapeError(f"out: expected [{batch}, 1 + 2 * top] with top from 0 to {workspace.max_top}, got {out!r}.")
    _check("out", out, (batch, words), "int32", logits)
    token_logprobs_kernel(logits, rows, out, workspace, stream)


def _check_logits(logits: DeviceTensor, rows: SamplingRows, workspace: SamplingWorkspace, stream: Any) -> tuple[int, int]:
    """Check the arguments of both calls, and return the shape of the logits."""
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


def _check(name: str, tensor: DeviceTensor, shape: tuple[int, ...], dtype: str, like: DeviceTensor) -> None:
    check_place(name, tensor, like)
    if tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {tensor.dtype}.")
    if tensor.shape != shape or not tensor.is_contiguous or tensor.offset % itemsize(dtype):
        raise ShapeError(f"{name}: expected a dense tensor of shape {shape}, got {tensor!r}.")


# --- NumPy, for host memory ---


def _choose_tokens_on_host(
    logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any
) -> None:
    all_logits, into = array_of(logits), array_of(tokens)
    params, results = (array_of(tensor).view(dtype)[:, 0] for tensor, dtype in ((rows.params, ROW_PARAMS), (rows.results, ROW_RESULT)))
    for row in np.flatnonzero(params["flags"] & ACTIVE).tolist():
        of_row = params[row]
        edited = all_logits[row]
        best, error = _best(edited), BAD_LOGITS
        if np.isfinite(edited[best]) and of_row["flags"] & (PENALISED | BIASED):
            edited, error = _edited(edited, of_row, rows, row), NOTHING_LEFT
            best = _best(edited)
        if not np.isfinite(edited[best]):
            into[row] = 0
            results[row] = (-1, error, best, edited[best])
            continue
        token = best if of_row["flags"] & GREEDY else _choose(edited, edited[best], of_row)
        into[row] = token
        results[row] = (token, NO_ERROR, 0, 0)
        of_row["counter"] += 1
        if of_row["flags"] & PENALISED:
            _uses(rows)[row, token] += 1


def _best(logits: np.ndarray[Any, np.dtype[np.float32]]) -> int:
    return int(np.argmax(logits))  # NaN counts as the largest


def _uses(rows: SamplingRows) -> np.ndarray[Any, np.dtype[np.uint32]]:
    assert rows.uses is not None
    return array_of(rows.uses).view(np.uint32)


def _edited(
    logits: np.ndarray[Any, np.dtype[np.float32]], of_row: Any, rows: SamplingRows, row: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits after bias and penalties."""
    edited: np.ndarray[Any, np.dtype[np.float32]] = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        if of_row["flags"] & BIASED:
            assert rows.bias is not None
            edited += array_of(rows.bias)[row]
        if of_row["flags"] & PENALISED:
            uses = _uses(rows)[row]
            counts = uses & ~np.uint32(IN_PROMPT)
            used, generated = np.flatnonzero(uses), np.flatnonzero(counts)
            if of_row["repetition"] != 1:
                values = edited[used]
                edited[used] = np.where(values < 0, values * of_row["repetition"], values / of_row["repetition"])
            if of_row["frequency"]:
                edited[generated] -= of_row["frequency"] * counts[generated].astype(np.float32)
            if of_row["presence"]:
                edited[generated] -= of_row["presence"]
    return edited


def _choose(logits: np.ndarray[Any, np.dtype[np.float32]], largest: Any, of_row: Any) -> int:
    numbers = ChoiceParams(float(of_row["scale"]), *(int(of_row[name]) for name in ("top_k", "top_p", "min_weight")))
    return choose_token(logits, largest, random_bits(int(of_row["seed"]), int(of_row["counter"])), numbers)


def _token_logprobs_on_host(logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
    all_logits, words = array_of(logits), array_of(out)
    params, results = array_of(rows.params).view(ROW_PARAMS)[:, 0], array_of(rows.results).view(ROW_RESULT)[:, 0]
    top = (words.shape[1] - 1) // 2
    for row in np.flatnonzero(
        (params["flags"] & ACTIVE != 0) & (params["flags"] & LOGPROBS != 0) & (results["error"] == NO_ERROR)
    ).tolist():
        chosen, ids, values = log_probabilities(all_logits[row], int(results["token"][row]), top)
        words[row] = -1
        numbers = words[row].view(np.float32)
        numbers[0], numbers[1 + top :] = chosen, 0
        words[row, 1 : 1 + len(ids)] = ids
        numbers[1 + top : 1 + top + len(ids)] = values


def _set_row_on_host(rows: SamplingRows, row: int, words: Sequence[int], stream: Any) -> None:
    array_of(rows.params)[row] = np.array(words, np.int64).view(np.uint8)


def _count_tokens_on_host(uses: DeviceTensor, tokens: DeviceTensor, in_prompt: bool, more: int, stream: Any) -> None:
    counts, ids = array_of(uses).view(np.uint32), array_of(tokens)
    if in_prompt:
        counts[ids] |= np.uint32(IN_PROMPT)
    else:
        np.add.at(array_of(uses), ids, np.int32(more))


def _set_bias_on_host(bias: DeviceTensor, tokens: DeviceTensor, values: DeviceTensor, stream: Any) -> None:
    array_of(bias)[array_of(tokens)] = array_of(values)


# --- CUDA: launches of plugins/sampling/*.cu ---


def _choose_tokens_on_device(
    logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any
) -> None:
    batch, vocab_size = logits.shape
    groups = min(batch, workspace.groups)
    useful = -(-vocab_size // _MIN_TOKENS_OF_BLOCK)
    blocks = max(1, min(workspace.blocks // groups, useful, MAX_BLOCKS_OF_ROW))
    tokens_of_block = -(-vocab_size // (blocks * ROW_THREADS)) * ROW_THREADS
    kept_nbytes = _kept_nbytes(logits.memory, tokens_of_block)
    arguments = (
        *(logits.ptr, logits.strides[0], vocab_size, batch, rows.params.ptr),
        *(0 if tensor is None else tensor.ptr for tensor in (rows.uses, rows.bias, workspace.edited)),
        *(tokens.ptr, rows.results.ptr, workspace.meeting.ptr, tokens_of_block),
    )
    launch(
        logits.memory,
        "sampling_choose",
        "choose_tokens" if kept_nbytes else "choose_tokens_read_again",
        (blocks, groups, 1),
        arguments,
        stream,
        threads=ROW_THREADS,
        shared_nbytes=kept_nbytes,
        cooperative=blocks > 1,
        leaves_l1=False,
        programmatic_dependent_launch=starts_early(logits.memory),
    )


def _kept_nbytes(memory: Any, tokens_of_block: int) -> int:
    """Return the bytes of shared memory for the logits of a block; 0 if there is no room, and it reads them again."""
    nbytes = tokens_of_block * 4
    return nbytes if nbytes <= share_nbytes(memory.arch, BLOCKS_PER_SM) - _BINS_NBYTES else 0


def _token_logprobs_on_device(
    logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, workspace: SamplingWorkspace, stream: Any
) -> None:
    batch, vocab_size = logits.shape
    blocks = min(LOGPROBS_BLOCKS, -(-vocab_size // _MIN_TOKENS_OF_BLOCK))
    addresses = (rows.params.ptr, rows.results.ptr, out.ptr, (out.shape[1] - 1) // 2, workspace.found.ptr, workspace.found.shape[1])
    arguments = (logits.ptr, logits.strides[0], vocab_size, *addresses)
    launch(
        logits.memory,
        "sampling_logprobs",
        "token_logprobs",
        (blocks, batch, 1),
        arguments,
        stream,
        threads=ROW_THREADS,
        programmatic_dependent_launch=starts_early(logits.memory),
    )


def _set_row_on_device(rows: SamplingRows, row: int, words: Sequence[int], stream: Any) -> None:
    launch(rows.params.memory, "sampling_rows", "set_row", (1, 1, 1), (rows.params.ptr, row, *words), stream)


def _count_tokens_on_device(uses: DeviceTensor, tokens: DeviceTensor, in_prompt: bool, more: int, stream: Any) -> None:
    blocks = -(-len(tokens) // THREADS_PER_BLOCK)
    launch(uses.memory, "sampling_rows", "count_tokens", (blocks, 1, 1), (uses.ptr, tokens.ptr, len(tokens), int(in_prompt), more), stream)


def _set_bias_on_device(bias: DeviceTensor, tokens: DeviceTensor, values: DeviceTensor, stream: Any) -> None:
    blocks = -(-len(tokens) // THREADS_PER_BLOCK)
    launch(bias.memory, "sampling_rows", "set_bias", (blocks, 1, 1), (bias.ptr, tokens.ptr, values.ptr, len(tokens)), stream)


# --- without checks, for engines ---


#: Choose a token for each row of logits, and advance the rows.
choose_tokens_kernel = Kernel(_choose_tokens_on_host, _choose_tokens_on_device)

#: Compute log-probabilities of the chosen tokens, and of the most likely ones.
token_logprobs_kernel = Kernel(_token_logprobs_on_host, _token_logprobs_on_device)

#: Store the parameters of a row: eight words of 64 bits.
set_row_kernel = Kernel(_set_row_on_host, _set_row_on_device)

#: Mark tokens as tokens of a prompt, or add to the uses of each.
count_tokens_kernel = Kernel(_count_tokens_on_host, _count_tokens_on_device)

#: Store the bias of tokens.
set_bias_kernel = Kernel(_set_bias_on_host, _set_bias_on_device)
