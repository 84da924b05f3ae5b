"""Scales of NVFP4: e4m3 times the factor of a matrix; the factor is a sum of two float32."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.kernels.host_arrays import Array

#: Inputs of a scale.
NVFP4_GROUP = 16

#: The kernels read the bits of FP4 as numbers that are smaller by this, and take the factor of the scales larger by it.
NVFP4_UNIT = 2.0**126

#: All scales, and all values of FP4, that are not negative.
NVFP4_SCALES_FROM_ZERO = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
_FP4 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)

#: Limit of scales and of their factor, and the smallest factor: times the unit they are finite, and nothing is rounded to a subnormal
#: number.
NVFP4_LIMIT, _SMALLEST = 3.9, 2.0**-80

#: Changes of a factor that are tried, in units of its last place.
_CHANGES = sorted(range(-1024, 1025, 16), key=abs)


def nvfp4_scales(stored: Array, factor: tuple[Any, Any]) -> Array:
    """Return scales in e4m3 times a factor (or times one for each row), rounded to float32 as a fused multiply-add rounds."""
    scales, (high, low) = stored.astype(np.float64), factor
    rest = (stored.astype(np.float32) * np.float32(low)).astype(np.float64)
    found: Array = (scales * high + rest).astype(np.float32)  # the sum of at most 48 bits is exact
    return found


def nvfp4_factor(factor: float, divisor: float, dtype: str) -> tuple[float, float] | None:
    """Return the factor equal to a division by ``divisor`` and a product with ``factor`` in float32; None if the kernels would differ.

    A divisor becomes the sum of two float32 that is its inverse to 48 bits.
    """
    inverse = 1.0 / divisor
    with np.errstate(over="ignore", invalid="ignore"):
        high = float(np.float32(inverse))
        found = float(np.float32(high * factor)), float(np.float32((inverse - high) * factor))
    if not _SMALLEST < found[0] < NVFP4_LIMIT or nvfp4_kernel_factor(found, dtype) is None:
        return None
    expected = NVFP4_SCALES_FROM_ZERO.astype(np.float32) / np.float32(divisor) * np.float32(factor)
    return found if np.array_equal(nvfp4_scales(NVFP4_SCALES_FROM_ZERO, found), expected) else None


def kernel_factors_of(factors: Any, dtype: str) -> Array:
    """Return factors ``[n, 2]`` as the kernels take them."""
    found: Array = np.array([nvfp4_kernel_factor((high, low), dtype) for high, low in factors], np.float32) * np.float32(NVFP4_UNIT)
    return found


@lru_cache(maxsize=1024)
def nvfp4_kernel_factor(factor: tuple[float, float], dtype: str) -> tuple[float, float] | None:
    """Return the factor for which the kernels compute the weights of ``factor``; None if there is none."""
    # In bfloat16 they multiply with a scale as the sum of two bfloat16, which is much faster than with float32, but has 16 bits. So one of
    # several nearby factors is taken for which that makes no difference, whatever the scale and the value.
    if dtype != "bfloat16":
        return factor
    exact = _FP4.astype(np.float32) * nvfp4_scales(NVFP4_SCALES_FROM_ZERO, factor)[:, None]
    expected = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    for change in _CHANGES:
        changed = float(factor[0] + change * np.spacing(np.float32(factor[0]))), factor[1]
        sums = _sums_of_products(nvfp4_scales(NVFP4_SCALES_FROM_ZERO, changed))
        if all(np.array_equal(rounded, expected) for rounded in (_bfloat16(sums), _bfloat16(sums.astype(np.float32)))):
            return changed
    return None


def _sums_of_products(scales: Array) -> Array:
    """Return the products of all FP4 with scales, before they are rounded to bfloat16."""
    high = _bfloat16(scales)
    low = _bfloat16(scales - high)
    found: Array = _FP4 * high[:, None] + _bfloat16(_FP4 * low[:, None])
    return found


def _bfloat16(values: Array) -> Array:
    """Return values rounded to 8 bits in one step. A cast from float64 rounds twice, by way of float32."""
    fractions, exponents = np.frexp(values.astype(np.float64))
    found: Array = np.ldexp(np.rint(np.ldexp(fractions, 8)), exponents - 8)
    return found
