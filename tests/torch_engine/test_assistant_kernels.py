"""Drafts of a Gemma 4 assistant with the kernels, on the emulated device: attention that reads the cache of the model alone."""

from __future__ import annotations

import pytest

from tests.helpers.assistants import write_ring_assistant, write_ring_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import always_drafting, by_prompt
from tests.simt.standin import needs_standin
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_mtp_drafter import drafter_of  # noqa: E402
from tests.torch_engine.test_kernels import calls  # noqa: E402, F401
from trt_kvcache import InferenceSession, SamplingParams  # noqa: E402
from trt_kvcache.session import open_model as opening  # noqa: E402

pytestmark = [needs_standin, pytest.mark.device]


def test_an_assistant_that_is_right_is_accepted(memory, calls, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(opening, "_torch_memory", lambda options: memory)
    sizes = {"hidden_size": 64, "head_dim": 64, "global_head_dim": 64, "sliding_window": 8}
    model = write_ring_model(tmp_path / "model", **sizes)
    place = write_ring_assistant(tmp_path / "assistant", model, hidden_size=64, clusters=(17, 17))
    options = {"dtype": "float16", "max_batch_size": 2, "max_sequence_length": 24}
    prompts, params = ring_prompts(2), SamplingParams(max_new_tokens=12, ignore_eos=True)
    with InferenceSession.from_model(model, engine="numpy", **options) as plain:
        expected = by_prompt(plain.generate(prompts, params))
    with InferenceSession.from_model(model, engine="torch", draft=place, **options) as session:
        always_drafting(session)
        assert session.cache.memory is memory
        assert drafter_of(session)._parts.engine._kernel_inputs is not None
        assert by_prompt(session.generate(prompts, params)) == expected
        assert session.statistics.draft_tokens > 10
        assert session.statistics.acceptance_rate == 1
    assert calls["attend"] > 0
