"""Drafts of an EAGLE-3 head on a GPU: steps that are captured hand out hidden states of layers, and the head reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.eagle3 import write_head, write_model, write_ring_head, write_ring_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import by_prompt, hidden_states
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
    model, prompts = write_ring_model(tmp_path / "ring", hidden_size=64, head_dim=64), ring_prompts(count)
    head = write_ring_head(tmp_path / "head", model, head_dim=64)
    with InferenceSession.from_model(model, dtype=dtype, **OPTIONS) as plain:
        expected = by_prompt(plain.generate(prompts, params(count, 0.0)))
    with InferenceSession.from_model(model, dtype=dtype, draft=head, **OPTIONS) as session:
        assert not session.cache.memory.is_host
        for _ in range(3):  # the second run captures, the third one replays
            assert by_prompt(session.generate(prompts, params(count, 0.0))) == expected
        assert session.statistics.acceptance_rate > 0.95


def test_the_tokens_are_those_of_numpy(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", head_dim=64, scale=0.1)  # of which some drafts are accepted, by chance
    head = write_head(tmp_path / "head", model, head_dim=64, scale=0.1)
    found = []
    for engine in ("numpy", "torch"):
        with InferenceSession.from_model(model, draft=head, **{**OPTIONS, "engine": engine}) as session:
            found.append([by_prompt(session.generate(PROMPTS, params(len(PROMPTS), 0.9))) for _ in range(2)])
            assert session.statistics.draft_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2)])
def test_hidden_states_are_those_of_numpy(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Reduced ones, of steps of one token too, whose kernels overwrite the residual stream."""
    model = write_model(tmp_path / "model", hidden_size=64, head_dim=64, scale=0.1)
    head = write_head(tmp_path / "head", model, head_dim=64, eagle_aux_hidden_state_layer_ids=[0, 3, 7])
    found = []
    for engine in ("numpy", "torch"):
        with InferenceSession.from_model(model, draft=head, dtype=dtype, **{**OPTIONS, "engine": engine}) as session:
            session.prefill(PROMPTS[:3])
            for token in range(4):
                session.decode([token, token + 1, token + 2])
            found.append([hidden_states(session, slot, len(prompt) + 4) for slot, prompt in enumerate(PROMPTS[:3])])
            assert session.engine.hidden_states.dtype == (dtype if engine == "torch" else "float32")  # type: ignore[attr-defined]
    for one, other in zip(*found, strict=True):
        assert one.shape[1] == 64
        assert_close(other, one, tolerance)
