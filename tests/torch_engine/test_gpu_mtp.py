"""Drafts of an MTP head on a GPU: steps that are captured hand out hidden states, and read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mtp import ring_prompts, write_mtp_model, write_ring_model
from tests.helpers.sessions import always_drafting, by_prompt
from tests.torch_engine.needs_torch import need_torch

need_torch()

from trt_kvcache import InferenceSession, SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu

OPTIONS = {"engine": "torch", "max_batch_size": 3, "max_sequence_length": 64}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 9], [8], [9, 10, 11, 12, 13], [3, 4]]


def params(count: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=40, ignore_eos=True, seed=seed, temperature=temperature) for seed in range(count)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_head_that_is_right_is_accepted(tmp_path: Path, dtype: str, count: int) -> None:
    model, prompts = write_ring_model(tmp_path / "ring", head_dim=64), ring_prompts(count)
    with InferenceSession.from_model(model, dtype=dtype, **OPTIONS) as plain:
        expected = by_prompt(plain.generate(prompts, params(count, 0.0)))
    with InferenceSession.from_model(model, dtype=dtype, draft="mtp", **OPTIONS) as session:
        always_drafting(session)
        assert not session.cache.memory.is_host
        for _ in range(3):  # the second run captures, the third one replays
            assert by_prompt(session.generate(prompts, params(count, 0.0))) == expected
        assert session.statistics.acceptance_rate > 0.95


def test_the_tokens_are_those_of_numpy(tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "model", head_dim=64, scale=0.1)  # of which some drafts are accepted, by chance
    found = []
    for engine in ("numpy", "torch"):
        with InferenceSession.from_model(model, draft="mtp", **{**OPTIONS, "engine": engine}) as session:
            found.append([by_prompt(session.generate(PROMPTS, params(len(PROMPTS), 0.9))) for _ in range(2)])
            assert session.statistics.accepted_tokens > 0
    assert found[0] == found[1]
