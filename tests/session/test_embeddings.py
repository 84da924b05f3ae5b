"""Rows in place of rows of the embedding: images against transformers with its tower, prefix caching, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import trt_kvcache
from tests.golden.weights import VISION
from tests.helpers.assertions import assert_close, raises
from tests.helpers.mtp import write_mtp_model
from tests.paths import GOLDEN, ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.errors import CapacityError, ConfigError, DTypeError, EngineError, RangeError, ShapeError

ENGINES = ["numpy", "torch"]
IMAGE = 10  # its token in the golden prompts
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 24, "max_prefill_length": 5}

#: As for golden logits of text: the sums are in another order.
TOLERANCE = 2e-5


def opened(name: str = "mistral3", engine: str = "numpy", *, max_embeddings: int = 4, **options: Any) -> InferenceSession:
    if engine == "torch":
        pytest.importorskip("torch").set_num_threads(1)
    given = {"dtype": "float32", **SIZES, **options}
    return trt_kvcache.load(VISION / name, engine=engine, max_embeddings=max_embeddings, **given)


def image(name: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    file = load_file(VISION / name / "image.safetensors")
    return file["input_ids"].tolist(), file["rows"], file["logits"]


def with_rows(ids: list[int], rows: tuple[int, ...]) -> list[int]:
    """Return a prompt with ids of rows in the places of an image."""
    left = iter(rows)
    return [next(left) if token == IMAGE else token for token in ids]


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["mistral3", "mistral3-ministral"])
def test_an_image_is_computed_as_transformers_with_its_tower_does(name: str, engine: str, attention: str) -> None:
    """In chunks that divide the image, after a text, next to a text without one, and in a second turn."""
    ids, rows, expected = image(name)
    with opened(name, engine, attention=attention) as session:
        prompt = with_rows(ids, session.add_embeddings(rows))
        logits = session.prefill([[3, 4, 5, 6], prompt, prompt[:4]])
        assert_close(logits[1], expected[-1], TOLERANCE)
        assert_close(logits[2], expected[3], TOLERANCE)
        assert session.tokens(1) == tuple(prompt)
        session.prefill([ids[:1]])
        for end in range(1, len(ids)):
            assert_close(session.append([prompt[end : end + 1]])[0], expected[end], TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_the_embedding_are_the_tokens(engine: str) -> None:
    """Also in 16 bits, with rounded weights and quantized K and V."""
    for options in ({}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"kv_dtype": "int8", "attention": "plugin"}):
        with opened(engine=engine, **options) as session:  # type: ignore[arg-type]
            with trt_kvcache.Checkpoint.open(VISION / "mistral3") as checkpoint:
                embedding = checkpoint.tensor("model.embed_tokens.weight").astype(np.float32)
            expected = session.prefill([[3, 9, 20, 7]])
            rows = session.add_embeddings(embedding[[9, 20]])
            np.testing.assert_array_equal(session.prefill([[3, *rows, 7]]), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_not_scaled_as_the_embedding_is(engine: str) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    options = {"engine": engine, "dtype": "float32", "max_embeddings": 2, "max_sequence_length": 16}
    with trt_kvcache.load(GOLDEN / "granite", **options) as session:
        with trt_kvcache.Checkpoint.open(GOLDEN / "granite") as checkpoint:
            row = checkpoint.tensor("model.embed_tokens.weight")[9].astype(np.float32)
        expected = session.prefill([[3, 9, 7]])
        rows = session.add_embeddings(np.array([3.0 * row, row]))
        assert_close(session.prefill([[3, rows[0], 7]]), expected, TOLERANCE)
        assert not np.allclose(session.prefill([[3, rows[1], 7]]), expected)


def test_equal_rows_have_one_id_and_are_found_by_the_prefix_cache() -> None:
    ids, rows, expected = image("mistral3")
    with opened(prompt_cache_bytes=1 << 20) as session:
        first = session.add_embeddings(rows)
        assert first == (79, 80)
        assert session.add_embeddings(rows[::-1]) == first[::-1]
        assert session.add_embeddings(np.stack([rows[0], rows[0], rows[1] + 1])) == (79, 79, 81)
        prompt = with_rows(ids, first)
        list(session.generate([prompt], max_new_tokens=1, ignore_eos=True))
        session.prefill([[1, 2]])
        other = with_rows(ids, (first[0], 81))
        for tokens, reused in ((prompt, 6), (other, 3)):
            before = session.statistics.reused_tokens
            assert_close(session.prefill([tokens])[0], expected[-1], TOLERANCE) if tokens is prompt else session.prefill([tokens])
            assert session.statistics.reused_tokens - before == reused


@pytest.mark.parametrize("engine", ENGINES)
def test_penalties_leave_rows_out_and_the_queue_runs_them(engine: str) -> None:
    ids, rows, _ = image("mistral3")
    options: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True, "repetition_penalty": 1.3, "presence_penalty": 0.2}
    with opened(engine=engine) as session:
        prompt = with_rows(ids, session.add_embeddings(rows))
        alone = [event.token for event in session.generate([prompt], **options)]
        handles = [session.submit(one, **options) for one in (prompt, [3, 4], prompt, prompt[:6], prompt)]
        while session.step():
            pass
        assert [list(handles[index].tokens) for index in (0, 2, 4)] == [alone] * 3


def test_texts_of_prompts_with_rows_are_decoded_and_end_at_stop_texts() -> None:
    with trt_kvcache.load(ROOT / "examples" / "tiny-llama", engine="numpy", max_embeddings=4) as session:
        rows = session.add_embeddings(np.ones((3, 32)))
        prompt = [*session.tokenizer.encode("Alice"), *rows, *session.tokenizer.encode(" was")]
        events = list(session.generate([prompt], max_new_tokens=12))
        text = "".join(event.text for event in events)
        assert len(text) > 8
        [cut] = session.complete([prompt], max_new_tokens=12, stop=[text[4:7]])
        assert cut == text[: text.index(text[4:7])]


def test_ids_without_a_row_are_refused_everywhere() -> None:
    _, rows, _ = image("mistral3")
    with opened() as session:
        with raises(RangeError, "prompts[0][1]", expected="from 0 to 78", got="79"):
            session.prefill([[3, 79]])
        session.add_embeddings(rows[:1])
        session.prefill([[3, 79]])
        with raises(RangeError, "prompts[0][1]", expected="from 0 to 79", got="80"):
            session.prefill([[3, 80]])
        with raises(RangeError, "tokens[0]", expected="from 0 to 78", got="79"):
            session.decode([79])
        with raises(RangeError, "prompts[0][0]", expected="from 0 to 78", got="79"):
            session.score([[79, 3]])
        with raises(RangeError, "prompts[0][0]", expected="from 0 to 78", got="79"):
            session.submit([79, 3], prompt_logprobs=0)
        assert session.tokens(0) == (3, 79)


def test_snapshots_are_refused_with_rows(tmp_path: Path) -> None:
    _, rows, _ = image("mistral3")
    with opened() as session:
        session.prefill([[3, 4]])
        session.save_snapshot(tmp_path / "tokens")
        session.prefill([[3, *session.add_embeddings(rows)]])
        with raises(ConfigError, "slot 0", expected="tokens alone", got="embeddings"):
            session.save_snapshot(tmp_path / "rows")
        assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("draft", ["ngram", str(VISION / "mistral3")], ids=["ngram", "model"])
@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_after_rows_change_no_token(engine: str, draft: str) -> None:
    """Of images that repeat, whose rows have one id each, greedy and sampled, in a batch and in the queue."""
    ids, rows, _ = image("mistral3")
    of_two = {3: 60.0, 4: 60.0}  # answers of two tokens repeat pairs of them
    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 3, "logit_bias": of_two}
    with opened(engine=engine, max_sequence_length=48) as plain, opened(engine=engine, max_sequence_length=48, draft=draft) as session:
        tokens = []
        for one in (plain, session):
            prompt = with_rows(ids, one.add_embeddings(rows))
            prompts = [prompt * 3, [3, 4, 3, 4], [*prompt, *prompt[:4]]]
            found = [
                [(event.index, event.token) for event in one.generate(prompts, **more)]
                for more in (options, {**options, "temperature": 0.0})
            ]
            handles = [one.submit(each, **options) for each in (*prompts, prompt)]
            while one.step():
                pass
            tokens.append(([sorted(events) for events in found], [list(handle.tokens) for handle in handles]))
        assert tokens[0] == tokens[1]
        assert session.statistics.draft_tokens


def test_a_drafter_gets_ids_of_rows_and_may_not_propose_them() -> None:
    seen = []

    class Repeats:
        def propose(self, sequences: Any) -> Any:
            seen.extend((one.tokens, one.vocab_size) for one in sequences)
            return [one.tokens[:1] for one in sequences]

    _, rows, _ = image("mistral3")
    with opened() as session:
        [row] = session.add_embeddings(rows[:1])
        with raises(ConfigError, "Repeats.propose", expected="token ids from 0 to 78", got="[[79]]"):
            list(session.generate([[row, 3, 4]], max_new_tokens=5, ignore_eos=True, draft=Repeats()))
        assert seen[0][0][:3] == [row, 3, 4]
        assert seen[0][1] == session.vocab_size


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_drafts_after_rows(engine: str, tmp_path: Path) -> None:
    if engine == "torch":
        pytest.importorskip("torch").set_num_threads(1)
    folder = write_mtp_model(tmp_path / "mtp")
    options: dict[str, Any] = {"engine": engine, "dtype": "float32", "max_embeddings": 2, "max_sequence_length": 40, "max_batch_size": 2}
    found = []
    for draft in (None, "mtp"):
        with trt_kvcache.load(folder, draft=draft, **options) as session:
            rows = session.add_embeddings(np.random.default_rng(0).normal(size=(2, session.model.hidden_size)))
            prompts = [[5, *rows, 6, 7, *rows, 6], [rows[1]]]
            events = session.generate(prompts, max_new_tokens=9, ignore_eos=True)
            found.append(sorted((event.index, event.token) for event in events))
            assert bool(session.statistics.draft_tokens) == (draft is not None)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("rows", "error", "expected", "got"),
    [
        (np.zeros((1, 55)), ShapeError, "[n, 56]", "[1, 55]"),
        (np.zeros(56), ShapeError, "[n, 56]", "[56]"),
        (np.zeros((1, 56), np.int32), DTypeError, "floating point", "int32"),
        (np.full((1, 56), np.nan), ConfigError, "finite", "others"),
        (np.full((1, 56), 1e39), ConfigError, "finite", "others"),
    ],
)
def test_rows_of_another_kind_are_refused(rows: np.ndarray, error: type[Exception], expected: str, got: str) -> None:
    with opened() as session:
        with raises(error, "rows", expected=expected, got=got):
            session.add_embeddings(rows)
        assert session.add_embeddings(np.zeros((1, 56), np.float16)) == (79,)


def test_more_rows_than_the_session_has_room_for_are_refused_and_change_nothing() -> None:
    with opened(max_embeddings=2) as session:
        session.add_embeddings(np.zeros((1, 56)))
        with raises(CapacityError, "embeddings", expected="2", got="2"):
            session.add_embeddings(np.array([[value] * 56 for value in (0.0, 1.0, 2.0)]))
        assert session.add_embeddings(np.ones((1, 56))) == (80,)
        assert session.add_embeddings(np.zeros((0, 56))) == ()


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("gemma3", "attention both ways inside an image"),
        ("qwen3_5", "positions of three axes"),
        ("qwen3_5_moe", "positions of three axes"),
        ("qwen3_vl", "positions of three axes and rows that later layers add"),
        ("qwen2_5_vl", "positions of three axes"),
    ],
)
def test_models_whose_images_need_more_are_refused_by_name(name: str, needed: str) -> None:
    with opened(name) as session, raises(ConfigError, "add_embeddings", got=name, says=needed):
        session.add_embeddings(np.zeros((1, 40)))


def test_a_session_without_room_is_refused() -> None:
    with opened(max_embeddings=0) as session, raises(ConfigError, "add_embeddings", expected="max_embeddings", got="another"):
        session.add_embeddings(np.zeros((1, 56)))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_checks_ids_of_rows_itself(engine: str) -> None:
    with opened(engine=engine) as session:
        session.prefill([[3]])
        session._prompts._vocab_size = 100
        with pytest.raises(EngineError, match=r"`input_ids`: expected values from 0 to 78, got 79"):
            session.decode([79])


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_models_with_per_layer_embeddings_have_no_rows_in_place_of_tokens(engine: str) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"max_embeddings: expected 0 for a model with per-layer embeddings, .*, got 2"):
        trt_kvcache.load(GOLDEN / "gemma4-ple", engine=engine, max_embeddings=2, max_sequence_length=16)
