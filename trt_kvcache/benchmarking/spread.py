"""Spread of measured values: mean and standard deviation, median and upper percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MeanDeviation:
    """Mean and standard deviation of some runs.

    Parameters
    ----------
    mean : float
        Arithmetic mean.
    deviation : float
        Standard deviation of a sample (divided by n - 1); 0 for a single run.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanDeviation:
        """Return the spread of at least one value."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Percentiles:
    """Median and upper percentiles of many values, interpolated linearly between neighbours.

    Parameters
    ----------
    median, p95, p99 : float
        The values that 50, 95 and 99 % do not exceed.
    """

    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return the spread of at least one value."""
        return cls(*(float(value) for value in np.percentile(np.asarray(values, np.float64), (50, 95, 99))))
