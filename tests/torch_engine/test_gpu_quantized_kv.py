"""The torch engine on a GPU over K and V in fp8 and int8, and prompts that share what they begin with."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.models import write_model
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.torch_engine.test_gpu import SHAPES, SIZES, compare  # noqa: E402
from trt_kvcache import InferenceSession  # noqa: E402
from trt_kvcache.polygraphy.live_rows import live_rows, rows_names  # noqa: E402
from trt_kvcache.session import shared_prompts  # noqa: E402

pytestmark = pytest.mark.gpu

#: Relative to the largest logit: sums in another order may move an element of K or V to the next code.
TOLERANCES = {"fp8": {"bfloat16": 0.3}, "int8": {"bfloat16": 0.12}}
SHARED = [token % 31 + 3 for token in range(0, 160, 5)]


def small_model(folder, head_dim):
    heads, kv_heads = SHAPES[head_dim]
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 2}
    return write_model(folder / "model", **changes, torch_dtype="bfloat16")


@pytest.mark.parametrize("kind", list(TOLERANCES))
@pytest.mark.parametrize("head_dim", SHAPES)
def test_logits_are_those_of_the_reference_engine(head_dim, kind, tmp_path):
    folder, options = small_model(tmp_path, head_dim), {**SIZES, "dtype": "bfloat16", "kv_dtype": kind}
    with (
        InferenceSession.from_model(folder, engine="torch", **options) as ours,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        assert ours.engine._kernel_inputs is not None
        compare(ours, reference, "bfloat16", TOLERANCES[kind])


@pytest.mark.parametrize("kind", [None, *TOLERANCES])
def test_what_prompts_share_runs_once(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_prompts, "WORTH_SHARING", 2)
    options = {**SIZES, "dtype": "bfloat16", **({} if kind is None else {"kv_dtype": kind})}
    prompts = [[*SHARED, 1], [*SHARED, 2]]
    with InferenceSession.from_model(small_model(tmp_path, 64), engine="torch", **options) as session:
        handles = [session.submit(prompt, max_new_tokens=4) for prompt in prompts]
        while not all(handle.tokens for handle in handles):
            session.step()
        assert [handle.reused_tokens for handle in handles] == [0, len(SHARED)]
        rows = live_rows(session.cache)
        for name in (name for layer in range(2) for name in rows_names(layer)):
            first, second = rows[name][:2, :, : len(SHARED)]
            assert np.array_equal(first, second)
            assert first.any(-1).all()
        while session.step():
            pass
        assert [len(handle.tokens) for handle in handles] == [4, 4]
