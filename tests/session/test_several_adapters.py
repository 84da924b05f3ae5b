"""Sessions with several adapters: a request has the tokens of a session with its adapter merged, whatever runs with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.weights import VISION
from tests.helpers.adapters import linear_shapes, tensors_of, write_adapter, write_two_adapters
from tests.helpers.assertions import SAME_SUMS, assert_close, raises
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.gguf_files import write_q4_k_m
from tests.helpers.models import model_of, write_model
from tests.helpers.mtp import write_mtp_model
from tests.helpers.quantized_models import CASES, write_quantized, write_values
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS, fails
from trt_kvcache import Checkpoint, InferenceSession, SessionSource, Snapshot, load
from trt_kvcache.errors import CheckpointError, ConfigError, ShapeError, SnapshotError

#: Models with experts last: the rows of an expert are of all slots, and the order of their sums depends on the number of rows.
DENSE = ("llama", "qwen3-sharded", "gemma3", "phi3-long", "gemma4-ple", "falcon_h1", "lfm2", "qwen3_5", "bamba")
EXPERTS = ("mixtral", "qwen3_next-experts", "nemotron_h-latent", "gpt_oss", "gemma4-experts")

#: Adapters with golden logits that change linear layers alone.
OF_PEFT = ("ernie4_5", "llama", "phi3-long")

NAMES = ("sql", None, "poems")
PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [10, 11, 12]]

Open = Callable[..., InferenceSession]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """Return the function that writes the adapters of a golden model, once."""
    return cache(lambda name: write_two_adapters(tmp_path_factory.mktemp(name), model_of(name)))


def open_model(folder: Path | str, **options: Any) -> InferenceSession:
    sizes = {"max_batch_size": 3, "max_sequence_length": 48, "max_prefill_length": 7}
    return InferenceSession.from_model(
        GOLDEN / folder, **{"engine": OPTIONS["engine"], "dtype": "float32", "prompt_cache_bytes": 0, **sizes, **options}
    )


@pytest.fixture
def adapters(folder_of: Callable[[str], dict[str, Path]]) -> dict[str, Path]:
    return folder_of("llama")


@pytest.fixture
def opens() -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(folder: Path | str = "llama", **options: Any) -> InferenceSession:
        sessions.append(open_model(folder, **options))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def logits_of(session: InferenceSession, **chosen: Any) -> np.ndarray[Any, Any]:
    """Return the logits ``[steps, 3, vocab]`` of a prefill in chunks, of steps of one token, and of one of several."""
    found = [session.prefill([[*row, *range(13, 20)] for row in PROMPTS], **chosen)]
    found += [session.decode([token, token + 1, 30 - token]) for token in (5, 6)]
    return np.stack([*found, session.append([[8, 9, 10], [7], [5, 6]])])


def assert_as_merged(folder: Path | str, adapters: dict[str, Path], *, exact: bool, tolerance: float = SAME_SUMS, **options: Any) -> None:
    """Compare three slots of one batch with three sessions, of which two have merged an adapter."""
    with open_model(folder, adapters=adapters, **options) as session:
        found = logits_of(session, adapter=NAMES)
    for slot, name in enumerate(NAMES):
        with open_model(folder, adapter=None if name is None else adapters[name], **options) as session:
            expected = logits_of(session)[:, slot]
        assert_close(found[:, slot], expected, tolerance)
        if name is None and exact:
            np.testing.assert_array_equal(found[:, slot], expected)
        assert np.abs(found[:, slot] - found[:, slot - 1]).max() > 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_each_slot_has_the_logits_of_a_session_with_its_adapter_merged(name: str, folder_of: Any) -> None:
    assert_as_merged(name, folder_of(name), exact=name in DENSE)


@pytest.mark.parametrize("name", [path.name for path in sorted((GOLDEN / "adapters").iterdir())])
def test_logits_are_those_of_peft(name: str) -> None:
    """PEFT adds the products next to the base layers too. Some adapters of these models can only be merged."""
    folder = GOLDEN / "adapters" / name
    golden = tensors_of(folder, "golden.safetensors")
    ids, expected = golden["input_ids"], golden["logits"]
    if name not in OF_PEFT:
        with pytest.raises(CheckpointError, match="adapter="):
            open_model(name, adapters={"a": folder})
        return
    with open_model(name, adapters={"a": folder, "b": folder}, max_sequence_length=len(ids)) as session:
        prompts = [ids[:14].tolist(), [3, 4], ids[:14].tolist()]
        steps = [session.prefill(prompts, adapter=["a", None, "b"]), *(session.decode([token, 5, token]) for token in ids[14:].tolist())]
    for slot in (0, 2):
        assert_close(np.stack(steps)[:, slot], expected[13:], SAME_SUMS)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 8e-2)])
def test_in_16_bits(dtype: str, tolerance: float, adapters: Any) -> None:
    assert_as_merged("llama", adapters, exact=True, tolerance=tolerance, dtype=dtype)


@pytest.mark.parametrize("attention", ["mask", "plugin"])
def test_every_attention(attention: str, adapters: Any) -> None:
    assert_as_merged("llama", adapters, exact=True, attention=attention)


def test_a_text_decoder_of_a_model_with_a_tower(tmp_path: Path) -> None:
    """PEFT's names have the prefix of the published model."""
    folder = VISION / "gemma3"
    with Checkpoint.open(folder) as checkpoint:
        shapes = linear_shapes(checkpoint.config)
    stored = {f"model.language_model.{module.removeprefix('model.')}": shape for module, shape in shapes.items()}
    whole = write_adapter(tmp_path / "a", stored, lora_alpha=0.5)
    assert_as_merged(folder, {"sql": whole, "poems": write_adapter(tmp_path / "b", stored, rank=2, seed=4, lora_alpha=0.3)}, exact=True)


def test_a_session_without_a_request_of_an_adapter_is_the_base_model_bit_for_bit(adapters: Any, opens: Open) -> None:
    session = opens(adapters=adapters)
    logits_of(session, adapter=NAMES)
    np.testing.assert_array_equal(logits_of(session), logits_of(opens()))


# --- bases in other formats ---


def assert_over_values(base: Path, values: Path, tmp_path: Path, tolerance: float = SAME_SUMS, **options: Any) -> None:
    """Compare adapters over a quantized base with adapters merged into its values."""
    with Checkpoint.open(values) as checkpoint:
        adapters = write_two_adapters(tmp_path, checkpoint.config)
    with open_model(base, adapters=adapters, **options) as session:
        found = logits_of(session, adapter=NAMES)
    for slot, name in enumerate(NAMES):
        with open_model(values, adapter=None if name is None else adapters[name], **options) as session:
            assert_close(found[:, slot], logits_of(session)[:, slot], tolerance)


@pytest.mark.filterwarnings("ignore:.*activations are not quantized")
@pytest.mark.parametrize("case", ["gptq-order", "awq", "fp8-blocks", "compressed-fp8", "compressed-int4", "modelopt-int4"])
def test_over_quantized_checkpoints(case: str, tmp_path: Path) -> None:
    quantize, config = CASES[case]
    values = write_quantized(tmp_path / "packed", "llama", quantize, config)
    assert_over_values(tmp_path / "packed", write_values(tmp_path / "values", tmp_path / "packed", values), tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_over_a_gguf_file(tmp_path: Path) -> None:
    """Its matrices of q and k are in another order than those of transformers, which the adapter is for."""
    values = write_q4_k_m(tmp_path / "packed")
    assert_over_values(tmp_path / "packed", write_values(tmp_path / "values", tmp_path / "packed", values), tmp_path)


@pytest.mark.parametrize("quantize", ["int8", "int4", "int4,head=int8"])
def test_over_weights_that_are_rounded_when_they_are_read(quantize: str, tmp_path: Path) -> None:
    with Checkpoint.open(GOLDEN / "llama", quantize=quantize) as checkpoint:
        stored = {name: checkpoint.tensor(name).astype(np.float32) for name in checkpoint.tensor_names}
    values = write_values(tmp_path / "values", GOLDEN / "llama", stored)
    with Checkpoint.open(values) as checkpoint:
        adapters = write_two_adapters(tmp_path, checkpoint.config)
    with open_model("llama", adapters=adapters, quantize=quantize) as session:
        found = logits_of(session, adapter=NAMES)
    for slot, name in enumerate(NAMES):
        with open_model(values, adapter=None if name is None else adapters[name]) as session:
            assert_close(found[:, slot], logits_of(session)[:, slot])


# --- generation ---


def merged_tokens(
    adapters: dict[str, Path], prompts: Sequence[Sequence[int]], names: Sequence[str | None], count: int, **options: Any
) -> Any:
    """Return the tokens of each prompt in a session of its own, with its adapter merged."""
    found = []
    for prompt, name in zip(prompts, names, strict=True):
        with open_model("llama", adapter=None if name is None else adapters[name], **options) as session:
            found.append([one.token for one in session.generate(prompt, max_new_tokens=count, ignore_eos=True)])
    return found


MANY = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [5, 6], [15, 16, 17, 18, 19], [20]]
OF_MANY = ["poems", None, "sql", "sql", "poems", None, "sql"]


def test_generate_of_more_prompts_than_slots(adapters: Any, opens: Open) -> None:
    session, found = opens(adapters=adapters), [[] for _ in MANY]
    for token in session.generate(MANY, adapter=OF_MANY, max_new_tokens=6, ignore_eos=True):
        found[token.index].append(token.token)
    assert found == merged_tokens(adapters, MANY, OF_MANY, 6)
    assert len(set(map(tuple, found))) > 3


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_queue_whose_requests_come_and_go(draft: str | None, adapters: Any, opens: Open) -> None:
    """Slots are compacted as requests end; one is cancelled."""
    counts = [3, 9, 5, 7, 2, 8, 4]
    session = opens(adapters=adapters, draft=draft)
    handles = [
        session.submit(prompt, adapter=name, max_new_tokens=count, ignore_eos=True)
        for prompt, name, count in zip(MANY, OF_MANY, counts, strict=True)
    ]
    for _ in range(3):
        session.step()
    handles[1].cancel()
    while session.step():
        pass
    expected = merged_tokens(adapters, MANY, OF_MANY, 9)
    for index, (handle, count, tokens) in enumerate(zip(handles, counts, expected, strict=True)):
        assert list(handle.tokens) == (tokens[: len(handle.tokens)] if index == 1 else tokens[:count])


def test_turns_keep_their_adapters(adapters: Any, opens: Open) -> None:
    session = opens(adapters=adapters)
    list(session.generate(PROMPTS, adapter=NAMES, max_new_tokens=2, ignore_eos=True))
    with raises(ConfigError, "adapter", "none with append", "sql"):
        session.generate([[7]] * 3, append=True, adapter="sql")
    list(session.generate([[7]] * 3, append=True, max_new_tokens=2, ignore_eos=True))
    held = [(*session.tokens(slot), *session.pending_tokens(slot)) for slot in range(3)]
    for slot, name in enumerate(NAMES):
        with open_model("llama", adapter=None if name is None else adapters[name]) as merged:
            list(merged.generate(PROMPTS[slot], max_new_tokens=2, ignore_eos=True))
            list(merged.generate([7], append=True, max_new_tokens=2, ignore_eos=True))
            assert held[slot] == (*merged.tokens(0), *merged.pending_tokens(0))


def test_scores_are_those_of_the_adapter(adapters: Any, opens: Open) -> None:
    session = opens(adapters=adapters)
    for name in NAMES:
        [found] = session.score(PROMPTS[:1], adapter=name)
        [expected] = opens(adapter=None if name is None else adapters[name]).score(PROMPTS[:1])
        assert_close(found.logprobs[1:], expected.logprobs[1:])


def test_verify_runs_each_slot_with_its_adapter(adapters: Any, opens: Open) -> None:
    session, rows = opens(adapters=adapters), [[5, 6], [7, 8], [9, 10]]
    session.prefill(PROMPTS, adapter=NAMES)
    found = session.verify(rows)
    for slot, name in enumerate(NAMES):
        merged = opens(adapter=None if name is None else adapters[name])
        merged.prefill(PROMPTS)
        assert_close(found[slot], merged.verify(rows)[slot])


def test_drafts_of_an_mtp_head(tmp_path: Path) -> None:
    """The head has no adapter: its drafts are verified by the model with one."""
    base = write_mtp_model(tmp_path / "mtp")
    with Checkpoint.open(base) as checkpoint:
        adapters = write_two_adapters(tmp_path, checkpoint.config)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    with open_model(base, adapters=adapters, draft="mtp") as session:
        found = [[], [], []]
        for token in session.generate(PROMPTS, adapter=NAMES, **options):
            found[token.index].append(token.token)
        assert session.statistics.draft_tokens
    for slot, name in enumerate(NAMES):
        with open_model(base, adapter=None if name is None else adapters[name]) as merged:
            assert found[slot] == [one.token for one in merged.generate(PROMPTS[slot], **options)]


def test_a_step_that_fails_leaves_each_slot_its_adapter(adapters: Any, opens: Open) -> None:
    session = opens(adapters=adapters)
    session.prefill(PROMPTS, adapter=NAMES)
    fails(session, lambda: session.prefill([[9], [9], [9]], adapter=["poems", "sql", None]))
    fails(session, lambda: session.decode([5] * len(session._batch)))
    session.prefill(PROMPTS, adapter=NAMES)
    fails(session, lambda: session.decode([5, 6, 7]))
    found, expected = session.decode([5, 6, 7]), opens(adapters=adapters)
    expected.prefill(PROMPTS, adapter=NAMES)
    np.testing.assert_array_equal(found, expected.decode([5, 6, 7]))


# --- K, V and states of one adapter are not used for another ---

LONG = [*range(3, 40)]  # worth sharing


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_the_prefix_cache_knows_the_adapter(model: str, folder_of: Any, opens: Open) -> None:
    session, found = opens(model, adapters=folder_of(model), prompt_cache_bytes=1 << 20), {}
    for name in NAMES:
        found[name] = session.prefill([LONG], adapter=name)
        assert session.prompt_cache.hits == 0
    assert {entry.adapter for entry in session.prompt_cache.entries} == set(NAMES)
    for count, name in enumerate(reversed(NAMES), start=1):
        assert_close(session.prefill([LONG], adapter=name), found[name])
        assert session.prompt_cache.hits == count
    for name in NAMES:
        [handle] = [session.submit(LONG, adapter=name, max_new_tokens=1, logprobs=3)]
        while session.step():
            pass
        assert handle.tokens[0] == found[name].argmax()
    assert session.prompt_cache.hits == 6


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_a_slot_is_not_reused_for_another_adapter(model: str, folder_of: Any, opens: Open) -> None:
    session, fresh = opens(model, adapters=folder_of(model)), opens(model, adapters=folder_of(model))
    session.prefill([LONG], adapter="sql")
    for name, kept in (("poems", 0), ("poems", 1), (None, 0), ("sql", 0), ("sql", 1)):
        before = session.statistics.reused_tokens
        row = [*session.tokens(0), 7]
        assert_close(session.prefill([row], reuse=True, adapter=name), fresh.prefill([row], adapter=name))
        assert (session.statistics.reused_tokens > before) is bool(kept)


def test_a_slot_that_was_rewound_keeps_its_adapter(adapters: Any, opens: Open) -> None:
    session, fresh = opens(adapters=adapters), opens(adapters=adapters)
    session.prefill([LONG], adapter="sql")
    for name, kept in (("sql", 5), (None, 0)):
        session.rewind(0, 5)
        before = session.statistics.reused_tokens
        assert_close(session.prefill([[*LONG[:5], 7]], reuse=True, adapter=name), fresh.prefill([[*LONG[:5], 7]], adapter=name))
        assert session.statistics.reused_tokens == before + kept


def test_states_are_kept_where_prompts_of_one_adapter_diverge(folder_of: Any, opens: Open) -> None:
    session = opens("lfm2", adapters=folder_of("lfm2"), prompt_cache_bytes=1 << 20)
    session.prefill([LONG], adapter="sql")
    found = {name: session._batch.divergence_point(np.asarray(LONG), name) for name in NAMES}
    assert found == {"sql": len(LONG) - 1, None: 0, "poems": 0}


def test_a_compaction_that_is_interrupted_leaves_each_slot_its_adapter(adapters: Any, opens: Open, monkeypatch: Any) -> None:
    session = opens(adapters=adapters)
    session.prefill(PROMPTS, adapter=NAMES)
    runner = session._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "apply", lambda slots: 1 / 0)
        with pytest.raises(ZeroDivisionError), runner.work():
            session._batch.compact([-1, 0, 1])
    assert runner._adapters == NAMES == tuple(slot.adapter for slot in runner.slots)


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_concurrent_prompts_share_a_prefix_of_the_same_adapter_alone(model: str, folder_of: Any, opens: Open) -> None:
    session = opens(model, adapters=folder_of(model))
    names = ["sql", "poems", "sql"]
    handles = [session.submit([*LONG, index], adapter=name, max_new_tokens=4, ignore_eos=True) for index, name in enumerate(names)]
    while session.step():
        pass
    assert [handle.reused_tokens for handle in handles] == [0, 0, len(LONG)]
    alone = opens(model, adapters=folder_of(model))
    for index, (handle, name) in enumerate(zip(handles, names, strict=True)):
        expected = [one.token for one in alone.generate([*LONG, index], adapter=name, max_new_tokens=4, ignore_eos=True)]
        assert list(handle.tokens) == expected


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_snapshots_know_the_adapter(model: str, folder_of: Any, opens: Open, tmp_path: Path) -> None:
    """By its updates: it may have another name."""
    adapters = folder_of(model)
    session = opens(model, adapters=adapters)
    whole = {}
    for name in NAMES:
        whole[name] = [one.token for one in session.generate([5, 6, 7], adapter=name, max_new_tokens=8, ignore_eos=True)]
        list(session.generate([5, 6, 7], adapter=name, max_new_tokens=3, ignore_eos=True))
        session.save_snapshot(tmp_path / f"{name}.kv")
    renamed = opens(model, adapters={"x": adapters["poems"], "y": adapters["sql"]})
    stream = renamed.resume([tmp_path / f"{name}.kv" for name in NAMES], max_new_tokens=5, ignore_eos=True)
    found = [[], [], []]
    for token in stream:
        found[token.index].append(token.token)
    assert found == [whole[name][3:] for name in NAMES]
    renamed.load_snapshots(tmp_path / "sql.kv")
    renamed.save_snapshot(tmp_path / "again.kv")
    assert Snapshot.read(tmp_path / "again.kv").model.adapter == session.engine.slot_adapters.fingerprints["sql"]
    session.load_snapshots(tmp_path / "again.kv")
    held = session.tokens(0)
    for other in (opens(model, adapters={"x": adapters["poems"]}), opens(model)):
        other.load_snapshots(tmp_path / "None.kv")
        with raises(SnapshotError, "adapter", "x" if other.adapters else "none", session.engine.slot_adapters.fingerprints["sql"][:12]):
            other.load_snapshots(tmp_path / "sql.kv")
    merged = opens(model, adapter=adapters["sql"])
    with raises(SnapshotError, "fingerprint"):
        merged.load_snapshots(tmp_path / "sql.kv")
    assert session.tokens(0) == held


# --- what is refused ---


def test_names_of_a_session(adapters: Any, opens: Open) -> None:
    session, base = opens(adapters=adapters), opens()
    assert (session.adapters, base.adapters) == (("sql", "poems"), ())
    session.prefill([[5]])
    for call in (
        lambda: session.generate([5, 6], adapter="sq"),
        lambda: session.submit([5, 6], adapter="sq"),
        lambda: session.score([[5, 6]], adapter="sq"),
        lambda: session.prefill([[5], [6]], adapter=[None, "sq"]),
    ):
        with raises(ConfigError, "adapter", ("sql", "poems", "None"), "'sq'"):
            call()
    with raises(ConfigError, "adapter", "no adapters", "'sql'"):
        base.generate([5], adapter="sql")
    with raises(ShapeError, "adapter", "2 prompts", "sql"):
        session.generate([[5], [6]], adapter=["sql"])
    assert session.tokens(0) == (5,)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "x" * 65, 3])
def test_a_name_is_of_letters_and_digits(name: Any, adapters: Any) -> None:
    with raises(ConfigError, "adapters", "letters", repr(name) if len(str(name)) < 9 else ()):
        SessionSource("somewhere", adapters={name: adapters["sql"]})


def test_options_that_do_not_go_together(adapters: Any, tmp_path: Path) -> None:
    base = write_model(tmp_path / "model")
    with raises(ConfigError, "adapters", "none with adapter", ("sql", "poems")):
        load(base, adapter=adapters["sql"], adapters=adapters)
    merged = make_engine_folder(GOLDEN / "llama", tmp_path / "engine", adapter=adapters["sql"]).path
    with raises(ConfigError, "adapters", ("none", "merged adapter"), "sql, poems"):
        load(merged, engine=OPTIONS["engine"], adapters=adapters)
    with raises(ConfigError, "adapters", "by name"):
        load(base, engine=OPTIONS["engine"], adapters=adapters["sql"])
    with raises(ConfigError, "adapter", "a folder of PEFT", "3"):
        load(base, engine=OPTIONS["engine"], adapters={"sql": 3})


def test_an_engine_folder_runs_with_adapters_of_a_session(adapters: Any, tmp_path: Path) -> None:
    """The engines without TensorRT need no inputs for them."""
    folder = make_engine_folder(GOLDEN / "llama", tmp_path / "engine", dtype="float32").path
    with (
        InferenceSession.open(folder, engine=OPTIONS["engine"], adapters=adapters) as session,
        open_model("llama", adapters=adapters) as other,
    ):
        assert_close(*(one.prefill(PROMPTS, adapter=NAMES) for one in (session, other)))


def test_an_adapter_of_another_model(adapters: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected an update of"):
        load(write_model(tmp_path / "model", num_hidden_layers=2), engine=OPTIONS["engine"], adapters=adapters)


def test_adapters_may_be_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = write_model(tmp_path / "model", num_hidden_layers=2), write_adapter(tmp_path / "adapter")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda hub_id, **options: str(adapter))
    monkeypatch.chdir(tmp_path)
    with load(base, engine=OPTIONS["engine"], adapters={"a": "some-org/lora", "b": "adapter"}) as session:
        found = session.engine.slot_adapters.fingerprints
    assert found["a"] == found["b"]


def test_no_adapters_at_all(opens: Open) -> None:
    assert opens(adapters={}).engine.slot_adapters is None
