"""``measure``: runs and times cases on a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.benchmarking.cache_traffic import CacheTraffic
from trt_kvcache.benchmarking.cases import BenchmarkCase, check_cases
from trt_kvcache.benchmarking.memory_use import MemoryUse, memory_use
from trt_kvcache.benchmarking.spread import MeanDeviation, Percentiles
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.statistics import SessionStatistics

#: Called as ``progress(case, done, total)`` with the numbers of finished and of all runs of a case, including warm-up.
OnRun = Callable[[BenchmarkCase, int, int], object]


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """Measurements of a case. Times are in seconds, on the host's clock.

    Parameters
    ----------
    case : BenchmarkCase
        The case.
    runs, warmup : int
        Number of timed runs, and of untimed runs before them.
    tokens_per_second : MeanDeviation
        Over all slots. Prompt alone: prompt tokens over the time to the first token. Decode steps alone: their tokens over the time from
        the first token to the last one. Both: prompt and generated tokens over the time to the last token.
    time_to_first_token : MeanDeviation
        From the call until every slot has its first token, including logits and sampling.
    inter_token_latency : Percentiles or None
        Time from a token of all slots to the next one, over all steps of all runs. None without decode steps.
    generation_seconds : float or None
        Time of all decode steps of a run, the mean over the runs. None without decode steps.
    kv_bytes_per_token : int
        K and V of one token over all layers.
    cache_traffic : CacheTraffic
        Bytes that a decode step needs of the cache of a slot.
    memory : MemoryUse or None
        Memory in use after the last run.
    draft_tokens, accepted_tokens : int
        Draft tokens that were verified, and accepted, in all runs, warm-up runs included (speculative decoding).
    """

    case: BenchmarkCase
    runs: int
    warmup: int
    tokens_per_second: MeanDeviation
    time_to_first_token: MeanDeviation
    inter_token_latency: Percentiles | None
    generation_seconds: float | None
    kv_bytes_per_token: int
    cache_traffic: CacheTraffic
    memory: MemoryUse | None
    draft_tokens: int = 0
    accepted_tokens: int = 0


def measure(
    session: InferenceSession,
    cases: Sequence[BenchmarkCase],
    *,
    runs: int = 5,
    warmup: int = 2,
    seed: int = 0,
    params: SamplingParams | None = None,
    adapter: str | None = None,
    on_run: OnRun = lambda case, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[BenchmarkRow]:
    """Run cases on a session, one after another.

    Parameters
    ----------
    session : InferenceSession
        Its sequences are replaced.
    cases : sequence of BenchmarkCase
        Run in this order. The tokens of the depth are kept for the next case of equal batch size and depth; with recurrent states, which
        cannot be rewound, they run again before each run, untimed.
    runs, warmup : int
        Number of timed runs of each case, and of untimed runs before them.
    seed : int
        Seed of the prompts, which are random token ids, new ones in each run.
    params : SamplingParams, optional
        Sampling parameters; greedy if left out. End tokens and stop texts are ignored, so no request ends early.
    adapter : str, optional
        Name of the adapter of all slots, one of the session; the base model if left out.
    on_run : callable
        Called before the first run of a case and after each.
    clock : callable
        Returns seconds.

    Returns
    -------
    iterator of BenchmarkRow
        A row for each case, as soon as it is measured. The arguments are checked at the call.

    Raises
    ------
    CapacityError, ConfigError
        A case does not fit into the cache, or a number is out of range. Nothing was run.

    Notes
    -----
    All cases run by ``session.generate``, so that times include its overhead: uploads, sampling, and decoding tokens to text if the session
    has a tokenizer.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> from trt_kvcache.benchmarking import BenchmarkCase, measure
    >>> cases = [BenchmarkCase(prompt_tokens=16), BenchmarkCase(generate_tokens=4, depth=16)]
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     for row in measure(session, cases, runs=2):
    ...         print(row.case.name, row.tokens_per_second.mean > 0, row.inter_token_latency is None)
    pp16 True True
    tg4 @ d16 True False
    """
    int_in_range("runs", runs, 1, error=ConfigError)
    int_in_range("warmup", warmup, 0, error=ConfigError)
    int_in_range("seed", seed, 0, error=ConfigError)
    check_cases(cases, max_batch_size=session.cache.max_batch_size, max_sequence_length=session.max_sequence_length)
    prompts = _RandomPrompts(session.vocab_size, seed)
    chosen = replace(params or SamplingParams(), ignore_eos=True, stop=(), stop_token_ids=())
    return _rows(_Runner(session, prompts, chosen, adapter, clock), cases, runs, warmup, on_run)


def _rows(runner: _Runner, cases: Sequence[BenchmarkCase], runs: int, warmup: int, on_run: OnRun) -> Iterator[BenchmarkRow]:
    total = warmup + runs
    for case in cases:
        on_run(case, 0, total)
        timed = []
        before = runner.session.statistics
        for done in range(1, total + 1):
            times = runner.run(case)
            if done > warmup:
                timed.append(times)
            on_run(case, done, total)
        yield _row(case, timed, warmup, runner.session, before)


def _row(
    case: BenchmarkCase, timed: Sequence[Sequence[float]], warmup: int, session: InferenceSession, before: SessionStatistics
) -> BenchmarkRow:
    """Return the row of a case from its runs: for each run, the start and the times of the tokens."""
    tokens = case.batch_size * (case.prompt_tokens + case.generate_tokens)
    counted = [times[-1] - times[0 if case.prompt_tokens else 1] for times in timed]
    latencies = [after - before for times in timed for before, after in pairwise(times[1:])]
    return BenchmarkRow(
        case=case,
        runs=len(timed),
        warmup=warmup,
        tokens_per_second=MeanDeviation.of([tokens / seconds for seconds in counted]),
        time_to_first_token=MeanDeviation.of([times[1] - times[0] for times in timed]),
        inter_token_latency=Percentiles.of(latencies) if latencies else None,
        generation_seconds=sum(latencies) / len(timed) if latencies else None,
        kv_bytes_per_token=estimate_memory(session.cache_config).bytes_per_token,
        cache_traffic=CacheTraffic.of(session.cache_config, session.model),
        memory=memory_use(session.cache.memory),
        draft_tokens=session.statistics.draft_tokens - before.draft_tokens,
        accepted_tokens=session.statistics.accepted_tokens - before.accepted_tokens,
    )


class _RandomPrompts:
    """Random token ids, never the same prompt twice, so that the prefix cache has no hits."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def draw(self, count: int, length: int) -> list[list[int]]:
        rows: list[list[int]] = self._random.integers(self._vocab_size, size=(count, length)).tolist()
        return rows


class _Runner:
    """Runs cases on a session, and returns the times of tokens."""

    def __init__(
        self, session: InferenceSession, prompts: _RandomPrompts, params: SamplingParams, adapter: str | None, clock: Callable[[], float]
    ) -> None:
        self.session = session
        self._prompts = prompts
        self._params = params
        self._adapter = adapter
        self._clock = clock
        self._goes_back = session.cache_config.mamba is None
        self._filled: tuple[int, int] | None = None

    def _fill(self, case: BenchmarkCase) -> None:
        """Set the slots to the depth of the case: rewind the last run, or prefill new tokens."""
        if case.depth and self._goes_back and self._filled == (case.batch_size, case.depth):
            for slot in range(case.batch_size):
                self.session.rewind(slot, case.depth)
            return
        self._filled = None
        if case.depth:
            self.session.prefill(self._prompts.draw(case.batch_size, case.depth), adapter=self._adapter)
            self._filled = case.batch_size, case.depth

    def run(self, case: BenchmarkCase) -> list[float]:
        """Run a case once; return the start, and the time at which all slots had their first token, their second token, and so on."""
        params = replace(self._params, max_new_tokens=case.generate_tokens + 1)
        self._fill(case)
        prompts = self._prompts.draw(case.batch_size, case.prompt_length)
        times = [self._clock()]
        counts = [0] * case.batch_size
        missing = [case.batch_size] * params.max_new_tokens  # a slot with a draft is ahead of others
        adapter = None if case.depth else self._adapter  # slots with tokens have it already
        for token in self.session.generate(prompts, params, append=case.depth > 0, adapter=adapter):
            missing[counts[token.index]] -= 1
            if not missing[counts[token.index]]:
                times.append(self._clock())
            counts[token.index] += 1
        return times
