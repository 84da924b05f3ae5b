"""``compare_paths``: runs one model by several paths on the same tokens, and compares logits and caches through Polygraphy."""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.cache.recurrent_states import state_storages
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.errors import CapacityError, ConfigError, ShapeError
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.polygraphy.comparison import Comparison, PairComparison, PathRun, TokenDifference
from trt_kvcache.polygraphy.feeds import INPUT_IDS, NEW_LENGTHS, Feed, greedy_feeds
from trt_kvcache.polygraphy.first_difference import Difference, Output, compare_arrays, first_difference, outputs_in_order
from trt_kvcache.polygraphy.runners import SessionRunner

#: The largest accepted difference for each dtype of the cache, relative to the largest value in the same slot (and head).
#: Paths differ by the order of their sums and, in 16 bit, by where they round, which adds up over the layers. Measured with
#: Hugging Face transformers at 2, 8 and 24 layers: 2.4e-6 between cached and full attention in float32; 4.7e-3 and 3.2e-2 between
#: rounding after every operation and never rounding, with float16 and bfloat16 weights. Each tolerance is two to eight times the
#: measured difference. A wrong row, head or position causes a difference of about 1. Where K and V are quantized, such a difference may
#: round an element to the next stored value: of the largest, that is 1/14 away in float8_e4m3fn, and 1/127 in int8.
TOLERANCES: Mapping[str, float] = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2, "int8": 8e-2, "float8_e4m3fn": 2e-1}

#: Name of the result for Polygraphy. Under the name of an output, it would compute statistics of that output, even if they are not
#: logged.
_VERDICT = "all outputs"

#: Called as ``on_step(step)`` when a step has been run and compared: 0 is the prefill.
OnStep = Callable[[int], object]


def compare_paths(
    paths: Sequence[SessionRunner],
    prompts: Sequence[Prompt],
    *,
    steps: int,
    tolerances: Mapping[str, float] = TOLERANCES,
    on_step: OnStep | None = None,
) -> Comparison:
    """Run the same tokens through several paths and compare every pair of paths.

    A path is one way to run a model: a runner with its engine and cache. The first path chooses the tokens by greedy decoding, and
    all others are given the same tokens. All paths are active at the same time: each step is compared before the next one is run,
    so memory use does not grow with the number of steps.

    Parameters
    ----------
    paths : sequence of SessionRunner
        At least two that are not active, with different names and caches.
    prompts : sequence of str or sequence of int
        One prompt per slot: token ids, or text if the model has a tokenizer.
    steps : int
        Decode steps after the prefill, at least 0.
    tolerances : mapping of str to float
        The largest accepted difference for each dtype of the cache, relative to the largest value in the same slot (and head). If two
        paths have different dtypes, the larger tolerance applies.
    on_step : callable, optional
        Called as ``on_step(step)`` when a step has been run and compared; step 0 is the prefill.

    Returns
    -------
    Comparison
        Comparison of the paths, pair by pair, and their times.

    Raises
    ------
    ConfigError
        There are fewer than two paths, two have the same name or share a cache, or a dtype has no tolerance.
    CapacityError
        A prompt and its continuation exceed ``max_sequence_length`` of a path. Nothing was run.
    ShapeError
        The paths run different models.
    KVCacheError
        Opening a session or running a step failed.

    Notes
    -----
    Polygraphy's log level is raised to warnings during the call.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession, RecomputeRunner, SessionRunner, compare_paths
    >>> def open_session():
    ...     return InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2)
    >>> paths = [SessionRunner(open_session, "cached"), RecomputeRunner(open_session, "recomputed")]
    >>> comparison = compare_paths(paths, ["The rabbit", "He said"], steps=3)
    >>> comparison.agrees
    True
    """
    _check_paths(paths)
    int_in_range("steps", steps, 0)
    run = _Run(paths, prompts, steps, tolerances, on_step)
    quiet = {"": G_LOGGER.WARNING, "comparator/comparator.py": G_LOGGER.CRITICAL}  # the comparator would repeat our result
    with G_LOGGER.verbosity(quiet):
        stream = Comparator.run(list(paths), data_loader=run.feeds(), streaming=True)
        Comparator.compare_accuracy(run.watch(stream), comparisons=run.pairs, compare_func=run.compare)
    return run.result()


@dataclass
class _Pair:
    """Result for a pair of paths, so far."""

    dtype: str
    tolerance: float
    difference: Difference | None = None
    logits_share: float = 0.0
    rows_share: float | None = None
    states_share: float | None = None
    equal_tokens: int = 0
    tokens: int = 0
    token_difference: TokenDifference | None = None

    def note_share(self, kind: str, share: float) -> None:
        if kind == "logits":
            self.logits_share = float(np.maximum(self.logits_share, share))
        elif kind in ("K", "V"):
            self.rows_share = float(np.maximum(self.rows_share or 0.0, share))
        elif kind in ("conv state", "recurrent state"):
            self.states_share = float(np.maximum(self.states_share or 0.0, share))


class _Run:
    """One comparison: the feeds for Polygraphy's ``Comparator``, its comparison function, and the results."""

    def __init__(
        self, paths: Sequence[SessionRunner], prompts: Sequence[Prompt], steps: int, tolerances: Mapping[str, float], on_step: OnStep | None
    ) -> None:
        self.pairs = list(itertools.combinations(range(len(paths)), 2))
        self._paths = paths
        self._prompts = prompts
        self._steps = steps
        self._tolerances = tolerances
        self._on_step = on_step
        self._step = 0
        self._dtypes: dict[str, str] = {}
        self._found: dict[tuple[str, str], _Pair] = {}
        self._seconds = {path.name: [0.0, 0.0] for path in paths}
        self._prompt_lengths: tuple[int, ...] = ()
        self._decoded: list[list[int]] = []

    def feeds(self) -> Iterator[Feed]:
        """Yield the feed of each step. The ``Comparator`` reads one at a time, while all paths are active."""
        self._check_sessions()
        for step, feed in enumerate(greedy_feeds(self._paths[0], self._prompts, self._steps)):
            if step == 0:
                self._prompt_lengths = tuple(feed[NEW_LENGTHS].tolist())
                self._check_room()
            else:
                self._decoded.append(feed[INPUT_IDS][:, 0].tolist())
            self._step = step
            yield feed

    def watch(self, stream: Generator[Any, None, None]) -> Iterator[Any]:
        """Pass on the results of each step, add up their times, and report the step as done when the next one is requested."""
        with closing(stream):
            for results in stream:
                for name, (result,) in results:
                    self._seconds[name][self._step > 0] += result.runtime
                yield results
                if self._on_step is not None:
                    self._on_step(self._step)

    def compare(self, first: Any, second: Any) -> dict[str, bool]:
        """Compare the outputs of two paths at one step (``IterationResult``) and return whether all agree."""
        pair = self._found[first.runner_name, second.runner_name]
        all_agree = True
        for output in outputs_in_order(name for name in first if name in second):
            ours, theirs = first[output.name], second[output.name]
            outcome = compare_arrays(ours, theirs, 0.0 if output.kind == "length" else pair.tolerance)
            agrees = not outcome.wrong.any()
            all_agree &= agrees
            if pair.difference is None:
                pair.difference = self._placed(output, first_difference(self._step, output, ours, theirs, outcome))
            pair.note_share(output.kind, outcome.share)
            if output.kind == "length" and not agrees:
                break  # rows of different lengths have different shapes
        self._count_tokens(pair, first[DEFAULT_NAMES.logits], second[DEFAULT_NAMES.logits])
        return {_VERDICT: all_agree}

    def _placed(self, output: Output, difference: Difference | None) -> Difference | None:
        """Return a difference with its index among all layers, if the first path knows its model."""
        model = self._paths[0].session.model
        if difference is None or output.layer is None or model is None:
            return difference
        is_kv = output.kind in ("K", "V")
        indices, mixers = (model.kv_indices, model.kv_layers) if is_kv else (model.recurrent_indices, model.recurrent_layers)
        return replace(difference, decoder_layer=indices[output.layer], mixer=mixers[output.layer].kind)

    def _count_tokens(self, pair: _Pair, first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> None:
        ours, theirs = np.argmax(first, axis=-1).tolist(), np.argmax(second, axis=-1).tolist()
        for slot, tokens in enumerate(zip(ours, theirs, strict=True)):
            if tokens[0] != tokens[1] and pair.token_difference is None:
                pair.token_difference = TokenDifference(step=self._step, slot=slot, tokens=tokens)
            pair.equal_tokens += tokens[0] == tokens[1]
            pair.tokens += 1

    def result(self) -> Comparison:
        """Return the result of the whole comparison."""
        return Comparison(
            paths=tuple(
                PathRun(name=path.name, dtype=self._dtypes[path.name], prefill_seconds=prefill, decode_seconds=decode)
                for path, (prefill, decode) in zip(self._paths, self._seconds.values(), strict=True)
            ),
            pairs=tuple(
                PairComparison(
                    first=first,
                    second=second,
                    dtype=found.dtype,
                    tolerance=found.tolerance,
                    difference=found.difference,
                    largest_logits_share=found.logits_share,
                    largest_rows_share=found.rows_share,
                    largest_states_share=found.states_share,
                    equal_tokens=found.equal_tokens,
                    tokens=found.tokens,
                    token_difference=found.token_difference,
                )
                for (first, second), found in self._found.items()
            ),
            steps=self._steps,
            prompt_lengths=self._prompt_lengths,
            continuations=tuple(tuple(tokens[slot] for tokens in self._decoded) for slot in range(len(self._prompt_lengths))),
            live_rows=all(path.live_rows for path in self._paths),
        )

    def _check_sessions(self) -> None:
        """Check that the sessions have equal sizes, once all paths are active."""
        configs = [path.session.cache_config for path in self._paths]
        for index, path in enumerate(self._paths):
            self._dtypes[path.name] = configs[index].dtype
            if configs[index].dtype not in self._tolerances:
                raise ConfigError(f"tolerances: expected one for {configs[index].dtype}, got {', '.join(self._tolerances) or 'none'}.")
            if any(path.session.cache is other.session.cache for other in self._paths[:index]):
                raise ConfigError(f"{path.name}: expected a separate session, got one whose cache another path also uses.")
            if _layers(configs[index]) != _layers(configs[0]) or path.session.vocab_size != self._paths[0].session.vocab_size:
                raise ShapeError(f"{path.name}: expected the layers and vocabulary of {self._paths[0].name}, got another model's.")
        for one, other in self.pairs:
            tolerance, dtype = max((self._tolerances[config.dtype], config.dtype) for config in (configs[one], configs[other]))
            self._found[self._paths[one].name, self._paths[other].name] = _Pair(dtype, tolerance)

    def _check_room(self) -> None:
        needed = max(self._prompt_lengths) + self._steps
        for path in self._paths:
            if needed > path.session.max_sequence_length:
                raise CapacityError(
                    f"{path.name}: a prompt of {max(self._prompt_lengths)} tokens and {self._steps} more exceed "
                    f"max_sequence_length={path.session.max_sequence_length}. Nothing was run."
                )


def _check_paths(paths: Sequence[SessionRunner]) -> None:
    names = [path.name for path in paths]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"paths: expected at least two, with different names, got {', '.join(names) or 'none'}.")


def _layers(config: DecoderCacheConfig) -> tuple[Any, ...]:
    """Return shapes of K, V and states, without slots, lengths and dtypes."""
    mamba = config.mamba
    states = {} if mamba is None else {kind: (mamba.num_layers, storage.slot_shape) for kind, storage in state_storages(mamba).items()}
    return (() if config.kv is None else config.kv.layers), states
