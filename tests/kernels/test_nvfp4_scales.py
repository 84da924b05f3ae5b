"""Scales of NVFP4, and the factors of their kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from trt_kvcache.kernels.nvfp4_scales import NVFP4_SCALES_FROM_ZERO, nvfp4_kernel_factor, nvfp4_scales


def factors(count):
    """Factors of ModelOpt, and sums that are the inverse of a divisor."""
    random = np.random.default_rng(1)
    for _ in range(count):
        yield float(np.float32(2.0 ** random.uniform(-70, -8))), 0.0
        divisor = float(np.float32(random.uniform(300, 50000)))
        high = float(np.float32(1 / divisor))
        yield high, float(np.float32(1 / divisor - high))


def rounded(values):
    """Values of float64, rounded once to bfloat16."""
    fractions, exponents = np.frexp(values)
    return np.ldexp(np.rint(fractions * 256), exponents - 8)


def test_every_factor_has_one_for_the_kernels():
    """Their sums of two products of bfloat16 are the weights, whatever the scale."""
    changed = 0
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    for factor in factors(500):
        found = nvfp4_kernel_factor(factor, "bfloat16")
        changed += found != factor
        scales = nvfp4_scales(NVFP4_SCALES_FROM_ZERO, found).astype(np.float64)
        high = rounded(scales)
        sums = rounded(fp4 * high[:, None] + rounded(fp4 * rounded(scales - high)[:, None]))
        exact = fp4.astype(np.float32) * nvfp4_scales(NVFP4_SCALES_FROM_ZERO, factor)[:, None]
        np.testing.assert_array_equal(sums, exact.astype(ml_dtypes.bfloat16).astype(np.float64))
    assert 0 < changed < 50


def test_kernels_of_float16_take_the_factor_itself():
    assert all(nvfp4_kernel_factor(factor, "float16") == factor for factor in factors(20))
