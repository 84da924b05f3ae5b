"""``Comparison``: the result of comparing several paths of a model, and its text."""

from dataclasses import dataclass

from trt_kvcache.polygraphy.first_difference import Difference

_KINDS = {
    "K": "K rows of the cache",
    "V": "V rows of the cache",
    "conv state": "conv states",
    "recurrent state": "recurrent states",
    "logits": "logits",
    "length": "cache length",
}


@dataclass(frozen=True, kw_only=True)
class PathRun:
    """Run of one path.

    Parameters
    ----------
    name : str
        Name of the path.
    dtype : str
        Dtype of its cache.
    prefill_seconds, decode_seconds : float
        Time of the prefill, and of all decode steps together, in seconds.
    """

    name: str
    dtype: str
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """A step after which two paths would choose different tokens greedily, given the same inputs.

    Parameters
    ----------
    step : int
        0 is the prefill, n the n-th decode step.
    slot : int
        Slot of the cache.
    tokens : pair of int
        The token that each of the two paths would choose.
    """

    step: int
    slot: int
    tokens: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PairComparison:
    """Comparison of two paths.

    Parameters
    ----------
    first, second : str
        Names of the paths.
    dtype : str
        The cache dtype of the path whose tolerance is the larger.
    tolerance : float
        The largest accepted difference, relative to the largest value in the same slot (and head).
    difference : Difference or None
        The first difference that exceeds the tolerance; None if there is none.
    largest_logits_share : float
        The largest difference of the logits, relative to the largest value in the same slot; NaN if a value is NaN.
    largest_rows_share, largest_states_share : float or None
        The same for live cache rows and for states, relative to the largest value in the same slot and head; None if they were not
        compared, or if the model has none.
    equal_tokens, tokens : int
        Number of equal greedy choices, and number of compared ones.
    token_difference : TokenDifference or None
        The first greedy choice that differs; None if there is none.
    """

    first: str
    second: str
    dtype: str
    tolerance: float
    difference: Difference | None
    largest_logits_share: float
    largest_rows_share: float | None
    equal_tokens: int
    tokens: int
    token_difference: TokenDifference | None
    largest_states_share: float | None = None

    @property
    def agrees(self) -> bool:
        """True if no difference exceeds the tolerance."""
        return self.difference is None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of several paths, pair by pair.

    Parameters
    ----------
    paths : tuple of PathRun
        In the order given; the first one chose the tokens.
    pairs : tuple of PairComparison
        Every pair of paths.
    steps : int
        Decode steps after the prefill.
    prompt_lengths : tuple of int
        Tokens of each prompt.
    continuations : tuple of tuples of int
        For each slot, the tokens that the decode steps were given.
    live_rows : bool
        True if live cache rows and states were compared, False if only logits were.
    """

    paths: tuple[PathRun, ...]
    pairs: tuple[PairComparison, ...]
    steps: int
    prompt_lengths: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    live_rows: bool

    @property
    def agrees(self) -> bool:
        """True if every pair of paths agrees."""
        return all(pair.agrees for pair in self.pairs)


def comparison_lines(comparison: Comparison) -> list[str]:
    """Describe a comparison in lines of plain text.

    Parameters
    ----------
    comparison : Comparison
        The result of :func:`~trt_kvcache.polygraphy.path_comparison.compare_paths`.

    Returns
    -------
    list of str
        For each pair the result, the first difference if there is one, and the largest differences.
    """
    lines = []
    for pair in comparison.pairs:
        verdict = "agree" if pair.agrees else "DIFFER"
        steps = f"a prefill and {_count(comparison.steps, 'decode step')}"
        lines.append(f"{pair.first} and {pair.second} {verdict}: {_compared(pair)} of {steps}")
        if pair.difference is not None:
            lines += [f"  {line}" for line in difference_lines(pair.difference, pair.first, pair.second)]
        kept = "".join(f", of {what.replace(' cache', '')} {share:.2g}" for what, share in _shares(pair).items())
        lines.append(
            f"  largest difference of logits {pair.largest_logits_share:.2g}{kept}, relative to the largest value of the slot and head "
            f"({pair.dtype}: at most {pair.tolerance:.2g})"
        )
        lines.append(f"  greedy tokens: {pair.equal_tokens} of {pair.tokens} equal{_first_token(pair)}")
    return lines


def difference_lines(difference: Difference, first: str, second: str) -> list[str]:
    """Describe a difference in two lines: where it is, and the values there."""
    step = "the prefill" if difference.step == 0 else f"decode step {difference.step}"
    place = [] if difference.layer is None else [_layer(difference), difference.kind]
    place.append(f"slot {difference.slot}")
    place += [f"{name} {getattr(difference, name)}" for name in ("head", "position", "channel") if getattr(difference, name) is not None]
    if difference.element is not None:
        place.append(f"{'token' if difference.kind == 'logits' else 'element'} {difference.element}")
    return [
        f"first at {step} in the {_KINDS[difference.kind]}: {', '.join(place)} (`{difference.tensor}`)",
        f"{first} has {difference.values[0]:.9g}, {second} has {difference.values[1]:.9g}: {difference.distance:.3g} apart, "
        f"allowed {difference.allowed:.3g} ({_count(difference.count, 'value')} too far apart in this tensor)",
    ]


def _compared(pair: PairComparison) -> str:
    first, *others = "logits", *_shares(pair)
    return f"{', '.join([first, *others[:-1]])} and {others[-1]}" if others else first


def _shares(pair: PairComparison) -> dict[str, float]:
    """Return the largest differences of K, V and states, as far as they were compared."""
    shares = {"live cache rows": pair.largest_rows_share, "states": pair.largest_states_share}
    return {what: share for what, share in shares.items() if share is not None}


def _layer(difference: Difference) -> str:
    """Return the layer in words: its index in the model if known, else among the attention layers or the layers with states."""
    if difference.decoder_layer is not None:
        return f"layer {difference.decoder_layer} ({difference.mixer})"
    return f"layer {difference.layer}" + (" of those with states" if difference.kind.endswith("state") else "")


def _first_token(pair: PairComparison) -> str:
    if pair.token_difference is None:
        return ""
    where = pair.token_difference
    after = "the prefill" if where.step == 0 else f"decode step {where.step}"
    return f"; first different after {after} in slot {where.slot}: {where.tokens[0]} and {where.tokens[1]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
