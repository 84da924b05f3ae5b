"""Attention by operations of torch under a mask, which a GPU runs where no kernel fits, here in the place of the CPU's."""

import numpy as np
import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.reference.rig import Rig, random_ids  # noqa: E402
from tests.reference.test_engine import (  # noqa: E402, F401
    test_a_ragged_batch_equals_each_row_alone,
    test_a_step_writes_its_rows_and_no_other_byte,
    test_dead_rows_change_no_bit,
    test_live_rows_are_read_from_the_bound_memory,
    test_padding_rows_are_written_as_the_native_layer_does,
)
from tests.reference.test_golden import test_any_split_into_chunks_and_decode_steps, test_one_full_pass  # noqa: E402, F401
from trt_kvcache.torch_engine import engine  # noqa: E402
from trt_kvcache.torch_engine.attention import MaskedAttention  # noqa: E402


@pytest.fixture(autouse=True)
def _masked(monkeypatch):
    monkeypatch.setattr(engine, "LiveRowsAttention", MaskedAttention)


def test_that_it_runs(monkeypatch):
    seen = []
    monkeypatch.setattr(engine, "LiveRowsAttention", lambda *given: seen.append(given) or MaskedAttention(*given))
    assert np.isfinite(Rig("llama").step(random_ids(61, 1, 3), [0])).all()
    assert len(seen) == 1
