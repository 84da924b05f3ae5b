"""``Comparison``: what comparing several ways to run a model has shown, and the same in words."""

from dataclasses import dataclass

from trt_kvcache.polygraphy.first_difference import Difference

_KINDS = {"K": "K rows of the cache", "V": "V rows of the cache", "logits": "logits", "length": "cache length"}


@dataclass(frozen=True, kw_only=True)
class PathRun:
    """One way that the model was run.

    Parameters
    ----------
    name : str
    dtype : str
        Of its cache.
    prefill_seconds, decode_seconds : float
        Time of the prefill, and of all steps after it.
    """

    name: str
    dtype: str
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """A step at which two paths would choose different tokens: by greedy choice, after equal inputs."""

    step: int
    slot: int
    tokens: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PairComparison:
    """How two paths compare.

    Parameters
    ----------
    first, second : str
        Names of the paths.
    dtype : str
        The coarser of their dtypes.
    tolerance : float
        Largest difference that counts as none, as a share of the largest value in the same slot (and head).
    difference : Difference or None
        The first one that exceeds it.
    largest_logits_share, largest_rows_share : float
        The largest difference of the logits, and of the live cache rows, as such a share; NaN where a value is.
    equal_tokens, tokens : int
        How many greedy choices are equal, of how many.
    token_difference : TokenDifference or None
        The first that is not.
    """

    first: str
    second: str
    dtype: str
    tolerance: float
    difference: Difference | None
    largest_logits_share: float
    largest_rows_share: float
    equal_tokens: int
    tokens: int
    token_difference: TokenDifference | None

    @property
    def agrees(self) -> bool:
        """Whether no difference exceeds the tolerance."""
        return self.difference is None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How several paths compare, pair by pair.

    Parameters
    ----------
    paths : tuple of PathRun
        In the order given; the first one chose the tokens.
    pairs : tuple of PairComparison
    steps : int
        Decode steps after the prefill.
    prompt_lengths : tuple of int
        Tokens of each prompt.
    continuations : tuple of tuples of int
        The tokens that were decoded, per slot.
    live_rows : bool
        Whether live cache rows were compared, or logits only.
    """

    paths: tuple[PathRun, ...]
    pairs: tuple[PairComparison, ...]
    steps: int
    prompt_lengths: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    live_rows: bool

    @property
    def agrees(self) -> bool:
        """Whether every pair agrees."""
        return all(pair.agrees for pair in self.pairs)


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a comparison as lines of plain text: per pair whether it agrees, else where it differs first."""
    lines = []
    what = "logits and live cache rows" if comparison.live_rows else "logits"
    for pair in comparison.pairs:
        verdict = "agree" if pair.agrees else "DIFFER"
        lines.append(f"{pair.first} and {pair.second} {verdict}: {what} of a prefill and {_count(comparison.steps, 'decode step')}")
        if pair.difference is not None:
            lines += [f"  {line}" for line in difference_lines(pair.difference, pair.first, pair.second)]
        rows = f", of live rows {pair.largest_rows_share:.2g}" if comparison.live_rows else ""
        lines.append(
            f"  largest difference of logits {pair.largest_logits_share:.2g}{rows}, relative to the largest value of the slot and head "
            f"({pair.dtype}: at most {pair.tolerance:.2g})"
        )
        lines.append(f"  greedy tokens: {pair.equal_tokens} of {pair.tokens} equal{_first_token(pair)}")
    return lines


def difference_lines(difference: Difference, first: str, second: str) -> list[str]:
    """Return a difference as two lines: where it is, and what is there."""
    step = "the prefill" if difference.step == 0 else f"decode step {difference.step}"
    place = [] if difference.layer is None else [f"layer {difference.layer}", difference.kind]
    place.append(f"slot {difference.slot}")
    if difference.head is not None:
        place += [f"head {difference.head}", f"position {difference.position}", f"element {difference.element}"]
    elif difference.element is not None:
        place.append(f"token {difference.element}")
    return [
        f"first at {step} in the {_KINDS[difference.kind]}: {', '.join(place)} (`{difference.tensor}`)",
        f"{first} has {difference.values[0]:.9g}, {second} has {difference.values[1]:.9g}: {difference.distance:.3g} apart, "
        f"allowed {difference.allowed:.3g} ({_count(difference.count, 'value')} too far apart in this tensor)",
    ]


def _first_token(pair: PairComparison) -> str:
    if pair.token_difference is None:
        return ""
    where = pair.token_difference
    after = "the prefill" if where.step == 0 else f"decode step {where.step}"
    return f"; first different after {after} in slot {where.slot}: {where.tokens[0]} and {where.tokens[1]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
