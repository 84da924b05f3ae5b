"""The output of ``trt-kvcache bench``: a table, JSON or CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.benchmarking import BenchmarkRow, MemoryLimit
from trt_kvcache.cli.console import as_json, count, results, say, size, table
from trt_kvcache.cli.formats import kv_format
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.model import ModelConfig

_NUMBERS = ("batch", "tokens/s", "first ms", "token ms", "p95", "p99", "limit")


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Context of the rows: model, environment, sampling, memory limit."""

    model: ModelConfig
    folder: Path
    dtype: str
    limit: MemoryLimit
    weights_format: str
    environment: dict[str, Any]
    params: SamplingParams
    seed: int
    makes_text: bool

    def document(self, rows: Sequence[BenchmarkRow], *, interrupted: bool) -> dict[str, Any]:
        """Return the document for ``--json``."""
        return {
            "folder": str(self.folder),
            "model": as_json(self.model),
            "dtype": self.dtype,
            **self.environment,
            "limit": as_json(self.limit),
            "includes": {"logits": True, "sampling": self._sampling, "text": self.makes_text},
            "prompts": {"tokens": "random", "seed": self.seed},
            "rows": [
                {"test": row.case.name, **as_json(row), "token_nbytes": self.limit.token_nbytes(row), "limit_share": self.limit.share(row)}
                for row in rows
            ],
            "interrupted": interrupted,
        }

    def csv(self, rows: Sequence[BenchmarkRow]) -> str:
        """Return the text for ``--csv``: a line of names, and one for each row. Times are in seconds, sizes in bytes."""
        lines = [self._fields(row) for row in rows]
        text = io.StringIO()
        if lines:
            writer = csv.DictWriter(text, [*lines[0]], lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        return text.getvalue()

    def print(self, rows: Sequence[BenchmarkRow]) -> None:
        """Print the rows as a table, with model and environment."""
        cache = self.environment["cache"]
        stored = kv_format(cache["dtype"], cache["scales"])
        say(str(self.folder), style="bold")
        say(f"{self.environment['engine']} on {self.environment['device_name']} ({self.environment['device']}), {self.dtype}")
        say(f"weights {size(self.limit.weights_nbytes)} in {self.weights_format}; cache {size(cache['nbytes'])} in {stored}")
        shown = table("test", *_NUMBERS, numbers=_NUMBERS)
        shown.pad_edge = False
        for column in shown.columns[1:]:
            column.no_wrap = True
        for row in rows:
            shown.add_row(row.case.name, str(row.case.batch_size), *_cells(row, self.limit.share(row)))
        results().print(shown)
        last = rows[-1]
        say(f"{count(last.runs, 'run')} after {last.warmup} to warm up; prompts of random tokens, seed {self.seed}")
        text = ", and their text" if self.makes_text else ""
        say(f"included: logits on the host, sampling ({self._sampling}){text}")
        speed = self.limit.copy_bytes_per_second / 1e9
        what = "weights, K and V" if last.cache_traffic.rows else "weights"
        states = ", and reading and writing states," if last.cache_traffic.states_nbytes else ""
        needs = [(row, self.limit.token_nbytes(row)) for row in rows]
        tokens = [f"{size(nbytes)} ({row.case.name}, batch {row.case.batch_size})" for row, nbytes in needs if nbytes is not None]
        if tokens:
            say(f"a token needs {what}{' and states' if states else ''} of " + ", ".join(tokens))
        say(f"limit: share of the speed of reading {what}{states} at {speed:.1f} GB/s")
        drafted, accepted = sum(row.draft_tokens for row in rows), sum(row.accepted_tokens for row in rows)
        if drafted:
            say(f"drafts: {accepted} of {count(drafted, 'token')} accepted ({accepted / drafted:.0%})")
        if last.memory is not None:
            where = "in use on the device" if last.memory.of == "device" else "the most that the process had"
            say(f"memory: {size(last.memory.nbytes)}, {where}")

    @property
    def _sampling(self) -> str:
        if self.params.temperature == 0:
            return "greedy"
        top_p = "" if self.params.top_p == 1 else f", top-p {self.params.top_p:g}"
        return f"temperature {self.params.temperature:g}{top_p}"

    def _fields(self, row: BenchmarkRow) -> dict[str, Any]:
        latency = row.inter_token_latency
        return {
            "folder": self.folder,
            "engine": self.environment["engine"],
            "device": self.environment["device_name"],
            "dtype": self.dtype,
            "test": row.case.name,
            "prompt_tokens": row.case.prompt_tokens,
            "generate_tokens": row.case.generate_tokens,
            "batch_size": row.case.batch_size,
            "depth": row.case.depth,
            "runs": row.runs,
            "warmup": row.warmup,
            "tokens_per_second": row.tokens_per_second.mean,
            "tokens_per_second_deviation": row.tokens_per_second.deviation,
            "time_to_first_token": row.time_to_first_token.mean,
            "time_to_first_token_deviation": row.time_to_first_token.deviation,
            "inter_token_latency_median": None if latency is None else latency.median,
            "inter_token_latency_p95": None if latency is None else latency.p95,
            "inter_token_latency_p99": None if latency is None else latency.p99,
            "token_nbytes": self.limit.token_nbytes(row),
            "limit_share": self.limit.share(row),
            "draft_tokens": row.draft_tokens,
            "accepted_tokens": row.accepted_tokens,
            "copy_bytes_per_second": self.limit.copy_bytes_per_second,
            "weights_nbytes": self.limit.weights_nbytes,
            "weights_format": self.weights_format,
            "cache_nbytes": self.environment["cache"]["nbytes"],
            "memory_nbytes": None if row.memory is None else row.memory.nbytes,
            "memory_of": None if row.memory is None else row.memory.of,
            "sampling": self._sampling,
            "seed": self.seed,
        }


def _cells(row: BenchmarkRow, limit_share: float | None) -> list[str]:
    """Return the cells of a row after its batch size."""
    speed, first, latency = row.tokens_per_second, row.time_to_first_token, row.inter_token_latency
    percentiles = [""] * 3 if latency is None else [_milliseconds(value) for value in (latency.median, latency.p95, latency.p99)]
    digits = 2 if speed.mean < 10 else 1 if speed.mean < 100 else 0
    return [
        f"{speed.mean:.{digits}f} ± {speed.deviation:.{digits}f}",
        _milliseconds(first.mean),
        *percentiles,
        "" if limit_share is None else f"{limit_share:.0%}",
    ]


def _milliseconds(seconds: float) -> str:
    """Return a time with few digits: the table must fit a terminal."""
    value = seconds * 1e3
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
