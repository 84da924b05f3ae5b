"""``first_difference``: find where the outputs of two runners first differ. Pure functions over arrays."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.polygraphy.live_rows import LENGTHS, rows_names

Arrays = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One element that differs by more than the tolerance.

    Parameters
    ----------
    step : int
        0 is the prefill, n the n-th decode step.
    tensor : str
        The output, such as ``"k_cache_1"`` or ``"logits"``.
    layer : int or None
        Attention layer; None for logits and lengths.
    kind : {"K", "V", "logits", "length"}
        What the output holds.
    slot : int
        Slot of the cache.
    head : int or None
        KV head; None for logits and lengths.
    position : int or None
        Token position in the sequence; None for logits and lengths.
    element : int or None
        Index into the row of the head, or token of the vocabulary for logits; None for a length.
    values : pair of float
        The values of the two paths.
    allowed : float
        The largest accepted distance between them.
    count : int
        How many elements of this output differ by more than the tolerance.
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
        """Absolute difference of the two values."""
        return abs(self.values[0] - self.values[1])


@dataclass(frozen=True)
class Outcome:
    """How two arrays of one output compare.

    Parameters
    ----------
    share : float
        The largest difference, relative to the largest value in the same slot (and head); NaN if a value is NaN.
    wrong : ndarray of bool
        Elements that differ by more than the tolerance.
    allowed : ndarray of float
        The largest accepted difference of each element; broadcasts to the shape of ``wrong``.
    """

    share: float
    wrong: Arrays
    allowed: Arrays


@dataclass(frozen=True)
class Output:
    """One output of a runner.

    Parameters
    ----------
    name : str
        Its name.
    layer : int or None
        Attention layer; None if the output is not rows of the cache.
    kind : {"K", "V", "logits", "length"}
        What it holds.
    """

    name: str
    layer: int | None
    kind: str


def outputs_in_order(names: Container[str]) -> Iterator[Output]:
    """Yield the outputs of a runner in the order in which a model computes them, so that an error is reported where it begins.

    Parameters
    ----------
    names : container of str
        Names of the outputs that the runner returned.

    Yields
    ------
    Output
        The lengths, K and V of each attention layer, and last the logits.
    """
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

    Parameters
    ----------
    first, second : ndarray ``[A, vocab]``, ``[A, H, n, D]`` or ``[A]``
        Logits, rows of the cache, or lengths.
    tolerance : float
        The largest accepted difference, relative to the largest value of ``first`` in the same slot (and head, for rows of the cache).

    Returns
    -------
    Outcome
        How they compare.

    Notes
    -----
    A difference is not measured relative to the element itself: an element that is small beside its neighbours carries their rounding
    errors. Equal infinities are equal. NaN differs from everything, even from NaN: neither logits nor live rows may hold it.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.polygraphy.first_difference import compare_arrays
    >>> logits = np.array([[0.0, 8.0]], np.float32)
    >>> outcome = compare_arrays(logits, logits + np.array([0.5, 0.0], np.float32), tolerance=0.05)
    >>> outcome.share
    0.0625
    >>> outcome.wrong.tolist()
    [[True, False]]
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
    """Return the first element that differs by more than the tolerance, in the order of slot, head, position, element.

    Parameters
    ----------
    step : int
        0 is the prefill, n the n-th decode step.
    output : Output
        The output that was compared.
    first, second : ndarray
        Its values in the two paths.
    outcome : Outcome
        What :func:`compare_arrays` returned for them.

    Returns
    -------
    Difference or None
        None if no element differs by more than the tolerance.
    """
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
