"""``first_difference``: the first difference between outputs of two runners. Pure functions of arrays."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.polygraphy.live_rows import LENGTHS

Arrays = np.ndarray[Any, Any]

#: Kinds of outputs.
Kind = Literal["K", "V", "conv state", "recurrent state", "logits", "length"]

#: Names of the outputs of a layer, and their kinds.
_LAYER_OUTPUTS: dict[str, Kind] = {
    DEFAULT_NAMES.k_cache: "K",
    DEFAULT_NAMES.v_cache: "V",
    DEFAULT_NAMES.conv_state: "conv state",
    DEFAULT_NAMES.recurrent_state: "recurrent state",
}

#: Axes of an output by kind.
_AXES: dict[Kind, tuple[str, ...]] = {
    "K": ("slot", "head", "position", "element"),
    "V": ("slot", "head", "position", "element"),
    "conv state": ("slot", "channel", "element"),
    "recurrent state": ("slot", "head", "channel", "element"),
    "logits": ("slot", "element"),
    "length": ("slot",),
}


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
        Index among the attention layers for K and V, or among the layers with states; None for logits and lengths.
    kind : {"K", "V", "conv state", "recurrent state", "logits", "length"}
        Kind of the output.
    slot : int
        Slot of the cache.
    head : int or None
        KV head, or head of a recurrent state; None for the others.
    position : int or None
        Token position in the sequence, of K and V; None for the others.
    element : int or None
        Index into the row of the head, or token of the vocabulary for logits; of a conv state one of the last inputs; None for a length.
    values : pair of float
        The values of the two paths.
    allowed : float
        The largest accepted distance between them.
    count : int
        Number of elements of this output that differ by more than the tolerance.
    channel : int or None
        Channel of a conv state, or of the head of a recurrent state; None for the others.
    decoder_layer : int or None
        Index among all layers of the model; None if it is not known, and for logits and lengths.
    mixer : str or None
        Token mixer of that layer: ``"attention"``, ``"short_conv"``, ``"mamba2"``, ...; None if ``decoder_layer`` is None.
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
    channel: int | None = None
    decoder_layer: int | None = None
    mixer: str | None = None

    @property
    def distance(self) -> float:
        """Absolute difference of the two values."""
        return abs(self.values[0] - self.values[1])


@dataclass(frozen=True)
class Outcome:
    """Result of comparing two arrays of one output."""

    share: float
    wrong: Arrays
    allowed: Arrays


@dataclass(frozen=True)
class Output:
    """One output of a runner."""

    name: str
    layer: int | None
    kind: Kind


def outputs_in_order(names: Iterable[str]) -> Iterator[Output]:
    """Yield the outputs of a runner in the order of computation, so that the first difference is the cause: lengths, layers, logits."""
    names = list(names)
    if LENGTHS in names:
        yield Output(LENGTHS, None, "length")
    for name in names:
        without_index, _, index = name.rpartition("_")
        kind = _LAYER_OUTPUTS.get(without_index + "_{i}")
        if kind is not None and index.isdecimal():
            yield Output(name, int(index), kind)
    yield Output(DEFAULT_NAMES.logits, None, "logits")


def compare_arrays(first: Arrays, second: Arrays, tolerance: float) -> Outcome:
    """Compare two arrays of equal shape, relative to the largest value of ``first`` in the same slot (and head)."""
    # Not relative to the element itself: a small element has the rounding errors of its neighbours. Equal infinities are equal. NaN differs
    # from everything, including NaN: neither logits nor live rows may have it.
    axes = {1: (), 2: (1,), 3: (1, 2), 4: (2, 3)}[first.ndim]
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.max(np.abs(first), axis=axes, keepdims=True, initial=0, where=np.isfinite(first)).astype(np.float64)
        distance = np.where(first == second, 0.0, np.abs(first.astype(np.float64) - second))
    allowed = scale * tolerance
    shares = np.divide(distance, scale, out=np.where(distance == 0, 0.0, np.inf), where=scale > 0)
    shares[np.isnan(distance)] = np.nan
    return Outcome(float(shares.max(initial=0)), ~(distance <= allowed), allowed)


def first_difference(step: int, output: Output, first: Arrays, second: Arrays, outcome: Outcome) -> Difference | None:
    """Return the first element that differs by more than the tolerance, ordered by slot, head, position or channel, element."""
    places = np.argwhere(outcome.wrong)
    if not len(places):
        return None
    place = tuple(int(index) for index in places[0])
    axes = dict(zip(_AXES[output.kind], place, strict=True))
    return Difference(
        step=step,
        tensor=output.name,
        layer=output.layer,
        kind=output.kind,
        slot=axes["slot"],
        head=axes.get("head"),
        position=axes.get("position"),
        channel=axes.get("channel"),
        element=axes.get("element"),
        values=(float(first[place]), float(second[place])),
        allowed=float(np.broadcast_to(outcome.allowed, first.shape)[place]),
        count=len(places),
    )
