"""Where the outputs of two runners differ first: pure functions over arrays."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.polygraphy.live_rows import LENGTHS, rows_names

Arrays = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One element that differs by more than it may.

    ``step``: 0 is the prefill, n the n-th decode step.
    ``tensor``: The output, such as ``"k_cache_1"`` or ``"logits"``.
    ``layer``: Attention layer, for cache rows.
    ``kind``: {"K", "V", "logits", "length"}.
    ``head``, ``position``: KV head and token position in the sequence, for cache rows.
    ``element``: Element of the head's row, or token of the vocabulary; None for a length.
    ``values``: pair of float. What the two paths have there.
    ``allowed``: What they may differ by there.
    ``count``: Elements of this output that differ by more than they may.
    """

    step: int
    tensor: str
    layer: int | None
    kind: str
    slot: int
    head: int | None
    position: int | None
    element: int | None
    values: tuple[float, float]
    allowed: float
    count: int

    @property
    def distance(self) -> float:
        """How much they differ."""
        return abs(self.values[0] - self.values[1])


@dataclass(frozen=True)
class Outcome:
    """How two arrays of one output compare.

    ``share``: The largest difference, as a share of the largest value beside it (in the same slot, and head); NaN where a value is.
    ``wrong``: ndarray of bool. Elements that differ by more than they may.
    ``allowed``: ndarray of float. What they may differ by; broadcasts to ``wrong``.
    """

    share: float
    wrong: Arrays
    allowed: Arrays


@dataclass(frozen=True)
class Output:
    """One output of a runner: its name, the attention layer of cache rows, and a kind as in :class:`Difference`."""

    name: str
    layer: int | None
    kind: str


def outputs_in_order(names: Container[str]) -> Iterator[Output]:
    """Yield the outputs that there are in the order in which a model computes them, so that a fault shows where it starts."""
    if LENGTHS in names:
        yield Output(LENGTHS, None, "length")
    layer = 0
    while rows_names(layer)[0] in names:
        for name, kind in zip(rows_names(layer), "KV", strict=True):
            yield Output(name, layer, kind)
        layer += 1
    yield Output(DEFAULT_NAMES.logits, None, "logits")


def compare_arrays(first: Arrays, second: Arrays, tolerance: float) -> Outcome:
    """Compare two arrays of equal shape.

    Equal infinities are equal. NaN differs from everything, NaN included: neither logits nor live rows may hold it.

    ``first``, ``second``: ndarray ``[A, vocab]``, ``[A, H, n, D]`` or ``[A]``.
    ``tolerance``: They may differ by this share of the largest value of ``first`` in the same slot, and head where there are heads. So an
    element that is small beside its neighbours, and carries their rounding errors, is not measured by itself.
    """
    axes = {1: (), 2: (1,), 4: (2, 3)}[first.ndim]
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.max(np.abs(first), axis=axes, keepdims=True, initial=0, where=np.isfinite(first)).astype(np.float64)
        distance = np.where(first == second, 0.0, np.abs(first.astype(np.float64) - second))
    allowed = scale * tolerance
    shares = np.divide(distance, scale, out=np.where(distance == 0, 0.0, np.inf), where=scale > 0)
    shares[np.isnan(distance)] = np.nan
    return Outcome(float(shares.max(initial=0)), ~(distance <= allowed), allowed)


def first_difference(step: int, output: Output, first: Arrays, second: Arrays, outcome: Outcome) -> Difference | None:
    """Name the first element that is wrong, by slot, head, position, element; None where there is none."""
    places = np.argwhere(outcome.wrong)
    if not len(places):
        return None
    place = tuple(int(index) for index in places[0])
    slot, head, position, element = place if len(place) == 4 else (place[0], None, None, place[1] if len(place) == 2 else None)
    return Difference(
        step=step,
        tensor=output.name,
        layer=output.layer,
        kind=output.kind,
        slot=slot,
        head=head,
        position=position,
        element=element,
        values=(float(first[place]), float(second[place])),
        allowed=float(np.broadcast_to(outcome.allowed, first.shape)[place]),
        count=len(places),
    )
