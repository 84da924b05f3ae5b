"""The PyTorch engine over K and V in fp8 and int8: what the reference engine stores and computes; on a GPU by the attention kernels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.paths import GOLDEN
from trt_kvcache import HostMemory, InferenceSession
from trt_kvcache.polygraphy.live_rows import live_rows

pytest.importorskip("torch")

TOKENS = [5, 9, 33, 41, 7, 12, 50, 3, 28, 19, 44, 2, 31]


def opened(engine, kind, dtype="float32", name="gemma2-bias"):
    sizes = {"max_batch_size": 3, "max_sequence_length": 27, "max_prefill_length": 9}
    return InferenceSession.from_model(GOLDEN / name, engine=engine, dtype=dtype, kv_dtype=kind, **sizes)


#: Sums in another order may move an element to the next stored value: 1/14 and 1/127 of the largest.
TOLERANCE = {"fp8": 0.15, "int8": 0.03}


@pytest.mark.parametrize("kind", list(TOLERANCE))
@pytest.mark.parametrize("name", ["gemma2-bias", "granitemoehybrid-bias"])
def test_logits_and_rows_are_those_of_the_reference_engine(kind, name):
    with opened("torch", kind, name=name) as session, opened("reference", kind, name=name) as expected:
        if not isinstance(session.cache.memory, HostMemory):
            pytest.skip("head dims of 16 are not those of the kernels")
        for step in (
            lambda one: one.prefill([TOKENS, TOKENS[2:4], TOKENS[1:11]]),
            lambda one: one.decode([4, 5, 6]),
            lambda one: one.append([[7, 8], [9], [1, 2, 3]]),
        ):
            assert_close(step(session), step(expected), TOLERANCE[kind])
        found, wanted = live_rows(session.cache), live_rows(expected.cache)
        for key, values in wanted.items():
            assert_close(found[key], values, TOLERANCE[kind])
        same = [np.isclose(found[key], values, rtol=1e-4).mean() for key, values in wanted.items() if "cache_0" in key]
        assert min(same) > 0.95  # nearly all elements of the first layer are stored as the same value


@pytest.mark.parametrize("kind", list(TOLERANCE))
def test_sixteen_bits_are_computed_beside_eight(kind):
    with opened("torch", kind, dtype="bfloat16") as session, opened("reference", kind) as expected:
        if not isinstance(session.cache.memory, HostMemory):
            pytest.skip("head dims of 16 are not those of the kernels")
        assert session.cache_config.kv.dtype != "bfloat16"
        assert_close(session.prefill([TOKENS]), expected.prefill([TOKENS]), 0.25)
