"""``verify`` and ``accept`` of trees: the logits of a token are those of its path, and a path is kept as if it had run alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.helpers.recording import VOCAB, cache_rows, logits_after, poison
from tests.helpers.sessions import hidden_rows, make, observe, refuse
from tests.helpers.token_trees import path_to, random_parents
from tests.paths import GOLDEN
from tests.session.every_logit import with_every_logit
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager, ReferenceEngine
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, ShapeError
from trt_kvcache.session import open_model as opening

PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]

#: Trees of the slots: tokens and parents. In the first, 9 and 8 follow the root 4, 7 and 6 follow 8.
ROWS = [[4, 9, 8, 7, 6], [5], [4, 3, 3]]
PARENTS = [[-1, 0, 0, 2, 2], [-1], [-1, 0, 1]]

#: Models of odd kinds: windows, two RoPEs, shared K/V, per-layer sizes, sinks, norms before RoPE.
MODELS = ["gemma2-bias", "gemma3", "gemma4-shared", "gpt_oss", "llama-llama3-bias", "ministral3-window", "phi3-short-window", "cohere2"]


def with_trees(**options: Any) -> InferenceSession:
    return with_every_logit(trees=True, **options)


def spoil(cache: Any, value: float) -> None:
    """Overwrite rows that are not live."""
    poison(cache, 127 if cache.kv_config.dtype == "int8" else value)


@contextmanager
def session_of(name: str, attention: Any, kv_dtype: Any = None, *, length: int = 40, slots: int = 3) -> Iterator[InferenceSession]:
    """Open a golden model, or that whose layers all differ; quantized K and V have a scale for each token."""
    quantized = None if kv_dtype is None else QuantizedKV(kv_dtype)
    if name != "mixed":
        sizes = {"max_batch_size": slots, "max_sequence_length": length, "max_prefill_length": 24}
        options = {"engine": "numpy", "dtype": "float32", "attention": attention, "kv_dtype": kv_dtype}
        with InferenceSession.from_model(GOLDEN / name, **options, **sizes) as session:  # type: ignore[arg-type]
            yield session
        return
    model = mixed_model(32, 16, 48, 64)
    sizes = {"max_batch_size": slots, "max_sequence_length": length}
    kv = decoder_cache_config(model, **sizes, dtype="float32", attention=attention, quantized=quantized)  # type: ignore[arg-type]
    options = {"max_prefill_length": 24, "max_logits_per_slot": "all", "attention": attention, "dtype": "float32"}
    engine = ReferenceEngine(RandomCheckpoint(model), kv=kv, memory=HostMemory(), **options)  # type: ignore[arg-type]
    with InferenceSession(engine, KVCacheManager(kv.kv, memory=engine.memory)) as session:  # type: ignore[arg-type]
        yield session


CASES = [(name, attention, None) for name in ("mixed", *MODELS) for attention in ("native", "mask", "plugin")]
QUANTIZED = [(name, "plugin", kind) for name in ("mixed", "gemma2-bias", "gemma4-shared") for kind in ("int8", "fp8")]


@pytest.mark.parametrize(("name", "attention", "kv_dtype"), [*CASES, *QUANTIZED])
def test_a_tree_gives_the_logits_of_its_paths_and_a_path_stays(name: str, attention: str, kv_dtype: str | None) -> None:
    random, same = Random(name), 5e-5 if kv_dtype is None else 0.06
    with session_of(name, attention, kv_dtype) as session, session_of(name, attention, kv_dtype) as plain:
        vocab = session.vocab_size
        tokens = [[random.randrange(3, vocab) for _ in range(length)] for length in (9, 1, 5)]
        session.prefill(tokens)
        for _ in range(3):
            spoil(session.cache, 0 if attention == "mask" else np.nan)  # the mask variant reads rows that are not live
            rows = [[random.randrange(3, vocab) for _ in range(random.randint(1, 9))] for _ in tokens]
            parents = [random_parents(random, len(row)) for row in rows]
            found = session.verify(rows, parents)
            paths = []
            for slot, row in enumerate(rows):
                for index in range(len(row)):
                    path = path_to(parents[slot], index)
                    [expected] = plain.prefill([[*tokens[slot], *(row[place] for place in path)]])
                    assert_close(found[slot, index], expected, tolerance=same)
                paths.append(path_to(parents[slot], random.randrange(len(row)))[: random.randint(0, len(row))])
                tokens[slot] += [row[place] for place in paths[-1]]
            session.accept(paths=paths)
            assert [list(session.tokens(slot)) for slot in range(3)] == tokens
            assert session.cache.host_kv_cache_lengths == tuple(map(len, tokens))
        spoil(session.cache, 0 if attention == "mask" else np.nan)
        following = session.decode([3, 4, 5])
        for slot, row in enumerate(tokens):
            assert_close(following[slot], plain.prefill([[*row, 3 + slot]])[0], tolerance=same)


def test_a_tree_of_64_tokens() -> None:
    random = Random(4)
    row, parents = [random.randrange(3, 30) for _ in range(64)], random_parents(Random(1), 64)
    with InferenceSession.from_model(
        GOLDEN / "gemma3", engine="numpy", dtype="float32", max_sequence_length=80, max_prefill_length=64
    ) as session:
        session.prefill([[5, 6, 7]])
        found = session.verify([row], [parents])
        for index in (0, 31, 62, 63):
            path = path_to(parents, index)
            assert_close(found[0, index], session.verify([[row[place] for place in path]])[0, -1])


def test_logits_of_every_token_of_each_tree() -> None:
    with with_trees() as session:
        session.prefill(PROMPTS)
        logits = session.verify(ROWS, PARENTS)
        for prompt, row, parents, of_slot in zip(PROMPTS, ROWS, PARENTS, logits, strict=True):
            for index in range(len(row)):
                np.testing.assert_array_equal(of_slot[index], logits_after([*prompt, *(row[one] for one in path_to(parents, index))]))
            assert np.isnan(of_slot[len(row) :]).all()


@pytest.mark.parametrize("combined", [False, True])
def test_accepted_rows_are_those_that_plain_steps_write(combined: bool) -> None:
    with with_trees(combined=combined) as session, make(combined=combined) as other:
        session.prefill(PROMPTS)
        session.verify(ROWS, PARENTS)
        session.accept(paths=[[0, 2, 4], [], [0, 1]])
        other.prefill([[*PROMPTS[0], 4, 8, 6], PROMPTS[1], [*PROMPTS[2], 4, 3]])
        assert [session.tokens(slot) for slot in range(3)] == [other.tokens(slot) for slot in range(3)]
        assert cache_rows(session.cache) == cache_rows(other.cache)
        np.testing.assert_array_equal(session.decode([1, 2, 3]), other.decode([1, 2, 3]))
        assert session.statistics.decode_tokens == 3 + 0 + 2 + 3


def test_nothing_is_held_before_a_path_is_accepted() -> None:
    with with_trees() as session:
        session.prefill(PROMPTS)
        before = observe(session)
        session.verify(ROWS, PARENTS)
        assert observe(session)[:-2] == before[:-2]
        session.decode([1, 2, 3])  # the step after a tree is none
        np.testing.assert_array_equal(session.decode([1, 2, 3])[0], logits_after([*PROMPTS[0], 1, 1]))


def test_first_tokens_may_be_counted_where_they_are_a_path() -> None:
    with with_trees() as session:
        session.prefill(PROMPTS)
        session.verify(ROWS, PARENTS)
        assert refuse(session, RangeError, lambda: session.accept([3, 1, 3])) == (
            "counts[0]: expected at most 2, as token 2 of the tree follows token 0, got 3. Pass paths."
        )
        session.accept([2, 0, 3])
        assert [session.tokens(slot) for slot in range(3)] == [(5, 6, 7, 4, 9), (8, 9), (1, 2, 3, 4, 4, 3, 3)]


def test_chains_take_paths_and_run_as_chains() -> None:
    with with_every_logit() as session:  # its engine takes no trees
        session.prefill(PROMPTS)
        session.verify([[4, 9, 8], [5], []], [[-1, 0, 1], np.array([-1]), []])
        session.accept(paths=[[0, 1], np.array([0]), ()])
        assert [session.tokens(slot) for slot in range(3)] == [(5, 6, 7, 4, 9), (8, 9, 5), (1, 2, 3, 4)]


@pytest.mark.parametrize("limit", [16, 7])
def test_a_slot_that_is_nearly_full_beside_a_tree(limit: int) -> None:
    """Enqueues of some slots each, if a view can begin between them; no tree is split."""
    with with_trees(limit=limit) as session:
        session.prefill([[8], [2], [1] * (limit - 1)])
        rows, parents = [[9, 8, 7, 6, 5], [4, 4], [3]], [[-1, 0, 0, 1, 2], [-1, 0], [-1]]
        if limit == 7:
            assert refuse(session, CapacityError, lambda: session.verify(rows, parents)) == (
                "verify: a slot has no room for the padding of 5 tokens, and a tree runs in one enqueue. Use smaller trees. "
                "Nothing was changed."
            )
            return
        logits = session.verify(rows, parents)
        np.testing.assert_array_equal(logits[0, 4], logits_after([8, 9, 7, 5]))
        np.testing.assert_array_equal(logits[2, 0], logits_after([*[1] * (limit - 1), 3]))
        session.accept(paths=[[0, 2, 4], [0], [0]])
        assert session.cache.host_kv_cache_lengths == (4, 2, limit)
        session.rewind(2, 1)
        np.testing.assert_array_equal(session.decode([1, 1, 1])[0], logits_after([8, 9, 7, 5, 1]))


def test_hidden_states_of_a_path_move_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "hidden_layers_for", lambda draft, config: "final_norm")
    with session_of("gemma2-bias", "native") as session, session_of("gemma2-bias", "native") as plain:
        session.prefill(PROMPTS)
        session.verify(ROWS, PARENTS)
        session.accept(paths=[[0, 2, 4], [0], [0, 1, 2]])
        session.decode([1, 2, 3])
        plain.prefill([session.tokens(slot) for slot in range(3)])
        for slot in range(3):
            count = len(session.tokens(slot))
            assert_close(hidden_rows(session, slot, count), hidden_rows(plain, slot, count))


def test_an_enqueue_that_fails_changes_nothing() -> None:
    with with_trees() as session:
        session.prefill(PROMPTS)
        before = observe(session)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session.engine, "enqueue", lambda stream: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.verify(ROWS, PARENTS)
        assert observe(session)[:-2] == before[:-2]
        refuse(session, RangeError, lambda: session.accept(paths=[[0], [0], [0]]))
        np.testing.assert_array_equal(session.decode([1, 2, 3])[1], logits_after([*PROMPTS[1], 2]))


class TestRefusals:
    @pytest.mark.parametrize(
        ("parents", "kind", "message"),
        [
            ([[-1, 0, 0, 2, 2], [-1]], ShapeError, "parents: expected one sequence for each of 3 rows of tokens, got 2."),
            ([[-1, 0, 0, 2], [-1], [-1, 0, 1]], ShapeError, "parents[0]: expected one parent for each of 5 tokens, got 4."),
            ([[-1, 0, 0, 2, 4], [-1], [-1, 0, 1]], RangeError, "parents[0][4]: expected an integer from 0 to 3, got 4."),
            ([[-1, 0, -1, 2, 2], [-1], [-1, 0, 1]], RangeError, "parents[0][2]: expected an integer from 0 to 1, got -1."),
            ([[-1, 0, 0, 2, 2], [0], [-1, 0, 1]], RangeError, "parents[1][0]: expected -1, as the first token is the root, got 0."),
            ([[-1, 0, 0, 2.0, 2], [-1], [-1, 0, 1]], RangeError, "parents[0][3]: expected an integer, got 2.0."),
            ([-1, -1, -1], ShapeError, "parents[0]: expected a sequence, got int."),
            ("abc", ShapeError, "parents: expected a sequence, got str."),
            (np.array(5), ShapeError, "parents: expected a sequence, got ndarray."),
        ],
    )
    def test_parents_that_are_no_trees(self, parents: Any, kind: Any, message: str) -> None:
        with with_trees() as session:
            session.prefill(PROMPTS)
            assert refuse(session, kind, lambda: session.verify(ROWS, parents)) == message

    @pytest.mark.parametrize(
        ("paths", "kind", "message"),
        [
            ([[0], [0]], ShapeError, "paths: expected one for each of 3 active slots, got 2."),
            ([[2, 4], [0], [0]], RangeError, "paths[0][0]: expected 0, the root, got 2."),
            ([[0, 1, 3], [0], [0]], RangeError, "paths[0][2]: expected a token that follows token 1, got 3."),
            ([[0, 0], [0], [0]], RangeError, "paths[0][1]: expected a token that follows token 0, got 0."),
            ([[0, 5], [0], [0]], RangeError, "paths[0][1]: expected an integer from 0 to 4, got 5."),
            ([[0], 0, [0]], ShapeError, "paths[1]: expected a sequence, got int."),
            (3, ShapeError, "paths: expected a sequence, got int."),
            ([np.array(0), [0], [0]], ShapeError, "paths[0]: expected a sequence, got ndarray."),
        ],
    )
    def test_indices_that_are_no_paths(self, paths: Any, kind: Any, message: str) -> None:
        with with_trees() as session:
            session.prefill(PROMPTS)
            session.verify(ROWS, PARENTS)
            assert refuse(session, kind, lambda: session.accept(paths=paths)) == message
            session.accept(paths=[[0, 2], [0], [0]])  # it can still be called

    def test_a_path_of_an_idle_slot(self) -> None:
        with with_trees() as session:
            session.prefill(PROMPTS)
            session.verify([ROWS[0], [], []], [PARENTS[0], [], []])
            message = refuse(session, RangeError, lambda: session.accept(paths=[[0], [0], []]))
            assert message == "paths[1][0]: expected nothing, as no token of this slot was run, got 0."

    def test_both_and_neither(self) -> None:
        with with_trees() as session:
            session.prefill(PROMPTS)
            session.verify(ROWS, PARENTS)
            assert refuse(session, RangeError, session.accept) == "accept: expected counts or paths, got neither."
            message = refuse(session, RangeError, lambda: session.accept([1, 1, 1], paths=[[0]] * 3))
            assert message == "accept: expected counts or paths, got both."

    def test_more_than_64_tokens(self) -> None:
        with with_trees(slots=1, limit=80, width=70, logits=70) as session:
            session.prefill([[1]])
            message = refuse(session, ShapeError, lambda: session.verify([[1] * 65], [[-1] + [0] * 64]))
            assert message == "tokens[0]: expected a tree of at most 64 tokens, got 65."
            session.verify([[1] * 65], [[*range(-1, 64)]])  # a chain has no limit

    def test_an_engine_without_trees(self) -> None:
        with with_every_logit() as session:
            session.prefill(PROMPTS)
            assert refuse(session, ConfigError, lambda: session.verify(ROWS, PARENTS)) == (
                "parents: expected chains with a RecordingEngine built without draft_tree, got a tree. Leave parents out."
            )

    def test_a_model_with_recurrent_states(self) -> None:
        with InferenceSession.from_model(GOLDEN / "lfm2", engine="numpy", max_sequence_length=32) as session:
            session.prefill([[5, 6, 7]])
            with pytest.raises(ConfigError) as error:
                session.verify([[1, 2, 3]], [[-1, 0, 0]])
            assert str(error.value) == "parents: expected chains with a model with recurrent states, got a tree. Leave parents out."
            assert session.tokens(0) == (5, 6, 7)

    def test_tokens_that_the_model_does_not_have(self) -> None:
        with with_trees() as session:
            session.prefill(PROMPTS)
            assert "tokens[0][1]" in refuse(session, RangeError, lambda: session.verify([[1, VOCAB, 2], [], []], [[-1, 0, 0], [], []]))
