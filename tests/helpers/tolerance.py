"""How far two floating-point results may be apart and still be the same.

Every limit is relative to the largest value of what is expected. BLAS chooses its kernels, and so the order of its sums, by
the CPU and by the shapes of a product; the rounding errors of a sum grow with its largest terms, not with the single result.
"""

import numpy as np

#: Two ways to the same float32 result: sums in another order. Seen: 1.3e-6 on CPUs with and without AVX2 and AVX-512, and 1.3e-5
#: with terms in shuffled orders (``tests/cpus``), which models with states magnify most.
SAME_SUMS = 5e-5


def assert_close(actual, expected, tolerance=SAME_SUMS):
    """Fail unless ``|actual - expected| <= tolerance * max|expected|`` everywhere."""
    actual, expected = (np.asarray(values).astype(np.float64) for values in (actual, expected))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=0))


def assert_same_choice(logits, expected, tolerance=SAME_SUMS):
    """Fail unless the likeliest token of ``logits`` (n,) is that of ``expected``, or as likely there within the tolerance."""
    assert expected[np.argmax(logits)] >= expected.max() - 2 * tolerance * np.abs(expected).max()
