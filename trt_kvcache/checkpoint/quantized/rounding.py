"""Rounding a matrix to the nearest multiples of a scale, without calibration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.checkpoint.quantized.quantization import SCHEMES
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.dtypes import numpy_dtype

#: Divisors of a group's largest magnitude for its scale, by bits. The first of the best is taken.
DIVISORS: dict[int, tuple[float, ...]] = {8: (127,), 4: (8, 7, 7.5, 8.5, 9)}

#: Smallest and largest quantized value, by bits.
LIMITS = {8: (-127, 127), 4: (-8, 7)}

#: Elements that are rounded at a time: few enough for the cache of a CPU core.
_CHUNK = 1 << 18

Float32 = npt.NDArray[np.float32]


def rounded_to_nearest(values: npt.NDArray[Any], scheme: str, dtype: str) -> QuantizedWeight:
    """Round a matrix ``[out, in]`` to packed values in new memory. Scales are infinite or NaN where values are."""
    bits, group = SCHEMES[scheme]
    outputs, inputs = values.shape
    width = group or inputs
    blocks, stored_width = -(-inputs // width), -(-inputs * bits // 8)
    packed = np.empty((outputs, stored_width), np.uint8)
    scales = np.empty((outputs, blocks), numpy_dtype(dtype))

    def round_rows(rows: slice) -> None:
        groups = _groups(values[rows], blocks, width)
        with np.errstate(over="ignore", invalid="ignore"):  # groups with values that are not finite
            best = _best_scales(groups, bits, scales.dtype)
            nearest = _nearest(groups / _divisors(best)[:, None], bits)
            found = nearest.astype(np.int8).reshape(-1, blocks * width)
        scales[rows] = best.reshape(-1, blocks)
        packed[rows] = (found.view(np.uint8) if bits == 8 else _packed(found))[:, :stored_width]

    for_each(round_rows, row_slices(outputs, inputs, _CHUNK))
    stored = packed.view(np.int8) if bits == 8 else packed
    return QuantizedWeight(
        quantized_values=QuantizedValues(stored=stored, kind=f"int{bits}", shape=(outputs, inputs)),
        scales=Scales(stored=scales, block=(1, width)),
    )


def _groups(values: npt.NDArray[Any], blocks: int, width: int) -> Float32:
    """Return the groups of rows, ``[groups, width]``, padded with zeros after the last input."""
    whole = np.zeros((len(values), blocks * width), np.float32)
    whole[:, : values.shape[1]] = values
    return whole.reshape(-1, width)


def _best_scales(groups: Float32, bits: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the scale of each group with the least squared error, rounded to ``dtype``."""
    if len(DIVISORS[bits]) > 1:
        groups = np.asfortranarray(groups)  # ufuncs are faster along many groups than along a short one
    peaks = np.abs(groups).max(axis=1)
    best, *others = _candidates(peaks, bits, dtype)
    least = _squared_errors(groups, peaks, best, bits) if others else peaks
    for scales in others:
        errors = _squared_errors(groups, peaks, scales, bits)
        best, least = np.where(errors < least, scales, best), np.minimum(errors, least)
    return best


def _candidates(peaks: Float32, bits: int, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield candidate scales, rounded to ``dtype``, of groups with these largest magnitudes."""
    most = -LIMITS[bits][0]
    ends = np.finfo(np.float16 if dtype == np.float16 else np.float32)  # bfloat16 has the exponents of float32
    is_extreme = bool(((peaks < most * float(ends.tiny)) | (peaks > float(ends.max) / 2)).any())
    for divisor in DIVISORS[bits]:
        scales = (peaks / np.float32(divisor)).astype(dtype)
        yield _in_range(scales, peaks, most) if is_extreme else scales
    if is_extreme:
        scales = (peaks / np.float32(most)).astype(dtype)
        has_code = np.rint(peaks / _divisors(scales)) <= most
        yield _in_range(np.where(has_code, scales, np.nextafter(scales, dtype.type(np.inf))), peaks, most)


def _in_range(scales: npt.NDArray[Any], peaks: Float32, most: int) -> npt.NDArray[Any]:
    """Return scales that are not 0, and with which no value overflows that was finite."""
    dtype = scales.dtype
    zero, one = dtype.type(0), dtype.type(1)
    scales = np.where((scales == zero) & (peaks > 0), np.nextafter(zero, one), scales)
    largest = np.minimum(np.rint(peaks / _divisors(scales)), np.float32(most)) * scales.astype(np.float32)
    is_beyond = np.isfinite(peaks.astype(dtype)) & ~np.isfinite(largest.astype(dtype))
    return np.where(is_beyond, np.nextafter((peaks / np.float32(most)).astype(dtype), zero), scales)


def _squared_errors(groups: Float32, peaks: Float32, scales: npt.NDArray[Any], bits: int) -> Float32:
    """Return the squared error of each group, relative to its largest magnitude.

    The order of the sum, and so the choice of a scale, is the same on every CPU.
    """
    divisors = _divisors(scales)
    exact = groups / divisors[:, None]
    errors = _nearest(exact, bits)
    errors -= exact
    errors *= errors
    relative = divisors / np.where(peaks > 0, peaks, np.float32(1))
    squared: Float32 = errors.sum(axis=1) * (relative * relative)
    return squared


def _divisors(scales: npt.NDArray[Any]) -> Float32:
    """Return divisors of the values: 1 for a scale of 0, infinity or NaN."""
    factors = scales.astype(np.float32)
    return np.where((factors > 0) & np.isfinite(factors), factors, np.float32(1))


def _nearest(exact: Float32, bits: int) -> Float32:
    """Return the nearest quantized values."""
    nearest = np.rint(exact)
    return np.clip(nearest, *LIMITS[bits], out=nearest)


def _packed(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Return two values a byte, the first in the low bits."""
    nibbles = values.view(np.uint8) & np.uint8(15)
    packed: npt.NDArray[np.uint8] = nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)
    return packed
