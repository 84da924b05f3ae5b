"""Drafts of a Gemma 4 assistant, which reads K and V of the model in place: logits, and tokens that are those without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint.folders import edit_config
from tests.helpers.assertions import assert_close
from tests.helpers.assistants import (
    FULL,
    READ,
    SLIDING,
    AssistantInFloat64,
    write_assistant,
    write_model,
    write_ring_assistant,
    write_ring_model,
)
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import ahead, by_prompt, draft_lengths, draft_logits, drain, hidden_rows
from tests.session.reference_sessions import OPTIONS
from tests.session.test_mtp_drafter import PROMPTS, Open, Watched, drafter_of, params, random_program
from trt_kvcache import InferenceSession
from trt_kvcache.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("choice_of_drafts")

CLUSTERS = (12, 4)  # of the 72 token ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return write_assistant(tmp_path_factory.mktemp("models") / "assistant", folder)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ring_model(tmp_path_factory.mktemp("models") / "ring")


@pytest.fixture(scope="module")
def ring_assistant(tmp_path_factory: pytest.TempPathFactory, ring: Path) -> Path:
    return write_ring_assistant(tmp_path_factory.mktemp("models") / "ring_assistant", ring)


@pytest.fixture
def opens(folder: Path) -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(draft: Any, model: Path = folder, **options: Any) -> InferenceSession:
        sessions.append(InferenceSession.from_model(model, **{**OPTIONS, "max_batch_size": 3, "draft": draft, **options}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


class Checked:
    """Watches the assistant of a session, and compares its logits with those in float64, over K, V and states of another session."""

    def __init__(self, session: InferenceSession, assistant: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draft_lengths(monkeypatch, lambda drafting: 3)
        self.watched = Watched(drafter_of(session))
        self._oracle, self._assistant, self._model = AssistantInFloat64(assistant, model), assistant, model
        self.logits = draft_logits(drafter_of(session), monkeypatch)

    def check(self) -> None:
        found = iter(self.logits)
        with InferenceSession.from_model(self._model, draft=self._assistant, **OPTIONS) as plain:
            for tokens, _, draft in self.watched.seen:
                plain.prefill([tokens[:-1]])
                kv, state = self._kv(plain, len(tokens) - 1), hidden_rows(plain, 0, len(tokens) - 1)[-1]
                for token, following in zip([tokens[-1], *draft], draft, strict=False):
                    expected, state = self._oracle(token, state, kv, len(tokens) - 2)
                    logits = next(found)[0]
                    known = np.isfinite(expected)
                    assert_close(logits[known], expected[known])
                    assert np.isneginf(logits[~known]).all()
                    assert following == expected.argmax()
        assert len(self.logits) > 20
        assert next(found, None) is None

    def _kv(self, session: InferenceSession, count: int) -> dict[str, Any]:
        window = self._oracle.config["text_config"]["sliding_window"]
        first = {FULL: 0, SLIDING: max(count - window, 0)}
        sides = {kind: session.cache.get_separate_kv_cache(layer) for kind, layer in READ.items()}
        return {kind: tuple(side.numpy()[0, :, first[kind] : count] for side in pair) for kind, pair in sides.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clusters": CLUSTERS, "attention_bias": False},
        {"layer_types": [FULL], "num_hidden_layers": 1, "num_kv_shared_layers": None, "hidden_size": 40, "num_attention_heads": 2},
        {"model_type": "gemma4_unified_assistant", "architectures": ["Gemma4UnifiedAssistantForCausalLM"]},
    ],
    ids=str,
)
def test_logits(tmp_path: Path, opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Those of drafts of several tokens, whose later ones read the state of the assistant."""
    place = write_assistant(tmp_path / "assistant", folder, seed=3, **changes)
    if "model_type" in changes:
        text = {**_text(place), "model_type": "gemma4_unified_text"}
        edit_config(place, model_type=changes["model_type"], text_config={k: v for k, v in text.items() if "per_layer_input" not in k})
    session = opens(place, max_batch_size=1)
    checked = Checked(session, place, folder, monkeypatch)
    [*session.generate(PROMPTS[1:2], params()[0], draft=checked.watched)]
    checked.check()


def _text(folder: Path) -> dict[str, Any]:
    text: dict[str, Any] = AssistantInFloat64(folder, folder).config["text_config"]
    return text


def test_logits_after_its_request_has_started_again(opens: Open, folder: Path, assistant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prefix of the cache, whose K and V it reads though their hidden states are not known."""
    session = opens(assistant, max_batch_size=1, prompt_cache_bytes=1 << 20)
    checked = Checked(session, assistant, folder, monkeypatch)
    handle = session.submit(PROMPTS[0], params()[0], draft=checked.watched)
    while len(handle.tokens) < 9:
        session.step()
    session.prefill([[1, 2]])
    drain(session)
    checked.check()
    assert len({len(tokens) - len(hidden) for tokens, hidden, _ in checked.watched.seen}) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_an_assistant_that_is_right_is_accepted_and_one_of_the_same_weights_in_another_order_is_not(
    opens: Open, ring: Path, ring_assistant: Path, tmp_path: Path, temperature: float
) -> None:
    """In slots of both halves, which V of their own slots alone tells."""
    asked, prompts = params(temperature=temperature), ring_prompts(5)
    expected = by_prompt(opens(None, ring).generate(prompts, asked))
    rates = []
    for place in (ring_assistant, write_ring_assistant(tmp_path / "permuted", ring, permuted=True)):
        session = opens(place, ring)
        assert by_prompt(session.generate(prompts, asked)) == expected
        assert session.statistics.draft_tokens > 20
        rates.append(session.statistics.acceptance_rate)
    assert rates[0] > 0.95
    assert rates[1] < 0.2


def test_slots_that_move_are_read_where_they_are(opens: Open, ring: Path, ring_assistant: Path) -> None:
    """In a queue in which requests end, and others take their slots."""
    prompts, counts = ring_prompts(6), (3, 20, 5, 9, 20, 14)
    session = opens(ring_assistant, ring)
    handles = [session.submit(prompt, max_new_tokens=count, ignore_eos=True) for prompt, count in zip(prompts, counts, strict=True)]
    drain(session)
    for handle, prompt in zip(handles, prompts, strict=True):
        first = prompt[1] - prompt[1] % 16
        assert list(handle.tokens) == [first + (prompt[1] + 1 + place) % 16 for place in range(len(handle.tokens))]
    assert session.statistics.acceptance_rate == 1


def test_a_step_of_the_assistant_that_fails_leaves_the_session_as_it_was(opens: Open, ring: Path, ring_assistant: Path) -> None:
    session, prompts = opens(ring_assistant, ring), ring_prompts(3)
    expected = by_prompt(opens(None, ring).generate(prompts, params()[:3]))
    engine = drafter_of(session)._parts.engine
    handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params(), strict=False)]
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "enqueue", lambda stream: 1 / 0)
            for _ in range(20):
                try:
                    session.step()
                except ZeroDivisionError:
                    break
            else:
                pytest.fail("no step had a draft")
        session.step()
    drain(session)
    assert [list(handle.tokens) for handle in handles] == [tokens for tokens, _, _ in expected]
    assert session.statistics.acceptance_rate == 1


def test_it_runs_on_the_stream_of_the_session(opens: Open, assistant: Path) -> None:
    """After the work that moves rows of its slots."""
    session = opens(assistant)
    assert drafter_of(session)._runner.stream is session._runner.stream


def test_it_has_no_rows_of_its_own(opens: Open, assistant: Path) -> None:
    session = opens(assistant)
    before = session.cache.memory.live_nbytes
    own = drafter_of(session)._parts.cache
    assert own.nbytes == 0
    for place, layer in enumerate(READ.values()):
        assert own.get_combined_kv_cache(place).ptr == session.cache.get_combined_kv_cache(layer).ptr
    kv = [view.numpy().copy() for layer in READ.values() for view in session.cache.get_separate_kv_cache(layer)]
    [*session.generate(PROMPTS[:3], params()[:3])]
    assert session.statistics.draft_tokens
    assert session.cache.memory.live_nbytes - before < own.config.nbytes
    assert any((view.numpy() != old).any() for view, old in zip(own.get_separate_kv_cache(0), kv, strict=False))


@pytest.mark.parametrize(
    "options", [{"temperature": 1.2}, {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2, "logit_bias": {3: 4.0}}], ids=str
)
@pytest.mark.parametrize("where", ["host", "ahead"])
def test_the_tokens_are_those_without_drafts(opens: Open, assistant: Path, options: dict[str, Any], where: str) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(**options)))
    session = ahead(opens(assistant)) if where == "ahead" else opens(assistant)
    assert by_prompt(session.generate(PROMPTS, params(**options))) == expected
    assert session.statistics.draft_tokens


@pytest.mark.parametrize(
    ("model", "seed"),
    [
        *(pytest.param("ring", seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(8)),
        *(pytest.param("folder", seed, marks=[pytest.mark.slow] if seed != 5 else []) for seed in range(8)),
    ],
)
def test_random_programs(opens: Open, folder: Path, assistant: Path, ring: Path, ring_assistant: Path, model: str, seed: int) -> None:
    place, draft = (ring, ring_assistant) if model == "ring" else (folder, assistant)
    random_program(opens, place, draft, seed)


def test_a_resumed_sequence_drafts_from_its_next_token_on(opens: Open, ring: Path, ring_assistant: Path, tmp_path: Path) -> None:
    session = opens(ring_assistant, ring)
    [prompt] = ring_prompts(1)
    [*session.generate([prompt], max_new_tokens=6, ignore_eos=True)]
    session.save_snapshot(tmp_path / "saved.kv", 0)
    before = session.statistics.draft_tokens
    resumed = [event.token for event in session.resume(tmp_path / "saved.kv", max_new_tokens=9, ignore_eos=True)]
    assert resumed == [(prompt[1] + 7 + count) % 16 for count in range(9)]
    assert session.statistics.draft_tokens > before
    assert session.statistics.acceptance_rate == 1


def test_drafts_go_up_to_the_end_of_a_slot(opens: Open, ring: Path, ring_assistant: Path) -> None:
    session, [prompt] = opens(ring_assistant, ring), ring_prompts(1)
    expected = by_prompt(opens(None, ring).generate([prompt], max_new_tokens=99, ignore_eos=True))
    assert by_prompt(session.generate([prompt], max_new_tokens=99, ignore_eos=True)) == expected
    assert len(expected[0][0]) > 40
    assert session.statistics.acceptance_rate == 1


@pytest.mark.parametrize(
    "options", [{"quantize": "int8"}, {"kv_dtype": "int8"}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"attention": "mask"}], ids=str
)
def test_options_that_change_the_cache_of_the_model(opens: Open, ring: Path, ring_assistant: Path, options: dict[str, Any]) -> None:
    prompts = ring_prompts(3)
    expected = by_prompt(opens(None, ring, **options).generate(prompts, params()[:3]))
    session = opens(ring_assistant, ring, **options)
    assert by_prompt(session.generate(prompts, params()[:3])) == expected
    assert session.statistics.acceptance_rate > 0.9


def test_a_request_may_do_without(opens: Open, assistant: Path) -> None:
    session = opens(assistant)
    for draft, drafts in (("off", False), (None, True)):
        before = session.statistics.draft_tokens
        [*session.generate([PROMPTS[0]], params()[0], draft=draft)]
        assert (session.statistics.draft_tokens > before) == drafts
    with pytest.raises(ConfigError, match="draft: expected 'mtp' in a session that was opened with draft='mtp'"):
        session.generate([[1]], draft="mtp")


Edit = Callable[[Path], None]


def changed(**fields: Any) -> Edit:
    return lambda folder: edit_config(folder, **fields)


def inner(**fields: Any) -> Edit:
    return lambda folder: edit_config(folder, text_config={**_text(folder), **fields})


def tensors(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return edit


ORDERING = "masked_embedding.token_ordering"

REFUSALS: list[tuple[Edit, type[Exception], Sequence[str]]] = [
    (changed(backbone_hidden_size=48), ConfigError, ["expected an assistant for the hidden size 40 of the model, got one for 48"]),
    (inner(vocab_size=60), ConfigError, ["for the vocabulary of 72 of the model, got one for 60"]),
    (inner(head_dim=32), ConfigError, ["reads 2 heads of 16 in sliding-window attention", "got one that reads 2 of 32"]),
    (inner(num_global_key_value_heads=3), ConfigError, ["reads 1 heads of 32 in full attention", "got one that reads 3 of 32"]),
    (inner(num_kv_shared_layers=1), CheckpointError, ["num_kv_shared_layers: expected 3, all layers, got 1"]),
    (inner(enable_moe_block=True), CheckpointError, ["enable_moe_block: expected false in an assistant, got True"]),
    (inner(use_double_wide_mlp=True), CheckpointError, ["use_double_wide_mlp: expected false in an assistant, got True"]),
    (
        inner(hidden_size_per_layer_input=8, vocab_size_per_layer_input=80),
        CheckpointError,
        ["hidden_size_per_layer_input: expected 0 in an assistant, got 8"],
    ),
    (changed(tie_word_embeddings=False), CheckpointError, ["tie_word_embeddings: expected true in an assistant, got False"]),
    (changed(text_config=None), CheckpointError, ["text_config: expected an object, got None"]),
    (inner(model_type="llama"), CheckpointError, ["text_config.model_type: expected gemma4_text", "got 'llama'"]),
    (changed(num_centroids=7), CheckpointError, ["num_centroids: expected a divisor of vocab_size=72, got 7"]),
    (changed(centroid_intermediate_top_k=13), CheckpointError, ["TokenClusters.chosen: expected an integer from 1 to 12, got 13"]),
    (tensors(lambda found: found.pop("post_projection.weight")), CheckpointError, ["1 tensor(s)", "missing", "post_projection.weight"]),
    (tensors(lambda found: found.pop(ORDERING)), CheckpointError, [f"expected {ORDERING}, the 72 token ids by cluster, got none"]),
    (tensors(lambda found: found.update({ORDERING: np.arange(71)})), CheckpointError, [f"{ORDERING} of shape (72,) in int64, got (71,)"]),
    (tensors(lambda found: found.update({ORDERING: np.ones(72, np.float32)})), CheckpointError, ["in int64, got (72,) in float32"]),
    (tensors(lambda found: found.update({ORDERING: np.full(72, 5)})), CheckpointError, ["expected each token id from 0 to 71 once"]),
    (
        tensors(lambda found: found.update({"pre_projection.weight": np.ones((24, 40), np.float32)})),
        CheckpointError,
        ["pre_projection.weight of shape (24, 80)", "got (24, 40)"],
    ),
    (
        tensors(lambda found: found.update({"pre_projection.bias": np.ones(24, np.float32)})),
        CheckpointError,
        ["does not use", "pre_projection.bias"],
    ),
]


@pytest.mark.parametrize(("edit", "error", "parts"), REFUSALS)
def test_refusals(tmp_path: Path, folder: Path, edit: Edit, error: type[Exception], parts: Sequence[str]) -> None:
    place = write_assistant(tmp_path / "assistant", folder, clusters=CLUSTERS)
    edit(place)
    with pytest.raises(error) as found:
        InferenceSession.from_model(folder, **OPTIONS, draft=place)
    assert all(part in str(found.value) for part in parts), found.value


def test_a_model_without_such_layers_is_refused(opens: Open, tmp_path: Path, assistant: Path) -> None:
    kinds = {"layer_types": [FULL] * 6}
    with pytest.raises(ConfigError, match="draft: expected a model with sliding-window attention, whose K and V the assistant reads"):
        opens(assistant, write_model(tmp_path / "model", **kinds))


def test_trees_and_other_engines_are_refused(opens: Open, tmp_path: Path, folder: Path, assistant: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_tree: expected none with the assistant .*, which proposes chains, got 4"):
        opens(assistant, draft_tree=4)
    with pytest.raises(ConfigError, match="draft: expected no assistant with engine='tensorrt', got "):
        opens(assistant, engine="tensorrt")
    path = make_engine_folder(folder, tmp_path / "engine")
    with pytest.raises(ConfigError, match="draft: expected a model folder for an assistant, got the engine folder"):
        InferenceSession.open(path, engine="numpy", draft=assistant)


def test_an_assistant_is_no_model(assistant: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Gemma4Assistant .* is more than a text decoder, which is not supported"):
        InferenceSession.from_model(assistant, **OPTIONS)
