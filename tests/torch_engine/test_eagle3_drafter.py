"""Drafts of an EAGLE-3 head over the torch engine, by tests of the reference engine, and hidden states of layers of every family."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.eagle3 import write_head, write_model, write_ring_head, write_ring_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import by_prompt, hidden_rows
from tests.paths import GOLDEN
from tests.reference.rig import golden
from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_eagle3_drafter import (  # noqa: E402
    folder,  # noqa: F401
    head,  # noqa: F401
    opens,  # noqa: F401
    ring,  # noqa: F401
    ring_head,  # noqa: F401
    test_a_head_in_the_format_of_speculators,  # noqa: F401
    test_a_head_of_all_tokens_may_have_the_language_model_head_of_the_model,  # noqa: F401
    test_a_head_that_is_right_is_accepted_and_one_of_the_same_weights_in_another_order_is_not,  # noqa: F401
    test_a_model_with_states,  # noqa: F401
    test_a_step_comes_after_the_head_and_there_is_one,  # noqa: F401
    test_an_engine_takes_a_head_of_its_own_hidden_states,  # noqa: F401
    test_hidden_states_are_those_before_the_layers_reduced,  # noqa: F401
    test_hidden_states_of_models_with_other_weights,  # noqa: F401
    test_logits_of_the_head,  # noqa: F401
    test_options_that_round,  # noqa: F401
    test_the_tokens_are_those_without_drafts,  # noqa: F401
)
from tests.session.test_mtp_drafter import Open, drafter_of, params  # noqa: E402
from tests.torch_engine.fake_cuda import FakeCuda, FakeCudaDevice  # noqa: E402
from tests.torch_engine.test_families import FAMILIES  # noqa: E402
from trt_kvcache import InferenceSession  # noqa: E402
from trt_kvcache.session import open_model as opening  # noqa: E402
from trt_kvcache.torch_engine import engine  # noqa: E402


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "engine", "torch")


@pytest.mark.parametrize("model", [*FAMILIES, "gemma4", "gemma4-ple", "gemma4-shared"])
def test_hidden_states_of_all_layers_are_those_of_numpy(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parallel layers, layers of a single part, and layers with a scale too. Each layer is asked for, the last one first."""
    monkeypatch.setattr(opening, "hidden_layers_for", lambda draft, config: tuple(range(config.num_layers, -1, -1)))
    ids, found = golden(model)[0].tolist(), []
    for kind in ("numpy", "torch"):
        sizes: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 24, "max_prefill_length": 5, "dtype": "float32"}
        with InferenceSession.from_model(GOLDEN / model, engine=kind, **sizes) as session:
            session.prefill([ids[:9], ids[4:7]])
            session.decode([3, 4])
            found.append(np.concatenate([hidden_rows(session, 0, 10), hidden_rows(session, 1, 4)]))
    layers, hidden = session.model.num_layers + 1, session.model.hidden_size
    assert found[0].shape == (14, layers * hidden)
    for place in range(layers):
        one, other = (states[:, place * hidden : (place + 1) * hidden] for states in found)
        assert_close(other, one, 1e-4)
    parts = np.split(found[0], layers, -1)
    assert all((one != other).any() for one, other in itertools.pairwise(parts))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 1e-1)])
def test_reduced_hidden_states_are_those_of_numpy(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Their rows have the dtype of the activations, in NumPy float32."""
    model = write_model(tmp_path / "model", scale=0.1)
    place = write_head(tmp_path / "head", model, scale=0.1, embedding=True, hidden_size=24, target_hidden_size=32)
    found = []
    for kind, rows in (("numpy", "float32"), ("torch", dtype)):
        sizes: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 24, "max_prefill_length": 5, "dtype": dtype}
        with InferenceSession.from_model(model, engine=kind, draft=place, **sizes) as session:
            session.prefill([[*range(3, 12)], [4, 5, 6]])
            session.decode([3, 4])
            of_model, of_head = session._engine, drafter_of(session)._runner.engine
            assert {of_model.hidden_states.dtype, of_head.hidden_states.dtype, of_head.hidden_inputs.dtype} == {rows}  # type: ignore[attr-defined]
            found.append(np.concatenate([hidden_rows(session, 0, 10), hidden_rows(session, 1, 4)]))
    assert found[0].shape == (14, 24)
    assert_close(found[1], found[0], tolerance)
    assert len(np.unique(found[0])) > 300


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(engine, "torch_device", lambda memory: FakeCudaDevice(cuda, 10**8))
    return cuda


def test_steps_that_are_captured_hand_out_hidden_states_and_read_them(
    opens: Open,  # noqa: F811
    ring: Path,  # noqa: F811
    ring_head: Path,  # noqa: F811
    captured: FakeCuda,
) -> None:
    prompts, asked = ring_prompts(5), params()
    expected = by_prompt(opens(None, ring, engine="numpy").generate(prompts, asked))
    session = opens(ring_head, ring)
    for _ in range(3):  # the second run captures, the third one replays
        assert by_prompt(session.generate(prompts, asked)) == expected
    assert session.statistics.acceptance_rate > 0.95
    assert captured.replays > captured.captures > 5


def test_a_ring_of_the_sizes_of_kernels(opens: Open, tmp_path: Path) -> None:  # noqa: F811
    """The models of the tests on a GPU."""
    prompts, asked = ring_prompts(3), params()[:3]
    model = write_ring_model(tmp_path / "model", hidden_size=64, head_dim=64)
    session = opens(write_ring_head(tmp_path / "head", model, head_dim=64), model)
    assert by_prompt(session.generate(prompts, asked)) == by_prompt(opens(None, model).generate(prompts, asked))
    assert session.statistics.acceptance_rate > 0.95
