"""Trees of draft tokens on a GPU that TensorRT for RTX takes. **This test has not run on a GPU yet.**"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.models import write_model
from tests.helpers.rtx_gpu import need_rtx_gpu
from trt_kvcache import InferenceSession, build_engine

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

SIZES = {"max_batch_size": 3, "max_sequence_length": 128, "max_prefill_length": 96}
PROMPTS = [[5, 9, 3, 17, 2, 30, 11] * 10, [8, 1], [12]]
ROWS = [[3, 4, 5, 6, 7, 8, 9], [7, 2], [8, 9, 1]]
PARENTS = [[-1, 0, 0, 1, 2, 2, 5], [-1, 0], [-1, 0, 0]]


def logits(session: InferenceSession) -> list[np.ndarray[Any, Any]]:
    """Return the logits of trees that become a graph, of chains of the same shape, and of decode steps after a path."""
    with session:
        steps = [session.prefill(PROMPTS)]
        for parents in (PARENTS, None, PARENTS, PARENTS, None):
            found = session.verify(ROWS, parents)
            steps += [of_slot[: len(row)] for of_slot, row in zip(found, ROWS, strict=True)]
        session.verify(ROWS, PARENTS)
        session.accept(paths=[[0, 2, 5, 6], [0], [0, 2]])
        return [*steps, session.decode([1, 2, 3]), session.append([[3, 4], [9, 8, 7], [6]])]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_logits_of_trees_are_those_of_numpy(memory: Any, tmp_path: Path, kv_dtype: Any) -> None:
    need_rtx_gpu(memory)
    model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=2, max_position_embeddings=128)
    options: dict[str, Any] = {**SIZES, "attention": "plugin", "kv_dtype": kv_dtype}
    expected = logits(InferenceSession.from_model(model, engine="numpy", **options))
    build_engine(model, tmp_path / "engine", flavour="tensorrt_rtx", draft_tree=64, **options)
    found = logits(InferenceSession.open(tmp_path / "engine", engine="tensorrt"))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 2e-2 if kv_dtype is None else 7e-2)
