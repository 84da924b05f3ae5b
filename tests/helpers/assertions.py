"""Assertions that tests share: an error names its object, what was expected and what it got; results are equal to rounding."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

import numpy as np
import pytest

Part = str | int | float
Parts = Part | tuple[Part, ...]

#: "object: expected ..., got .... Hint."
_FORM = re.compile(r"(?:(?P<object>.*?)[:;.] )?[Ee]xpected (?P<expected>.*?)(?:[,;:.]? got (?P<got>.*?))?(?:\. [A-Z`].*|\.)?", re.DOTALL)


def names(text: str, part: Part) -> bool:
    """Return whether a text contains a part that neither begins nor ends inside a word, a number or a dotted name."""
    pattern = re.escape(str(part))
    if re.match(r"\w", str(part)):
        pattern = r"(?<![\w-])(?<!\w\.)" + pattern
    if re.search(r"\w$", str(part)):
        pattern += r"(?!\w|\.\w)"
    return re.search(pattern, text) is not None


def check(message: str, about: Part, expected: Parts = (), got: Parts = (), says: Parts = ()) -> None:
    """Fail unless a message names these parts, each in its place; ``says`` may be anywhere."""
    form = _FORM.fullmatch(message)
    if expected != () or got != ():
        assert form, f"{message!r} does not say what was expected"
    found = form.groupdict() if form else {"object": message}
    for place, parts in {"object": about, "expected": expected, "got": got}.items():
        for part in parts if isinstance(parts, tuple) else (parts,):
            assert names(found.get(place) or "", part), f"the {place} part of {message!r} does not name {part!r}"
    for part in says if isinstance(says, tuple) else (says,):
        assert names(message, part), f"{message!r} does not name {part!r}"


class raises:  # reads like pytest.raises
    """Inside, an error is raised about an object, which names the expected and the given value; ``says`` may be anywhere in it."""

    value: Any  # the error, afterwards

    def __init__(self, error: type[BaseException], about: Part, expected: Parts = (), got: Parts = (), *, says: Parts = ()) -> None:
        self._error, self._parts = error, (about, expected, got, says)

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            pytest.fail(f"{self._error.__name__} was not raised")
        if not isinstance(error, self._error):
            return False
        check(str(error), *self._parts)
        self.value = error
        return True


# Every limit is relative to the largest value of what is expected. BLAS chooses its kernels, and so the order of its sums, by the CPU and
# by the shapes of a product; the rounding errors of a sum grow with its largest terms, not with the single result.

#: Two ways to the same float32 result: sums in another order. Seen: 1.3e-6 on CPUs with and without AVX2 and AVX-512, and 1.3e-5
#: with terms in shuffled orders (``tests/cpus``), which models with states magnify most.
SAME_SUMS = 5e-5


def assert_close(actual: Any, expected: Any, tolerance: float = SAME_SUMS) -> None:
    """Fail unless ``|actual - expected| <= tolerance * max|expected|`` everywhere."""
    actual, expected = (np.asarray(values).astype(np.float64) for values in (actual, expected))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=0))


def assert_same_choice(logits: Any, expected: Any, tolerance: float = SAME_SUMS) -> None:
    """Fail unless the likeliest token of ``logits`` (n,) is that of ``expected``, or as likely there within the tolerance."""
    assert expected[np.argmax(logits)] >= expected.max() - 2 * tolerance * np.abs(expected).max()
