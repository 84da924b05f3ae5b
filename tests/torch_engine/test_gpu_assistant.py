"""Drafts of a Gemma 4 assistant on a GPU: steps that are captured read the cache of the model where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.assistants import write_assistant, write_model, write_ring_assistant, write_ring_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import always_drafting, by_prompt
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.torch_engine.test_gpu_eagle3 import OPTIONS, PROMPTS, params  # noqa: E402
from trt_kvcache import InferenceSession  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 64, "global_head_dim": 128}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_assistant_that_is_right_is_accepted(tmp_path: Path, dtype: str, count: int) -> None:
    model, prompts = write_ring_model(tmp_path / "ring", hidden_size=64, **SIZES), ring_prompts(count)
    place = write_ring_assistant(tmp_path / "assistant", model, hidden_size=64, clusters=(17, 17))
    with InferenceSession.from_model(model, dtype=dtype, **OPTIONS) as plain:
        expected = by_prompt(plain.generate(prompts, params(count, 0.0)))
    with InferenceSession.from_model(model, dtype=dtype, draft=place, **OPTIONS) as session:
        always_drafting(session)
        assert not session.cache.memory.is_host
        for _ in range(3):  # the second run captures, the third one replays
            assert by_prompt(session.generate(prompts, params(count, 0.0))) == expected
        assert session.statistics.acceptance_rate > 0.95


def test_the_tokens_are_those_of_numpy(tmp_path: Path) -> None:
    """In a queue whose slots move between steps of drafts, on the stream that the assistant reads them on."""
    model = write_model(tmp_path / "model", **SIZES)
    place = write_assistant(tmp_path / "assistant", model, clusters=(12, 4))
    found = []
    for engine in ("numpy", "torch"):
        with InferenceSession.from_model(model, draft=place, **{**OPTIONS, "engine": engine, "dtype": "float32"}) as session:
            handles = [session.submit(prompt, one) for prompt, one in zip(PROMPTS, params(len(PROMPTS), 0.9), strict=True)]
            while session.step():
                pass
            found.append([handle.tokens for handle in handles])
    assert found[0] == found[1]
