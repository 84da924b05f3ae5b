"""Comparisons of arrays with a reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.doctor.cases import CheckFailure

Array = np.ndarray[Any, Any]

#: Largest |difference| over the largest |reference| value. The reference accumulates in float32; an engine rounds every activation.
TOLERANCES = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 1e-1}


def relative_error(got: Array, expected: Array) -> float:
    """Return the largest difference over the largest expected magnitude; a value that is not finite counts as infinite."""
    difference = np.abs(got.astype(np.float32) - expected.astype(np.float32))
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max(initial=0.0) / max(float(np.abs(expected.astype(np.float32)).max(initial=0.0)), 1e-30))


def check_close(what: str, got: Array, expected: Array, tolerance: float) -> float:
    """Return the relative error; fail if it exceeds the tolerance."""
    error = relative_error(got, expected)
    if not error <= tolerance:
        place = _worst(got, expected)
        raise CheckFailure(
            f"{what}: expected a relative error of at most {tolerance:g}, got {error:.3g}; "
            f"at {list(place)} expected {float(expected[place]):.6g}, got {float(got[place]):.6g}"
        )
    return error


def check_equal(what: str, got: Array, expected: Array) -> None:
    """Fail unless the bytes are equal."""
    if got.tobytes() == expected.tobytes():
        return
    different = (got.reshape(-1).view(np.uint8) != expected.reshape(-1).view(np.uint8)).reshape(got.size, -1).any(axis=1)
    first = np.unravel_index(int(different.argmax()), got.shape)
    raise CheckFailure(
        f"{what}: expected equal bytes, got {int(different.sum())} of {got.size} values that differ; "
        f"at {[int(index) for index in first]} expected {expected[first]}, got {got[first]}"
    )


def _worst(got: Array, expected: Array) -> tuple[int, ...]:
    difference = np.abs(got.astype(np.float32) - expected.astype(np.float32))
    difference = np.where(np.isfinite(difference), difference, np.inf)
    return tuple(int(index) for index in np.unravel_index(int(difference.argmax()), difference.shape))
