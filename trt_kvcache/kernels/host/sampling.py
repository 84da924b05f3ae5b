"""Sampling in host memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of
from trt_kvcache.kernels.host.log_probabilities import log_probabilities
from trt_kvcache.kernels.host.philox import random_bits
from trt_kvcache.kernels.host.token_choice import ChoiceParams, choose_token
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
from trt_kvcache.kernels.sampling_workspace import SamplingWorkspace
from trt_kvcache.memory.tensor import DeviceTensor


def choose_tokens(logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
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


def token_logprobs(logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, workspace: SamplingWorkspace, stream: Any) -> None:
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


def set_row(rows: SamplingRows, row: int, words: Sequence[int], stream: Any) -> None:
    array_of(rows.params)[row] = np.array(words, np.int64).view(np.uint8)


def count_tokens(uses: DeviceTensor, tokens: DeviceTensor, in_prompt: bool, more: int, stream: Any) -> None:
    counts, ids = array_of(uses).view(np.uint32), array_of(tokens)
    if in_prompt:
        counts[ids] |= np.uint32(IN_PROMPT)
    else:
        np.add.at(array_of(uses), ids, np.int32(more))


def set_bias(bias: DeviceTensor, tokens: DeviceTensor, values: DeviceTensor, stream: Any) -> None:
    array_of(bias)[array_of(tokens)] = array_of(values)
