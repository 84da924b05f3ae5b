"""Rows of logits with their parameters, for the tests of sampling: what is random, and where rounding and ties matter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trt_kvcache import DeviceTensor
from trt_kvcache.kernels import SamplingRows
from trt_kvcache.kernels.sampling_rows import ACTIVE, BIASED, GREEDY, IN_PROMPT, LOGPROBS, PENALISED, ROW_PARAMS, ROW_RESULT
from trt_kvcache.kernels.token_choice import choice_params


@dataclass
class Row:
    """Parameters of a row, as of ``SamplingParams``."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    counter: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    active: bool = True
    logprobs: bool = False

    @property
    def flags(self) -> int:
        penalised = self.repetition != 1 or self.frequency != 0 or self.presence != 0
        flags = (
            *((ACTIVE, self.active), (GREEDY, self.temperature == 0), (PENALISED, penalised)),
            *((BIASED, bool(self.bias)), (LOGPROBS, self.logprobs)),
        )
        return sum(flag for flag, is_set in flags if is_set)


def make_rows(memory: Any, rows: list[Row], vocab_size: int, stream: Any) -> SamplingRows:
    """The device arrays of rows."""
    params = np.zeros(len(rows), ROW_PARAMS)
    uses, bias = np.zeros((len(rows), vocab_size), np.uint32), np.zeros((len(rows), vocab_size), np.float32)
    for index, row in enumerate(rows):
        numbers = choice_params(row.temperature or 1.0, row.top_k, row.top_p, row.min_p)
        params[index] = (
            *(row.flags, row.seed, row.counter, numbers.top_k, numbers.top_p, numbers.min_weight),
            *(numbers.scale, row.repetition, row.frequency, row.presence),
        )
        uses[index, list(row.prompt)] |= np.uint32(IN_PROMPT)
        np.add.at(uses[index], list(row.generated), np.uint32(1))
        bias[index, list(row.bias)] = list(row.bias.values())
    flags = int(np.bitwise_or.reduce(params["flags"]))
    return SamplingRows(
        memory.to_device(params.view(np.uint8).reshape(len(rows), -1), stream=stream),
        memory.to_device(np.full((len(rows), ROW_RESULT.itemsize), 0xEE, np.uint8), stream=stream),
        memory.to_device(uses.view(np.int32), stream=stream) if flags & PENALISED else None,
        memory.to_device(bias, stream=stream) if flags & BIASED else None,
    )


def params_of(rows: SamplingRows) -> np.ndarray[Any, Any]:
    return rows.params.numpy().view(ROW_PARAMS)[:, 0]


def results_of(rows: SamplingRows) -> np.ndarray[Any, Any]:
    return rows.results.numpy().view(ROW_RESULT)[:, 0]


def make_tokens(memory: Any, count: int, stream: Any) -> DeviceTensor:
    return memory.to_device(np.full(count, -7, np.int32), stream=stream)


#: Kinds of logits.
KINDS = ("normal", "peaked", "flat", "coarse", "equal", "excluded", "outlier", "one", "steps", "huge")


def make_logits(kind: str, size: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A row of logits."""
    normal = rng.normal(size=size)
    logits = {
        "normal": lambda: normal * 2,
        "peaked": lambda: normal * 2.5 + np.where(rng.random(size) < 2e-3, rng.exponential(6, size) + 8, 0),
        "flat": lambda: normal * 0.01,
        "coarse": lambda: np.round(normal * 8) / 4,
        "equal": lambda: np.where(rng.random(size) < 0.5, 0.0, -0.0),
        "excluded": lambda: np.where(rng.random(size) < 0.5, -np.inf, normal),
        "outlier": lambda: np.where(np.arange(size) == 7 % size, -3e38, normal),
        "one": lambda: np.where(np.arange(size) == 123 % size, 400.0, normal),
        "steps": lambda: np.where(rng.random(size) < 0.5, 1.0, 1 + 2.0**-20 * rng.integers(0, 40, size)),
        "huge": lambda: normal * 1e37,
    }
    made = logits[kind]().astype(np.float32)
    if not np.isfinite(made).any():
        made[rng.integers(size)] = 1.5
    return made


#: Parameters that the rows of a call take in turns.
CHOICES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-25},
    {"temperature": 1e25},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1e4, "top_k": 7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 10**6, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1e25, "top_p": 0.5},
    {"temperature": 1e-25, "top_p": 0.5},
    {"temperature": 60.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-300},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 60.0, "min_p": 1e-6},
    {"temperature": 1.5, "top_p": 0.95, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 30, "min_p": 0.5},
)


def random_edits(size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Penalties and bias of a row."""
    ids = [tuple(rng.integers(0, size, 6).tolist()) for _ in range(3)]
    return {
        "repetition": float(rng.choice([1.0, 1.3, 0.7])),
        "frequency": float(rng.choice([0.0, 0.4, -0.3])),
        "presence": float(rng.choice([0.0, 1.1])),
        "prompt": ids[0],
        "generated": ids[1] * 2 + ids[0][:2],
        "bias": dict(zip(ids[2], rng.choice([-np.inf, 2.5, -1.0], 6).tolist(), strict=True)) if rng.random() < 0.5 else {},
    }
