"""Drafts of an EAGLE-3 head: hidden states of layers, logits of the head, and tokens that are those without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint.folders import edit_config
from tests.helpers import mtp
from tests.helpers.adapters import write_adapter
from tests.helpers.assertions import assert_close
from tests.helpers.eagle3 import NUM_LAYERS, HeadInFloat64, ring_tokens, write_head, write_model, write_ring_head, write_ring_model
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.mtp import ring_prompts
from tests.helpers.sessions import ahead, by_prompt, draft_lengths, draft_logits, drain, hidden_rows
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS
from tests.session.test_mtp_drafter import PROMPTS, Open, Watched, drafter_of, params, random_program
from trt_kvcache import Checkpoint, InferenceSession, SamplingParams
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.decoder_engine import DecoderEngine
from trt_kvcache.engine.step_rows import HiddenLayers, ReducedLayers
from trt_kvcache.errors import CheckpointError, ConfigError, EngineError
from trt_kvcache.session import open_model as opening

HIDDEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return write_head(tmp_path_factory.mktemp("models") / "head", folder)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ring_model(tmp_path_factory.mktemp("models") / "ring")


@pytest.fixture(scope="module")
def ring_head(tmp_path_factory: pytest.TempPathFactory, ring: Path) -> Path:
    return write_ring_head(tmp_path_factory.mktemp("models") / "ring_head", ring)


@pytest.fixture
def opens(folder: Path) -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(draft: Any, model: Path = folder, **options: Any) -> InferenceSession:
        sessions.append(InferenceSession.from_model(model, **{**OPTIONS, "max_batch_size": 3, "draft": draft, **options}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def shortened(model: Path, folder: Path, layers: int) -> Path:
    """Write the first layers of a model alone: its logits are of the hidden states before the next layer."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    left_out = tuple(f"model.layers.{layer}." for layer in range(layers, NUM_LAYERS))
    weights = load_file(model / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if not name.startswith(left_out)}, folder / "model.safetensors")
    return folder


def with_layers(model: Path, layers: HiddenLayers, **options: Any) -> InferenceSession:
    """Open a model without a head, in an engine that returns hidden states: of a tuple of layers, side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "hidden_layers_for", lambda draft, config: layers)
        return InferenceSession.from_model(model, **{**OPTIONS, **options})


def states_of(session: InferenceSession, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the hidden states that a session has of tokens."""
    session.prefill([tokens])
    return hidden_rows(session, 0, len(tokens))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [6, 1, NUM_LAYERS]}, (6, 1, NUM_LAYERS)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, (1, 3, NUM_LAYERS)),
        ({"eagle_aux_hidden_state_layer_ids": [5, 1], "hidden_size": 24, "target_hidden_size": HIDDEN, "embedding": True}, (5, 1)),
    ],
    ids=str,
)
def test_hidden_states_are_those_before_the_layers_reduced(
    opens: Open, folder: Path, tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a queue whose slots move, with drafts that are accepted in part."""
    draft_lengths(monkeypatch, lambda drafting: 2)
    head = write_head(tmp_path / "head", folder, num_states=len(layers), **changes)
    session, oracle = opens(head), HeadInFloat64(head, folder)
    watched = Watched(drafter_of(session))
    for prompt, one, count in zip(PROMPTS, params(), (3, 20, 5, 9, 20), strict=True):
        session.submit(prompt, SamplingParams(**{**vars(one), "max_new_tokens": count}), draft=watched)
    drain(session)
    assert len(watched.seen) > 12
    with with_layers(folder, layers) as plain:
        of_layers = [states_of(plain, tokens[:-1]) for tokens, _, _ in watched.seen[::5]]
    for (tokens, states, _), unreduced in zip(watched.seen[::5], of_layers, strict=True):
        assert states.dtype == np.float32
        assert states.shape == (len(tokens) - 1, changes.get("hidden_size", HIDDEN))
        assert_close(states, oracle.reduced(unreduced))
    weights = load_file(folder / "model.safetensors")
    for place, layer in enumerate(layers):
        with InferenceSession.from_model(shortened(folder, tmp_path / f"{layer}", layer), **OPTIONS) as plain:
            for (tokens, _, _), unreduced in zip(watched.seen[::5], of_layers, strict=True):
                assert unreduced.shape == (len(tokens) - 1, len(layers) * HIDDEN)
                hidden = unreduced[:, place * HIDDEN : (place + 1) * HIDDEN].astype(np.float64)
                normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5) * weights["model.norm.weight"]
                logits = [plain.prefill([tokens[:1]])] + [plain.append([[token]]) for token in tokens[1:-1]]
                assert_close(normed @ weights["lm_head.weight"].T, np.concatenate(logits))


@pytest.mark.parametrize("changed", ["quantize", "adapter"])
def test_hidden_states_of_models_with_other_weights(opens: Open, folder: Path, head: Path, tmp_path: Path, changed: str) -> None:
    options: dict[str, Any] = {"quantize": "int8"}
    if changed == "adapter":
        module = "model.layers.1.self_attn.o_proj"
        options = {"adapter": write_adapter(tmp_path / "adapter", {module: (HIDDEN, HIDDEN)})}
    oracle, tokens = HeadInFloat64(head, folder), PROMPTS[0]
    with with_layers(folder, (2, 3, 4), **options) as changed_model, with_layers(folder, (2, 3, 4)) as plain:
        expected, other = (oracle.reduced(states_of(session, tokens)) for session in (changed_model, plain))
    assert_close(states_of(opens(head, **options), tokens), expected)
    assert abs(expected - other).max() > 1e-3 * abs(expected).max()


def test_an_interrupted_compaction_leaves_each_slot_its_hidden_states(opens: Open, folder: Path, head: Path, monkeypatch: Any) -> None:
    """The next step compacts again."""
    session, plain = opens(head), opens(head, max_batch_size=1)
    for prompt, count in zip(PROMPTS[:3], (3, 20, 20), strict=False):
        session.submit(prompt, max_new_tokens=count, ignore_eos=True, draft="off")
    batch, runner = session._batch, session._runner
    compact, apply = batch.compact, runner.apply

    def interrupted(mapping: Sequence[int]) -> None:
        monkeypatch.setattr(batch, "compact", compact)
        monkeypatch.setattr(runner, "apply", interrupt)
        compact(mapping)

    def interrupt(slots: Any) -> None:
        monkeypatch.setattr(runner, "apply", apply)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "compact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drain(session)
    session.step()
    assert session.cache.active_batch_size == 2
    for slot in range(2):
        tokens = list(session.tokens(slot))
        assert_close(hidden_rows(session, slot, len(tokens)), states_of(plain, tokens))


class CheckedHead:
    """Watches the head of a session of one slot, and compares its logits with those in float64."""

    def __init__(self, session: InferenceSession, head: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draft_lengths(monkeypatch, lambda drafting: 3)
        drafter = drafter_of(session)
        self.watched, self._oracle = Watched(drafter), HeadInFloat64(head, model)
        self._model, self._layers = model, tuple(self._oracle.config.get("eagle_aux_hidden_state_layer_ids", (2, 3, 4)))
        self.logits = draft_logits(drafter, monkeypatch)

    def check(self) -> None:
        found = iter(self.logits)
        for tokens, states, draft in self.watched.seen:
            hidden, pairs = self._reduced(tokens, len(states)), tokens[len(tokens) - len(states) :]
            for token in draft:
                after, expected = self._oracle(pairs, hidden)
                logits = next(found)[0]
                assert_close(logits[self._oracle.tokens], expected[-1])
                assert np.isneginf(np.delete(logits, self._oracle.tokens)).all()
                assert token in self._oracle.tokens
                hidden, pairs = np.concatenate([hidden, after[-1:]]), [*pairs, token]
        assert len(self.logits) > 30
        assert next(found, None) is None

    def _reduced(self, tokens: list[int], count: int) -> np.ndarray[Any, Any]:
        with with_layers(self._model, self._layers) as plain:
            return self._oracle.reduced(states_of(plain, tokens[:-1])[-count:])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding": True},
        {"norm_before_residual": True, "num_key_value_heads": 3},
        {"tokens": [*range(60, -1, -1)], "architectures": ["Eagle3LlamaForCausalLM"]},
        {"embedding": True, "hidden_size": 24, "target_hidden_size": HIDDEN, "eagle_aux_hidden_state_layer_ids": [5, 0, 3]},
    ],
    ids=str,
)
def test_logits_of_the_head(tmp_path: Path, opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Those of drafts too, which continue from the hidden states of the head."""
    place = write_head(tmp_path / "head", folder, seed=3, **changes)
    check_logits(opens(place, max_batch_size=1), place, folder, monkeypatch)


def check_logits(session: InferenceSession, head: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = CheckedHead(session, head, model, monkeypatch)
    [*session.generate(PROMPTS[1:2], params()[0], draft=checked.watched)]
    checked.check()


def without(*names: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if name not in names}, folder / "model.safetensors")

    return edit


def test_a_head_of_all_tokens_may_have_the_language_model_head_of_the_model(
    tmp_path: Path, opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_head(tmp_path / "head", folder, tokens=range(61))
    edit_config(place, draft_vocab_size=None)
    without("lm_head.weight", "d2t", "t2d")(place)
    session = opens(place, max_batch_size=1)
    check_logits(session, place, folder, monkeypatch)
    head, model = (engine._weights for engine in (drafter_of(session)._parts.engine, session.engine))  # type: ignore[attr-defined]
    for name in ("embedding", "head"):
        assert np.shares_memory(np.asarray(getattr(head, name)), np.asarray(getattr(model, name)))


def test_a_head_in_the_format_of_speculators(tmp_path: Path, opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_head(tmp_path / "head", folder, embedding=True, norm_before_residual=True)
    config = json.loads((place / "config.json").read_text())
    outer = {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator",
        "speculators_model_type": "eagle3",
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "target_hidden_size": None,
        **{name: config.pop(name) for name in ("draft_vocab_size", "norm_before_residual", "torch_dtype", "tie_word_embeddings")},
        "transformer_layer_config": {name: value for name, value in config.items() if name != "architectures"},
    }
    other = tmp_path / "speculators"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(outer))
    tensors = load_file(place / "model.safetensors")
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    check_logits(opens(other, max_batch_size=1), place, folder, monkeypatch)


def test_logits_of_the_head_after_its_request_has_started_again(
    opens: Open, folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prefix of the cache, so with fewer hidden states than before."""
    session = opens(head, max_batch_size=1, prompt_cache_bytes=1 << 20)
    checked = CheckedHead(session, head, folder, monkeypatch)
    handle = session.submit(PROMPTS[0], params()[0], draft=checked.watched)
    while len(handle.tokens) < 9:
        session.step()
    session.prefill([[1, 2]])
    drain(session)
    checked.check()
    assert len({len(tokens) - len(hidden) for tokens, hidden, _ in checked.watched.seen}) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_head_that_is_right_is_accepted_and_one_of_the_same_weights_in_another_order_is_not(
    opens: Open, ring: Path, ring_head: Path, tmp_path: Path, temperature: float
) -> None:
    asked, prompts = params(temperature=temperature), ring_prompts(5)
    expected = by_prompt(opens(None, ring).generate(prompts, asked))
    rates = []
    for head in (ring_head, write_ring_head(tmp_path / "permuted", ring, permuted=True)):
        session = opens(head, ring)
        assert by_prompt(session.generate(prompts, asked)) == expected
        assert session.statistics.draft_tokens > 20
        rates.append(session.statistics.acceptance_rate)
    assert rates[0] > 0.95
    assert rates[1] < 0.2


def test_a_head_proposes_its_own_tokens_alone(opens: Open, ring: Path, tmp_path: Path) -> None:
    tokens = ring_tokens(24)
    session = opens(write_ring_head(tmp_path / "head", ring, tokens=tokens), ring)
    watched = Watched(drafter_of(session))
    found = by_prompt(session.generate(ring_prompts(5), params(), draft=watched))
    assert found == by_prompt(opens(None, ring).generate(ring_prompts(5), params()))
    proposed = {token for _, _, draft in watched.seen for token in draft}
    assert proposed <= {*tokens}
    assert len(proposed) > 12


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.2}, {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2}, {"logit_bias": {3: 4.0}}], ids=str
)
@pytest.mark.parametrize("where", ["host", "ahead"])
def test_the_tokens_are_those_without_drafts(opens: Open, head: Path, options: dict[str, Any], where: str) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(**options)))
    session = ahead(opens(head)) if where == "ahead" else opens(head)
    watched = Watched(drafter_of(session))
    assert by_prompt(session.generate(PROMPTS, params(**options), draft=watched)) == expected
    proposed = {token for _, _, draft in watched.seen for token in draft}
    assert proposed
    assert proposed <= {*range(3, 40)}


@pytest.mark.parametrize(
    ("model", "seed"),
    [
        *(pytest.param("ring", seed, marks=[pytest.mark.slow] if seed > 2 else []) for seed in range(8)),
        *(pytest.param("folder", seed, marks=[pytest.mark.slow] if seed else []) for seed in range(8)),
    ],
)
def test_random_programs(opens: Open, folder: Path, head: Path, ring: Path, ring_head: Path, model: str, seed: int) -> None:
    place, draft = (ring, ring_head) if model == "ring" else (folder, head)
    random_program(opens, place, draft, seed)


def test_a_model_with_states(opens: Open, tmp_path: Path) -> None:
    """A Qwen3.5 of two layers, whose states are run again after a draft that is accepted in part."""
    model = mtp.write_ring_model(tmp_path / "model")
    sizes = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "max_position_embeddings": 64}
    for name, tokens, least in (("head", None, 0.95), ("other", ring_tokens(20), 0.3)):
        session = opens(write_ring_head(tmp_path / name, model, tokens=tokens, **sizes), model)
        prompts = ring_prompts(5)
        assert session.cache.states is not None
        assert by_prompt(session.generate(prompts, params())) == by_prompt(opens(None, model).generate(prompts, params()))
        assert session.statistics.acceptance_rate > least


def test_a_draft_ends_at_the_last_position_of_the_head(opens: Open, ring: Path, tmp_path: Path) -> None:
    session = opens(write_ring_head(tmp_path / "head", ring, max_position_embeddings=20), ring)
    watched = Watched(drafter_of(session))
    prompts, asked = ring_prompts(2), params(40)[:2]
    assert by_prompt(session.generate(prompts, asked, draft=watched)) == by_prompt(opens(None, ring).generate(prompts, asked))
    lengths = {len(tokens): len(draft) for tokens, _, draft in watched.seen}
    assert max(length + drafted for length, drafted in lengths.items() if drafted) <= 20
    assert lengths[max(lengths)] == 0
    assert max(lengths) > 30


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"kv_dtype": "int8"}, {"dtype": "float16"}, {"dtype": "bfloat16"}], ids=str)
def test_options_that_round(opens: Open, ring: Path, ring_head: Path, options: dict[str, Any]) -> None:
    prompts = ring_prompts(3)
    expected = by_prompt(opens(None, ring, **options).generate(prompts, params()[:3]))
    session = opens(ring_head, ring, **options)
    assert by_prompt(session.generate(prompts, params()[:3])) == expected
    assert session.statistics.acceptance_rate > 0.9


def test_a_request_may_do_without(opens: Open, head: Path) -> None:
    session = opens(head)
    for draft, drafts in (("off", False), (None, True)):
        before = session.statistics.draft_tokens
        [*session.generate([PROMPTS[0]], params()[0], draft=draft)]
        assert (session.statistics.draft_tokens > before) == drafts
    with pytest.raises(ConfigError, match="draft: expected 'mtp' in a session that was opened with draft='mtp'"):
        session.generate([[1]], draft="mtp")


def reshaped(name: str, *shape: int, dtype: type = np.float32) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: np.ones(shape, dtype)}, folder / "model.safetensors")

    return edit


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def of_eagle_1(folder: Path) -> None:
    """A folder of EAGLE 1 or 2 has the configuration of a Llama of one layer, and a map of an embedding and a hidden state."""
    edit_config(folder, architectures=["LlamaForCausalLM"], draft_vocab_size=...)
    reshaped("fc.weight", HIDDEN, 2 * HIDDEN)(folder)


REFUSALS: list[tuple[Callable[[Path], None], type[Exception], Sequence[str]]] = [
    (of_eagle_1, CheckpointError, ["expected an EAGLE-3 head, whose fc.weight is of shape (32, 96), got a head of EAGLE 1 or 2"]),
    (
        changed(architectures=["EagleLlamaForCausalLM"], draft_vocab_size=...),
        CheckpointError,
        ["architectures: expected an EAGLE-3 head", "EagleLlamaForCausalLM", "EAGLE 1 or 2"],
    ),
    (changed(model_type="eagle"), CheckpointError, ["expected an EAGLE-3 head", "EAGLE 1 or 2"]),
    (changed(model_type="qwen3"), CheckpointError, ["model_type: expected llama", "got 'qwen3'"]),
    (changed(speculators_model_type="dflash"), CheckpointError, ["speculators_model_type: expected eagle3, got 'dflash'"]),
    (changed(transformer_layer_config=[]), CheckpointError, ["transformer_layer_config: expected an object, got []"]),
    (changed(hidden_size=40), ConfigError, ["expected an EAGLE-3 head for the hidden size 32 of the model, got one for 40"]),
    (changed(target_hidden_size=24), ConfigError, ["for the hidden size 32", "got one for 24"]),
    (changed(vocab_size=60), ConfigError, ["for the vocabulary of 61 of the model, got one for 60"]),
    (changed(draft_vocab_size=62), CheckpointError, ["draft_vocab_size: expected at most vocab_size=61, got 62"]),
    (changed(num_hidden_layers=2), CheckpointError, ["num_hidden_layers: expected 1 in an EAGLE-3 head, got 2"]),
    (changed(norm_before_fc=True), CheckpointError, ["norm_before_fc: expected false in an EAGLE-3 head, got True"]),
    (changed(fc_norm=True), CheckpointError, ["fc_norm: expected false"]),
    (changed(eagle_config={"norm_output": True}), CheckpointError, ["eagle_config.norm_output: expected false"]),
    (changed(eagle_config={"use_aux_hidden_state": False}), CheckpointError, ["eagle_config.use_aux_hidden_state: expected true"]),
    (changed(eagle_config=[1]), CheckpointError, ["eagle_config: expected an object, got [1]"]),
    (changed(tie_word_embeddings=True), CheckpointError, ["tie_word_embeddings: expected false"]),
    (
        changed(eagle_aux_hidden_state_layer_ids=[2, 3, 8]),
        ConfigError,
        ["expected an EAGLE-3 head that reads layers from 0 to 7 of the model, got one of 2, 3, 8"],
    ),
    (changed(eagle_aux_hidden_state_layer_ids=[2, -1]), CheckpointError, ["expected indices of layers, got [2, -1]"]),
    (
        changed(eagle_aux_hidden_state_layer_ids=[2, 3, 4], eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}),
        CheckpointError,
        ["expected layers after those of eagle_config, [2, 3, 4], got [2, 3, 4]"],
    ),
    (changed(eagle_aux_hidden_state_layer_ids=[2, 3]), CheckpointError, ["fc.weight of shape (32, 64)", "got (32, 96)"]),
    (without("fc.weight"), CheckpointError, ["1 tensor(s)", "missing", "fc.weight"]),
    (without("midlayer.hidden_norm.weight"), CheckpointError, ["missing", "model.layers.0.hidden_norm.weight"]),
    (without("midlayer.input_layernorm.weight"), CheckpointError, ["missing", "model.layers.0.input_layernorm.weight"]),
    (
        without("lm_head.weight"),
        CheckpointError,
        ["expected lm_head.weight of 37 rows", "draft_vocab_size is not vocab_size=61", "got none"],
    ),
    (without("d2t"), CheckpointError, ["expected d2t, the token ids of 37 logits, got none"]),
    (reshaped("d2t", 5, dtype=np.int64), CheckpointError, ["expected d2t of shape (37,) in int64, got (5,) in I64"]),
    (reshaped("d2t", 37), CheckpointError, ["expected d2t of shape (37,) in int64, got (37,) in float32"]),
    (
        lambda folder: save_file(
            {**load_file(folder / "model.safetensors"), "d2t": np.full(37, 25, np.int64)}, folder / "model.safetensors"
        ),
        CheckpointError,
        ["expected offsets in d2t to 37 different token ids from 0 to 60, got others"],
    ),
    (
        lambda folder: save_file({**load_file(folder / "model.safetensors"), "d2t": -np.arange(37)}, folder / "model.safetensors"),
        CheckpointError,
        ["expected offsets in d2t to 37 different token ids"],
    ),
    (reshaped("midlayer.self_attn.q_proj.weight", 96, 32), CheckpointError, ["self_attn.q_proj.weight of shape (96, 64)", "(96, 32)"]),
    (reshaped("midlayer.mlp.up_proj.bias", 28), CheckpointError, ["does not use", "mlp.up_proj.bias"]),
]


@pytest.mark.parametrize(("edit", "error", "parts"), REFUSALS)
def test_refusals(tmp_path: Path, folder: Path, edit: Callable[[Path], None], error: type[Exception], parts: Sequence[str]) -> None:
    place = write_head(tmp_path / "head", folder)
    edit(place)
    with pytest.raises(error) as found:
        InferenceSession.from_model(folder, **OPTIONS, draft=place)
    assert all(part in str(found.value) for part in parts), found.value


def opened_in(session: InferenceSession, head: Checkpoint) -> None:
    """Open a head in the engine of a session, and close it."""
    engine = session.engine
    assert isinstance(engine, DecoderEngine)
    sizes = {"max_batch_size": 1, "max_sequence_length": 9}
    kv = decoder_cache_config(head.config, **sizes, dtype="float32", attention="native")
    engine.open_draft_head(head, kv=kv, max_prefill_length=4, hidden_layers=(1,)).close()


@pytest.mark.parametrize("layers", [ReducedLayers((2, 4, 3), HIDDEN), ReducedLayers((2, 3, 4), 24), (2, 3, 4), "final_norm", None], ids=str)
def test_an_engine_takes_a_head_of_its_own_hidden_states(folder: Path, head: Path, layers: HiddenLayers) -> None:
    with with_layers(folder, layers) as session, Checkpoint.open_eagle3_head(head) as opened, pytest.raises(ConfigError) as found:
        opened_in(session, opened)
    expected = f"expected {ReducedLayers((2, 3, 4), HIDDEN)}, which the draft head reads, got {layers!r}."
    assert str(found.value) == f"hidden_layers: {expected}"


def test_an_engine_takes_a_head_of_its_own_width(tmp_path: Path, folder: Path) -> None:
    place = write_head(tmp_path / "head", folder, embedding=True, hidden_size=24, target_hidden_size=40)
    message = "draft head: expected one for the hidden size 32 of the model, got one for 40"
    with (
        with_layers(folder, ReducedLayers((2, 3, 4), 24)) as session,
        Checkpoint.open_eagle3_head(place) as opened,
        pytest.raises(ConfigError, match=message),
    ):
        opened_in(session, opened)


def test_a_step_comes_after_the_head_and_there_is_one(folder: Path, head: Path) -> None:
    with with_layers(folder, ReducedLayers((2, 3, 4), HIDDEN)) as session, Checkpoint.open_eagle3_head(head) as opened:
        with pytest.raises(EngineError, match=r"expected an EAGLE-3 head for ReducedLayers\(layers=\(2, 3, 4\), .* before a step"):
            session.prefill([[5, 6]])
        opened_in(session, opened)
        oracle = HeadInFloat64(head, folder)
        for _ in range(2):  # the second time after an error
            with with_layers(folder, (2, 3, 4)) as plain:
                assert_close(states_of(session, [5, 6, 7]), oracle.reduced(states_of(plain, [5, 6, 7])))
            with pytest.raises(ConfigError, match="draft head: expected one EAGLE-3 head of an engine, got a second one"):
                opened_in(session, opened)


def test_a_head_of_another_width_needs_an_embedding_of_its_own(tmp_path: Path, folder: Path) -> None:
    place = write_head(tmp_path / "head", folder, hidden_size=24, target_hidden_size=HIDDEN)
    with pytest.raises(ConfigError, match="expected an embedding of width 24 in the files of the head, got none"):
        InferenceSession.from_model(folder, **OPTIONS, draft=place)


def test_a_model_of_few_layers_is_refused(head: Path) -> None:
    with pytest.raises(ConfigError, match=r"reads layers from 0 to 2 of the model, got one of 2, 1, -1"):
        InferenceSession.from_model(GOLDEN / "llama", **OPTIONS, draft=head)


def test_an_engine_folder(tmp_path: Path, ring: Path, ring_head: Path) -> None:
    """Its head is read with the dtype of the build."""
    engine = make_engine_folder(ring, tmp_path / "engine", dtype="float16")
    tokens = []
    for draft in (None, ring_head):
        with InferenceSession.open(engine.path, engine="numpy", draft=draft) as session:
            tokens.append(by_prompt(session.generate(ring_prompts(2), params(15)[:2])))
    assert tokens[0] == tokens[1]
    assert drafter_of(session)._parts.cache.kv_config.dtype == "float16"
    assert session.statistics.acceptance_rate > 0.95


def test_a_head_without_a_dtype_has_that_of_its_tensors(folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    place = write_head(tmp_path / "head", folder, torch_dtype=...)
    tensors = load_file(place / "model.safetensors")
    halves = {name: tensor.astype(np.float16) if tensor.dtype == np.float32 else tensor for name, tensor in tensors.items()}
    save_file(halves, place / "model.safetensors")
    with Checkpoint.open_eagle3_head(place) as head:
        assert head.config.dtype == "float16"
    assert not recwarn


def test_a_head_is_no_model(head: Path) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint.open(head)
    assert Checkpoint.read_eagle3_config(head).num_logits == 37
