"""The table of per-layer embeddings in pinned host memory, which a GPU reads: the logits are those of a table in its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.paths import GOLDEN
from tests.torch_engine.gemma4_in_blocks import write_gemma4_in_blocks
from tests.torch_engine.needs_torch import need_torch

need_torch()

import trt_kvcache  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402
from trt_kvcache.torch_engine.row_lookup import HostRows  # noqa: E402
from trt_kvcache.torch_engine.stored_rows import StoredRows  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("source", ["checkpoint", "blocks"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_steps_that_are_replayed_read_the_rows_of_their_tokens(tmp_path: Path, source: str, dtype: str) -> None:
    folder = GOLDEN / "gemma4-ple" if source == "checkpoint" else write_gemma4_in_blocks(tmp_path)
    found = []
    for place in ("device", "host"):
        options = {"engine": "torch", "per_layer_table": place, "dtype": dtype, "max_sequence_length": 64, "max_batch_size": 2}
        with trt_kvcache.load(folder, **options) as session:  # type: ignore[arg-type]
            assert isinstance(session.engine, TorchEngine)
            assert session.engine._weights is not None
            assert session.engine._weights.per_layer is not None
            table = session.engine._weights.per_layer.embedding
            rows = table.blocks if isinstance(table, StoredRows) else table
            assert isinstance(rows, HostRows) == (place == "host")
            steps = [session.prefill([[3, 1, 4, 1, 5], [9, 2]])]
            steps += [session.decode([token, 60 - token]) for token in range(12)]
            assert session.engine.graph_refusals == ()
            assert session.engine._device.graphs is not None
            assert len(session.engine._device.graphs)
            found.append(np.stack(steps))
    np.testing.assert_array_equal(*found)
