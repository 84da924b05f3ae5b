"""Hidden states and EAGLE-3 heads with the kernels, on the emulated device, some of which overwrite the residual stream."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.eagle3 import write_head, write_model, write_ring_head, write_ring_model
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import always_drafting, by_prompt, hidden_rows
from tests.simt.standin import needs_standin
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_mtp_drafter import drafter_of  # noqa: E402
from tests.torch_engine.test_kernels import SIZES, calls  # noqa: E402, F401
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager, ReferenceEngine, SamplingParams  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.session import open_model as opening  # noqa: E402
from trt_kvcache.session.hidden_states import downloaded  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402

pytestmark = [needs_standin, pytest.mark.device]


def test_hidden_states_of_all_layers_are_those_of_numpy(memory, calls):  # noqa: F811
    checkpoint, found = RandomCheckpoint(mixed_model(64, 128, 256, 64)), []
    kv = cache_config(checkpoint.config, **SIZES, dtype="float16")
    options = {"kv": kv, "max_prefill_length": 7, "hidden_layers": (5, 0, 1, 4, 2, 3)}
    for opens, place in ((TorchEngine.open, memory), (ReferenceEngine, HostMemory())):
        with InferenceSession(opens(checkpoint, **options, memory=place), KVCacheManager(kv, memory=place)) as session:
            session.prefill([[*range(11)], [3, 4]])
            session.decode([5, 6])
            found.append(np.concatenate([hidden_rows(session, 0, 12), hidden_rows(session, 1, 3)]))
    assert calls["add_rms_norm"] > 0
    for ours, expected in zip(*(np.split(one, 6, -1) for one in found), strict=True):
        assert_close(ours, expected, 2e-2)


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}], ids=str)
def test_a_step_of_a_head_reduces_and_leaves_its_hidden_states_as_they_are(memory, calls, tmp_path, monkeypatch, changes):  # noqa: F811
    monkeypatch.setattr(opening, "_torch_memory", lambda options: memory)
    model = write_model(tmp_path / "model", hidden_size=64, head_dim=64, scale=0.1)
    place = write_head(tmp_path / "head", model, head_dim=64, scale=0.1, **changes)
    options, found = {"dtype": "float16", "max_batch_size": 1, "max_sequence_length": 24, "max_prefill_length": 4}, []
    for engine in ("numpy", "torch"):
        with InferenceSession.from_model(model, engine=engine, draft=place, **options) as session:
            session.prefill([[5, 6, 7, 8]])
            states, own = session._runner.hidden_states.rows(0, 0, 4), drafter_of(session)
            own._inputs.read_from(0, states)
            [logits] = own._batch.append([[6, 7, 8, 9]])
            engine_of_head = own._runner.engine
            found.append((downloaded(states), downloaded(engine_of_head.hidden_states.table[:4]), logits[3:40]))
            assert np.isneginf(np.delete(logits, np.arange(3, 40))).all()
            np.testing.assert_array_equal(engine_of_head.hidden_inputs.table[:4].numpy(), states.numpy())
    assert calls["add_rms_norm"] > 0
    for ours, expected in zip(found[1], found[0], strict=True):
        assert_close(ours, expected, 2e-2)


def widths_ahead(session, monkeypatch):
    """Return a list to which the width of each verification that runs ahead is added."""
    found, runner = [], session._runner
    run_ahead = runner.run_ahead
    monkeypatch.setattr(runner, "run_ahead", lambda count, width, **options: (found.append(width), run_ahead(count, width, **options))[1])
    return found


def test_a_head_that_is_right_is_accepted(memory, calls, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(opening, "_torch_memory", lambda options: memory)
    model = write_ring_model(tmp_path / "model", hidden_size=64, head_dim=64)
    head = write_ring_head(tmp_path / "head", model, head_dim=64)
    options = {"dtype": "float16", "max_batch_size": 2, "max_sequence_length": 24}
    prompts, params = ring_prompts(2), SamplingParams(max_new_tokens=12, ignore_eos=True)
    with InferenceSession.from_model(model, engine="numpy", **options) as plain:
        expected = by_prompt(plain.generate(prompts, params))
    with InferenceSession.from_model(model, engine="torch", draft=head, **options) as session:
        always_drafting(session)
        widths = widths_ahead(session, monkeypatch)
        assert session.cache.memory is memory
        assert by_prompt(session.generate(prompts, params)) == expected
        assert session.statistics.draft_tokens > 10
        assert session.statistics.acceptance_rate == 1
        assert set(widths) >= {4}, "the next draft of three tokens is verified ahead"
    assert calls["attend"] > 0
    assert calls["linear"] > 0
