"""Drafts of the MTP head of a model: hidden states, logits of the head, and tokens that are those without drafts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoint.folders import edit_config, edit_tensors, load_file
from tests.helpers import mtp, nemotron_mtp
from tests.helpers.assertions import assert_close
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.mtp import ring_prompts, write_mtp_model, write_ring_model
from tests.helpers.quantized_models import FP8_CONFIG, fp8_blocks, write_quantized, write_values
from tests.helpers.recording import Drafter, known_truth, poison
from tests.helpers.sessions import ahead, by_prompt, draft_lengths, draft_logits, drain
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS, fails
from trt_kvcache import Checkpoint, DraftedSequence, InferenceSession, SamplingParams
from trt_kvcache.errors import CheckpointError, ConfigError
from trt_kvcache.session.head_drafter import HeadDrafter

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 9], [8], [9, 10, 11, 12, 13], [3, 4], [20, 21, 22]]
VOCAB = 79

Open = Callable[..., InferenceSession]

pytestmark = pytest.mark.usefixtures("choice_of_drafts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_model(tmp_path_factory.mktemp("models") / "mtp")


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ring_model(tmp_path_factory.mktemp("models") / "ring")


@pytest.fixture
def opens(folder: Path) -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(draft: Any, model: Path = folder, **options: Any) -> InferenceSession:
        sessions.append(InferenceSession.from_model(model, **{**OPTIONS, "max_batch_size": 3, "draft": draft, **options}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def params(count: int = 20, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=count, ignore_eos=True, **{"seed": seed, **options}) for seed in range(len(PROMPTS))]


class Watched:
    """Passes sequences on to a drafter, and keeps their tokens and hidden states, with the drafts."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.seen: list[tuple[list[int], np.ndarray[Any, Any], list[int]]] = []

    def propose(self, sequences: Sequence[DraftedSequence]) -> Any:
        drafts = self.drafter.propose(sequences)
        for one, draft in zip(sequences, drafts, strict=True):
            assert one.hidden_states is not None
            self.seen.append((one.tokens, one.hidden_states.copy(), list(draft)))
        return drafts


def drafter_of(session: InferenceSession) -> HeadDrafter:
    drafter = session._drafter
    assert isinstance(drafter, HeadDrafter)
    return drafter


def check_hidden_states(folder: Path, seen: Sequence[tuple[list[int], np.ndarray[Any, Any], list[int]]], *, copied: bool = False) -> None:
    """The head of the model makes its logits of its hidden states."""
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with InferenceSession.from_model(folder, **OPTIONS) as plain:
        for tokens, hidden, _ in seen:
            assert len(hidden) == len(tokens) - 1 or (copied and 0 < len(hidden) < len(tokens) - 1)
            logits = [plain.prefill([tokens[:1]])]
            for first in range(1, len(tokens) - 1, 4):
                part = tokens[first : min(first + 4, len(tokens) - 1)]
                logits.append(plain.verify([part])[0])
                plain.accept([len(part)])
            assert_close(hidden @ embedding.T, np.concatenate(logits)[-len(hidden) :])


@pytest.mark.parametrize("right", [0, 0.5, 1])
def test_hidden_states_are_those_of_the_tokens_in_the_cache(opens: Open, folder: Path, right: float) -> None:
    truth = known_truth([*opens(None).generate(PROMPTS[:3], params()[:3])], PROMPTS[:3])
    watched = Watched(Drafter(truth, right, vocab_size=VOCAB))
    [*opens("mtp").generate(PROMPTS[:3], params()[:3], draft=watched)]
    assert len(watched.seen) > 8
    check_hidden_states(folder, watched.seen)


def test_hidden_states_of_a_queue_whose_slots_move(opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_lengths(monkeypatch, lambda drafting: 2)
    session = opens("mtp")
    watched = Watched(drafter_of(session))
    for prompt, one, count in zip(PROMPTS, params(), (3, 20, 5, 9, 20), strict=True):
        session.submit(prompt, SamplingParams(**{**vars(one), "max_new_tokens": count}), draft=watched)
    drain(session)
    assert len(watched.seen) > 12
    check_hidden_states(folder, watched.seen)


def test_hidden_states_of_a_shared_prompt_are_copied(opens: Open, folder: Path) -> None:
    session = opens("mtp")
    watched = Watched(drafter_of(session))
    handles = [session.submit([*range(36)], one, draft=watched) for one in params(11, temperature=1.0)[:3]]
    drain(session)
    assert session.statistics.reused_tokens > 0
    assert len({tuple(handle.tokens) for handle in handles}) == 3
    check_hidden_states(folder, watched.seen)


def test_hidden_states_after_a_cached_prefix_are_those_of_the_other_tokens(opens: Open, folder: Path) -> None:
    session = opens("mtp", prompt_cache_bytes=1 << 20)
    watched = Watched(drafter_of(session))
    for tail in ([1], [2, 3]):
        [*session.generate([[*PROMPTS[0], *tail]], params()[0], draft=watched)]
    check_hidden_states(folder, watched.seen, copied=True)
    assert any(len(hidden) < len(tokens) - 1 for tokens, hidden, _ in watched.seen)


class CheckedHead:
    """Watches the head of a session of one slot, and compares its logits with those in float64."""

    def __init__(self, session: InferenceSession, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draft_lengths(monkeypatch, lambda drafting: 3)
        drafter = drafter_of(session)
        self.watched, self.model = Watched(drafter), model
        self.logits = draft_logits(drafter, monkeypatch)

    def check(self) -> None:
        config, weights = json.loads((self.model / "config.json").read_text()), load_file(self.model / "model.safetensors")
        is_nemotron = config["model_type"] == "nemotron_h"
        head_in_float64 = nemotron_mtp.head_in_float64 if is_nemotron else mtp.head_in_float64
        embedding = weights["backbone.embeddings.weight" if is_nemotron else "model.embed_tokens.weight"]
        head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
        found = iter(self.logits)
        for tokens, states, draft in self.watched.seen:
            hidden, pairs = states, tokens[len(tokens) - len(states) :]
            for token in draft:
                after, expected = head_in_float64(config, weights, embedding, head, pairs, hidden)
                assert_close(next(found)[0], expected[-1])
                hidden, pairs = np.concatenate([hidden, after[-1:]]), [*pairs, token]
        assert len(self.logits) > 30
        assert next(found, None) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 2, "num_attention_heads": 6},
        {"family": "qwen3_next-experts", "mlp_only_layers": []},
        {"family": "qwen3_5_moe"},
    ],
    ids=str,
)
def test_logits_of_the_head(tmp_path: Path, opens: Open, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Those of drafts too, which continue from the hidden states of the head."""
    model = write_mtp_model(tmp_path / "model", seed=3, **changes)
    session = opens("mtp", model)
    head = CheckedHead(session, model, monkeypatch)
    [*session.generate(PROMPTS[1:2], params()[0], draft=head.watched)]
    head.check()


def test_logits_of_the_head_after_its_request_has_started_again(opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prefix of the cache, so with fewer hidden states than before."""
    session = opens("mtp", max_batch_size=1, prompt_cache_bytes=1 << 20)
    head = CheckedHead(session, folder, monkeypatch)
    handle = session.submit(PROMPTS[0], params()[0], draft=head.watched)
    while len(handle.tokens) < 9:
        session.step()
    session.prefill([[1, 2]])
    drain(session)
    head.check()
    assert len({len(tokens) - len(hidden) for tokens, hidden, _ in head.watched.seen}) == 2


def test_a_copied_prefix_that_is_rewound_and_run_has_hidden_states(opens: Open, folder: Path) -> None:
    session = opens("mtp", max_batch_size=1, prompt_cache_bytes=1 << 20)
    for _ in range(2):
        session.prefill([PROMPTS[0]])
    assert session._batch[0].copied == len(PROMPTS[0]) - 1
    session.rewind(0, 0)
    watched = Watched(drafter_of(session))
    [*session.generate([PROMPTS[0]], params()[0], append=True, draft=watched)]
    assert watched.seen
    check_hidden_states(folder, watched.seen)


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_head_that_is_right_is_accepted_and_one_of_the_same_weights_in_another_order_is_not(
    opens: Open, ring: Path, tmp_path: Path, temperature: float
) -> None:
    asked = params(temperature=temperature)
    prompts = ring_prompts(5)
    expected = by_prompt(opens(None, ring).generate(prompts, asked))
    rates = []
    for model in (ring, write_ring_model(tmp_path / "permuted", permuted=True)):
        session = opens("mtp", model)
        assert by_prompt(session.generate(prompts, asked)) == expected
        assert session.statistics.draft_tokens > 20
        rates.append(session.statistics.acceptance_rate)
    assert rates[0] > 0.95
    assert rates[1] < 0.2


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.2}, {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2}, {"logit_bias": {3: 4.0}}], ids=str
)
@pytest.mark.parametrize("where", ["host", "ahead"])
def test_the_tokens_are_those_without_drafts(opens: Open, options: dict[str, Any], where: str) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(**options)))
    session = ahead(opens("mtp")) if where == "ahead" else opens("mtp")
    assert by_prompt(session.generate(PROMPTS, params(**options))) == expected
    assert session.statistics.draft_tokens


@pytest.mark.parametrize(
    ("model", "seed"),
    [
        *(pytest.param("ring", seed, marks=[pytest.mark.slow] if seed > 2 else []) for seed in range(8)),
        *(pytest.param("folder", seed, marks=[pytest.mark.slow] if seed else []) for seed in range(8)),
    ],
)
def test_random_programs(opens: Open, folder: Path, ring: Path, model: str, seed: int) -> None:
    random_program(opens, folder if model == "folder" else ring, "mtp", seed)


def random_program(opens: Open, place: Path, draft: str | Path, seed: int) -> None:
    """Conversations, queues with cancels and steps that fail, iterators that are left, prefix caches: with drafts as without."""
    random = Random(seed)
    options = {"prompt_cache_bytes": 1 << 20 if seed % 2 else 0, "max_batch_size": 2}
    plain, session = opens(None, place, **options), opens(draft, place, **options)
    if seed % 3 == 2:
        ahead(session)
    for _ in range(8):
        prompts = [random.choice(ring_prompts(4)) + [random.randrange(30) for _ in range(random.randrange(3))] for _ in range(2)]
        asked = [SamplingParams(max_new_tokens=random.choice([2, 9, 15]), seed=1, temperature=random.choice([0.0, 0.6])) for _ in prompts]
        match random.choice(["generate", "again", "leave", "queue", "snapshot"]):
            case "generate":
                assert by_prompt(session.generate(prompts, asked)) == by_prompt(plain.generate(prompts, asked))
            case "again" if session.cache.active_batch_size == 2:
                turns = [[*session.tokens(slot)[: random.randint(1, 9)], 4] for slot in range(2)]
                assert by_prompt(session.generate(turns, asked, reuse=True)) == by_prompt(plain.generate(turns, asked))
            case "leave":
                count = random.randint(1, 9)
                [*itertools.islice(session.generate(prompts, asked), count)]
            case "queue":
                prompts = [*prompts, *ring_prompts(3)]
                asked = [*asked, *asked, asked[0]]
                expected = [by_prompt(plain.generate([prompt], one))[0][0] for prompt, one in zip(prompts, asked, strict=True)]
                handles = [session.submit(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
                cancelled = handles[random.randrange(5)]
                for _ in range(random.randrange(4)):
                    session.step()
                    poison(session.cache)
                    if drafter_of(session)._parts.cache.nbytes:  # an assistant's are rows of the model
                        poison(drafter_of(session)._parts.cache)
                fails(session, session.step)
                cancelled.cancel()
                drain(session)
                for handle, tokens in zip(handles, expected, strict=True):
                    assert list(handle.tokens) == tokens[: len(handle.tokens)]
                    assert handle is cancelled or len(handle.tokens) == len(tokens)
            case _:
                assert by_prompt(session.generate(prompts[:1], asked[0], draft="off")) == by_prompt(plain.generate(prompts[:1], asked[0]))


def test_a_conversation_keeps_what_the_head_has_read(opens: Open, ring: Path) -> None:
    session = opens("mtp", ring)
    [prompt] = ring_prompts(1)
    first = [event.token for event in session.generate([prompt], max_new_tokens=6, ignore_eos=True)]
    watched = Watched(drafter_of(session))
    [*session.generate([[*prompt, *first, 9]], max_new_tokens=9, ignore_eos=True, reuse=True, draft=watched)]
    assert all(len(hidden) == len(tokens) - 1 for tokens, hidden, _ in watched.seen)
    assert session.statistics.acceptance_rate == 1


def test_a_resumed_sequence_drafts_from_its_next_token_on(opens: Open, ring: Path, tmp_path: Path) -> None:
    session = opens("mtp", ring)
    [prompt] = ring_prompts(1)
    [*session.generate([prompt], max_new_tokens=6, ignore_eos=True)]
    session.save_snapshot(tmp_path / "saved.kv", 0)
    before = session.statistics.draft_tokens
    resumed = [event.token for event in session.resume(tmp_path / "saved.kv", max_new_tokens=9, ignore_eos=True)]
    start = prompt[1]
    assert resumed == [(start + 7 + count) % 16 for count in range(9)]
    assert session.statistics.draft_tokens > before


def test_a_request_may_do_without(opens: Open) -> None:
    session = opens("mtp")
    for draft, drafts in (("off", False), ("mtp", True), (None, True)):
        before = session.statistics.draft_tokens
        [*session.generate([PROMPTS[0]], params()[0], draft=draft)]
        assert (session.statistics.draft_tokens > before) == drafts


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"kv_dtype": "int8"}, {"dtype": "float16"}, {"dtype": "bfloat16"}], ids=str)
def test_options_that_round(opens: Open, ring: Path, options: dict[str, Any]) -> None:
    prompts = ring_prompts(3)
    expected = by_prompt(opens(None, ring, **options).generate(prompts, params()[:3]))
    session = opens("mtp", ring, **options)
    assert by_prompt(session.generate(prompts, params()[:3])) == expected
    assert session.statistics.acceptance_rate > 0.9


def test_a_head_that_is_quantized_with_its_model(opens: Open, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in published FP8 files: all but ``mtp.fc`` is."""
    values = write_quantized(tmp_path / "fp8", str(folder), fp8_blocks(), FP8_CONFIG)
    plain = write_values(tmp_path / "values", tmp_path / "fp8", values)
    with pytest.warns(UserWarning, match="activations are not quantized"):
        session = opens("mtp", tmp_path / "fp8", max_batch_size=1)
    head = CheckedHead(session, plain, monkeypatch)
    [*session.generate(PROMPTS[1:2], params()[0], draft=head.watched)]
    head.check()


def test_a_head_shares_the_embedding_of_the_model(opens: Open) -> None:
    session = opens("mtp")
    head, model = (engine._weights for engine in (drafter_of(session)._parts.engine, session.engine))  # type: ignore[attr-defined]
    assert np.shares_memory(np.asarray(head.embedding), np.asarray(model.embedding))
    assert np.shares_memory(np.asarray(head.head), np.asarray(model.head))


def without(prefix: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)])

    return edit


def reshaped(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: np.ones((3, 5), np.float32)}))


@pytest.mark.parametrize(
    ("edit", "error", "parts"),
    [
        (without("mtp."), CheckpointError, ["expected an MTP head", "'mtp.'", "got none"]),
        (without("mtp.fc"), CheckpointError, ["1 tensor(s)", "missing", "mtp.fc.weight"]),
        (without("mtp.layers.0.self_attn.k"), CheckpointError, ["2 tensor(s)", "missing", "self_attn.k_proj.weight"]),
        (without("mtp.norm"), CheckpointError, ["missing", "model.norm.weight"]),
        (reshaped("mtp.fc.weight"), CheckpointError, ["mtp.fc.weight", "(40, 80)", "(3, 5)"]),
        (reshaped("mtp.layers.0.mlp.up_proj.weight"), CheckpointError, ["mlp.up_proj.weight", "(44, 40)", "(3, 5)"]),
        (reshaped("mtp.layers.1.mlp.up_proj.weight"), CheckpointError, ["1 tensor(s)", "does not use", "layers.1.mlp.up_proj.weight"]),
        (reshaped("mtp.embed_tokens.weight"), CheckpointError, ["does not use", "mtp.embed_tokens.weight"]),
        (lambda folder: edit_config(folder, mtp_num_hidden_layers=2), CheckpointError, ["mtp_num_hidden_layers: expected 1", "got 2"]),
        (lambda folder: edit_config(folder, mtp_num_hidden_layers=0), CheckpointError, ["mtp_num_hidden_layers: expected 1", "got 0"]),
        (lambda folder: edit_config(folder, mtp_num_hidden_layers="1"), CheckpointError, ["mtp_num_hidden_layers", "integer", "'1'"]),
        (
            lambda folder: edit_config(folder, mtp_use_dedicated_embeddings=True),
            CheckpointError,
            ["mtp_use_dedicated_embeddings: expected false", "got True"],
        ),
    ],
)
def test_refusals(tmp_path: Path, edit: Callable[[Path], None], error: type[Exception], parts: list[str]) -> None:
    model = write_mtp_model(tmp_path / "model")
    edit(model)
    with pytest.raises(error) as found:
        InferenceSession.from_model(model, **OPTIONS, draft="mtp")
    assert all(part in str(found.value) for part in parts), found.value


def test_refusals_of_other_models_engines_and_sessions(opens: Open, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"draft: expected .*\(qwen3_next, qwen3_5_text, .*\) for 'mtp', got llama"):
        InferenceSession.from_model("examples/tiny-llama", engine="numpy", draft="mtp")
    with pytest.raises(ConfigError, match="draft: expected 'mtp' in a session that was opened with draft='mtp'"):
        opens("ngram").generate([[1]], draft="mtp")


@pytest.mark.parametrize("quantize", ["", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_engine_folder(tmp_path: Path, ring: Path, quantize: str) -> None:
    """Its head is read with the dtype and the rounding of the build."""
    engine = make_engine_folder(ring, tmp_path / "engine", dtype="float16", quantize=quantize)
    tokens = []
    for draft in (None, "mtp"):
        with InferenceSession.open(engine.path, engine="numpy", draft=draft) as session:
            tokens.append(by_prompt(session.generate(ring_prompts(2), params(15)[:2])))
    assert tokens[0] == tokens[1]
    assert drafter_of(session)._parts.cache.kv_config.dtype == "float16"
    assert session.statistics.acceptance_rate > 0.95


def test_a_vision_model_in_shards(tmp_path: Path, opens: Open, folder: Path) -> None:
    """As published: names with a prefix, fields in ``text_config``, the tower and the head in a shard of their own."""
    weights = load_file(folder / "model.safetensors")
    named = {re.sub(r"^model\.", "model.language_model.", name): one for name, one in weights.items()}
    shards = {
        "model-00001-of-00002.safetensors": {name: one for name, one in named.items() if not name.startswith("mtp.")},
        "model-00002-of-00002.safetensors": {name: one for name, one in named.items() if name.startswith("mtp.")}
        | {"model.visual.patch_embed.proj.weight": np.ones(3, np.float32)},
    }
    model = tmp_path / "model"
    model.mkdir()
    for file, tensors in shards.items():
        save_file(tensors, model / file)
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {"depth": 1}}
    (model / "config.json").write_text(json.dumps({**whole, "text_config": text, "tie_word_embeddings": True}))
    of_text, of_vision = (opens("mtp", place) for place in (folder, model))
    expected = by_prompt(of_text.generate(PROMPTS, params()))
    assert by_prompt(of_vision.generate(PROMPTS, params())) == expected
    for name, one in vars(drafter_of(of_text)._parts.engine._weights.merge).items():  # type: ignore[attr-defined]
        np.testing.assert_array_equal(getattr(drafter_of(of_vision)._parts.engine._weights.merge, name), one)  # type: ignore[attr-defined]
    assert of_text.statistics.draft_tokens == of_vision.statistics.draft_tokens


def test_tokens_of_a_model_with_experts_are_those_without_drafts(tmp_path: Path, opens: Open) -> None:
    model = write_mtp_model(tmp_path / "model", family="qwen3_5_moe", seed=5)
    expected = by_prompt(opens(None, model).generate(PROMPTS, params(temperature=0.7)))
    session = opens("mtp", model)
    assert by_prompt(session.generate(PROMPTS, params(temperature=0.7))) == expected
    assert session.statistics.draft_tokens


def test_a_model_without_its_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"expected an MTP head, tensors whose names begin with 'mtp\.', got none"):
        Checkpoint.open_mtp_head(GOLDEN / "nemotron_h-experts")


@pytest.mark.parametrize("changes", [{}, {"moe_latent_size": 20, "mtp_hybrid_override_pattern": None}], ids=str)
def test_logits_of_the_head_of_nemotron_h(tmp_path: Path, opens: Open, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    model = nemotron_mtp.write_nemotron_model(tmp_path / "model", seed=3, **changes)
    session = opens("mtp", model)
    head = CheckedHead(session, model, monkeypatch)
    [*session.generate(PROMPTS[1:2], params()[0], draft=head.watched)]
    head.check()


def test_a_right_head_of_nemotron_h_is_accepted(tmp_path: Path, opens: Open) -> None:
    prompts, asked, rates = ring_prompts(5), params(temperature=0.2), []
    for permuted in (False, True):
        model = nemotron_mtp.write_nemotron_ring(tmp_path / str(permuted), permuted=permuted)
        session = opens("mtp", model)
        assert session.cache.states is not None
        assert by_prompt(session.generate(prompts, asked)) == by_prompt(opens(None, model).generate(prompts, asked))
        rates.append(session.statistics.acceptance_rate)
    assert rates[0] > 0.95
    assert rates[1] < 0.2


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers: expected 1", "got 2"]),
        ({"num_nextn_predict_layers": 0}, ["num_nextn_predict_layers: expected 1", "got 0"]),
        ({"mtp_hybrid_override_pattern": "M*"}, ["mtp_hybrid_override_pattern: expected at most 8 layers of attention", "got 'M*'"]),
        ({"mtp_hybrid_override_pattern": ""}, ["mtp_hybrid_override_pattern", "got ''"]),
        ({"mtp_hybrid_override_pattern": "E"}, ["mtp_hybrid_override_pattern", "got 'E'"]),
        ({"mtp_hybrid_override_pattern": "*" * 9}, ["mtp_hybrid_override_pattern", "got '*********'"]),
        ({"mtp_hybrid_override_pattern": ["*", 3]}, ["mtp_hybrid_override_pattern", "got ['*', 3]"]),
        ({"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["moe"]}, ["mtp_layers_block_type", "got ['moe']"]),
        ({"mtp_hybrid_override_pattern": "**"}, ["missing", "model.layers.1.mixer.q_proj.weight"]),
        ({"mtp_hybrid_override_pattern": "*"}, ["does not use", "model.layers.1.mixer.experts.0.down_proj.weight"]),
    ],
    ids=str,
)
def test_refusals_of_heads_of_nemotron_h(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    model = nemotron_mtp.write_nemotron_model(tmp_path / "model")
    edit_config(model, **changes)
    with pytest.raises(CheckpointError) as found:
        Checkpoint.open_mtp_head(model)
    assert all(part in str(found.value) for part in parts), found.value
