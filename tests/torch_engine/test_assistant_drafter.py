"""Drafts of a Gemma 4 assistant over the torch engine, by tests of the reference engine; its logits are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.assistants import FULL, READ, SLIDING, AssistantInFloat64, write_assistant, write_ring_assistant, write_ring_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import by_prompt, hidden_rows
from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.session.test_assistant_drafter import (  # noqa: E402
    CLUSTERS,
    assistant,  # noqa: F401
    folder,  # noqa: F401
    opens,  # noqa: F401
    ring,  # noqa: F401
    ring_assistant,  # noqa: F401
    test_an_assistant_that_is_right_is_accepted_and_one_of_the_same_weights_in_another_order_is_not,  # noqa: F401
    test_it_has_no_rows_of_its_own,  # noqa: F401
    test_logits,  # noqa: F401
    test_options_that_change_the_cache_of_the_model,  # noqa: F401
    test_slots_that_move_are_read_where_they_are,  # noqa: F401
    test_the_tokens_are_those_without_drafts,  # noqa: F401
)
from tests.session.test_mtp_drafter import Open, drafter_of, params  # noqa: E402
from tests.torch_engine.fake_cuda import FakeCuda, FakeCudaDevice  # noqa: E402
from trt_kvcache import Checkpoint, InferenceSession  # noqa: E402
from trt_kvcache.torch_engine import engine  # noqa: E402


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "engine", "torch")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_oracle_computes_as_transformers(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """Several tokens at one position, over K and V and the hidden state that the model of transformers hands out."""
    pytest.importorskip("transformers")
    for clusters in (None, CLUSTERS):
        compare_with_transformers(tmp_path / str(clusters), folder, clusters)


def compare_with_transformers(place: Path, folder: Path, clusters: tuple[int, int] | None) -> None:  # noqa: F811
    import transformers

    write_assistant(place, folder, clusters=clusters)
    oracle, tokens = AssistantInFloat64(place, folder), torch.arange(3, 15)[None]
    model, own = (
        kind.from_pretrained(where, dtype=torch.float64, attn_implementation="eager")
        for kind, where in ((transformers.Gemma4ForCausalLM, folder), (transformers.Gemma4AssistantForCausalLM, place))
    )
    own.float().save_pretrained(place / "saved")
    own.double()
    with Checkpoint.open_assistant(place / "saved") as saved, Checkpoint.open_assistant(place) as written:
        assert replace(saved.config, dtype="float32") == written.config
        assert saved.tensor_names == written.tensor_names
        assert (saved.token_clusters is None) == (clusters is None)
    with torch.inference_mode():
        out = model(tokens, output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
        with InferenceSession.from_model(folder, draft=place, **OPTIONS) as session:
            session.prefill([tokens[0].tolist()])
            assert_close(hidden_rows(session, 0, tokens.shape[1]), out.hidden_states[-1][0].numpy())
            for kind, layer in READ.items():
                for ours, theirs in zip(session.cache.get_separate_kv_cache(layer), out.shared_kv_states[kind], strict=True):
                    assert_close(ours.numpy()[0, :, : tokens.shape[1]], theirs[0].numpy())
        window = model.config.sliding_window
        shared = {
            kind: tuple(side[:, :, -window:] if kind == SLIDING else side for side in out.shared_kv_states[kind])
            for kind in (SLIDING, FULL)
        }
        state, position = out.hidden_states[-1][:, -1:], tokens.shape[1] - 1
        of_oracle, kv = state[0, 0].numpy(), {kind: tuple(side[0].numpy() for side in pair) for kind, pair in shared.items()}
        for token in (7, 30, 61):
            embedding = model.get_input_embeddings()(torch.tensor([[token]]))
            found = own(inputs_embeds=torch.cat((embedding, state), -1), position_ids=torch.tensor([[position]]), shared_kv_states=shared)
            logits, of_oracle = oracle(token, of_oracle, kv, position)
            state, known = found.last_hidden_state, logits > -float("inf")
            assert known.sum() == (24 if clusters else 72)
            assert_close(found.logits[0, 0].numpy()[known], logits[known], 1e-6)
            assert_close(state[0, 0].numpy(), of_oracle, 1e-6)
            assert clusters is None or (found.logits[0, 0].numpy()[~known] < logits[known].min()).all()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(engine, "torch_device", lambda memory: FakeCudaDevice(cuda, 10**8))
    return cuda


def test_steps_that_are_captured_read_the_cache_of_the_model(
    opens: Open,  # noqa: F811
    ring: Path,  # noqa: F811
    ring_assistant: Path,  # noqa: F811
    captured: FakeCuda,
) -> None:
    prompts, asked = ring_prompts(5), params()
    expected = by_prompt(opens(None, ring, engine="numpy").generate(prompts, asked))
    session = opens(ring_assistant, ring)
    for _ in range(3):  # the second run captures, the third one replays
        assert by_prompt(session.generate(prompts, asked)) == expected
    assert session.statistics.acceptance_rate > 0.95
    assert captured.replays > captured.captures > 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_drafts_are_those_of_numpy(opens: Open, tmp_path: Path, dtype: str) -> None:  # noqa: F811
    """The models of the tests on a GPU: sizes of kernels, weights of several tokens of a cluster."""
    sizes = {"hidden_size": 64, "head_dim": 64, "global_head_dim": 64, "sliding_window": 8}
    model = write_ring_model(tmp_path / "model", **sizes)
    place = write_ring_assistant(tmp_path / "assistant", model, hidden_size=64, clusters=(17, 17))
    prompts, asked = ring_prompts(3), params()[:3]
    sessions = [opens(place, model, engine=kind, dtype=dtype) for kind in ("numpy", "torch")]
    found = [by_prompt(session.generate(prompts, asked)) for session in sessions]
    assert found[0] == found[1]
    for session in sessions:
        assert session.statistics.acceptance_rate > 0.95
        states: Any = drafter_of(session)._runner.engine.hidden_states  # type: ignore[attr-defined]
        assert states.dtype == ("float32" if session is sessions[0] else dtype)
