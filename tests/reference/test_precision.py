"""What only the reference engine does: it rounds nothing but K and V, and its mask variant reads dead rows."""

from __future__ import annotations

import numpy as np
import pytest

from .rig import Rig, random_ids

MODEL, VOCAB = "llama-llama3-bias", 67


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_rows_are_rounded_once(dtype: str) -> None:
    """Layer 0 does not depend on the cache: its rows are those of the float32 engine, rounded."""
    model = {"float16": "qwen2-tied", "bfloat16": "llama-bfloat16-old"}[dtype]
    ids = random_ids(59, 1, 9)
    exact, rounded = Rig(model), Rig(model, dtype=dtype)
    exact.step(ids, [0])
    rounded.step(ids, [0])
    for wide, narrow in zip(exact.caches()[:2], rounded.caches()[:2], strict=True):
        np.testing.assert_array_equal(wide[0, :, :9].astype(narrow.dtype), narrow[0, :, :9])


def test_the_mask_variant_shows_nan_in_dead_rows() -> None:
    """As on a device, where a weight of 0 times NaN is NaN."""
    rig = Rig(MODEL, attention="mask")
    rig.poison(np.nan)
    assert np.isnan(rig.step(random_ids(VOCAB, 1, 5), [0])).all()
