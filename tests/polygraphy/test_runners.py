from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polygraphy.config
import pytest
from polygraphy.comparator import Comparator, DataLoader
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER

from tests.helpers.adapters import write_adapter
from tests.helpers.assertions import assert_close, raises
from tests.helpers.models import write_model
from tests.paths import GOLDEN, SHIPPED
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, EngineError, ShapeError
from trt_kvcache.polygraphy.feeds import greedy_feeds, make_feed
from trt_kvcache.polygraphy.live_rows import live_rows
from trt_kvcache.polygraphy.loaders import SessionFromFolder
from trt_kvcache.polygraphy.runners import RecomputeRunner, ReferenceRunner, SessionRunner
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_source import SessionSource

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, vocabulary of 79
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 16, "max_prefill_length": 5, "dtype": "float32"}
SOURCE = SessionSource(MODEL, engine="reference", **SIZES)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]

RunnerMaker = Callable[..., SessionRunner]


@pytest.fixture(autouse=True)
def strict_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Polygraphy's own checks, among them that a runner's state is afterwards as before its activation."""
    monkeypatch.setattr(polygraphy.config, "INTERNAL_CORRECTNESS_CHECKS", True)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        yield


@pytest.fixture(params=[SessionRunner, RecomputeRunner])
def either(request: pytest.FixtureRequest) -> RunnerMaker:
    maker: RunnerMaker = request.param
    return maker


def _assert_same(outputs: dict[str, Any], logits: np.ndarray, session: InferenceSession) -> None:
    expected = {"logits": logits, **live_rows(session.cache)}
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array, err_msg=name)


def test_an_inference_is_what_the_session_does() -> None:
    with SOURCE() as session, SessionRunner(SOURCE) as runner:
        _assert_same(runner.infer(make_feed(PROMPTS, reset=True)), session.prefill(PROMPTS), session)
        _assert_same(runner.infer(make_feed([[3], [4], [5]], reset=False)), session.decode([3, 4, 5]), session)
        turns = [[6, 7], [8, 9, 10, 11], [12]]
        _assert_same(runner.infer(make_feed(turns, reset=False)), session.append(turns), session)
        _assert_same(runner.infer(make_feed(PROMPTS[:2], reset=True)), session.prefill(PROMPTS[:2]), session)


def test_recomputing_is_a_prefill_of_everything_so_far() -> None:
    with SOURCE() as session, RecomputeRunner(SOURCE) as runner:
        runner.infer(make_feed(PROMPTS, reset=True))
        outputs = runner.infer(make_feed([[3], [4], [5]], reset=False))
        _assert_same(outputs, session.prefill([[*PROMPTS[0], 3], [*PROMPTS[1], 4], [*PROMPTS[2], 5]]), session)
        outputs = runner.infer(make_feed([[6, 7], [], [8]], reset=False))
        _assert_same(outputs, session.prefill([[*PROMPTS[0], 3, 6, 7], [*PROMPTS[1], 4], [*PROMPTS[2], 5, 8]]), session)
        outputs = runner.infer(make_feed([[6, 7]], reset=True))
        _assert_same(outputs, session.prefill([[6, 7]]), session)


def test_a_slot_that_gets_nothing_keeps_its_logits(either: RunnerMaker) -> None:
    with either(SOURCE) as runner:
        first = runner.infer(make_feed(PROMPTS, reset=True))
        kept = first["logits"].copy()
        second = runner.infer(make_feed([[3, 4], [], [5]], reset=False))
        np.testing.assert_array_equal(first["logits"], kept)  # not overwritten
        assert_close(second["logits"][1], kept[1])
        assert np.abs(second["logits"][[0, 2]] - kept[[0, 2]]).max() > 0.1
        assert second["kvcache_lengths"].tolist() == [9, 2, 4]


def test_the_first_inference_starts_new_sequences(either: RunnerMaker) -> None:
    with SOURCE() as session:
        session.prefill([[40, 41]])
        with either(session) as runner:
            outputs = runner.infer(make_feed([[1, 2, 3]], reset=False))
            assert outputs["kvcache_lengths"].tolist() == [3]
        with either(session) as runner:  # activated again
            assert runner.infer(make_feed([[1, 2], [3]], reset=False))["kvcache_lengths"].tolist() == [2, 1]


def test_reset_may_be_left_out(either: RunnerMaker) -> None:
    feed = make_feed([[1, 2], [3, 4]], reset=True)
    del feed["reset"]
    with either(SOURCE) as runner:
        runner.infer(feed)
        assert runner.infer(feed)["kvcache_lengths"].tolist() == [4, 4]


def test_without_live_rows_there_are_logits_only(either: RunnerMaker) -> None:
    with either(SOURCE, live_rows=False) as runner:
        outputs = runner.infer(make_feed(PROMPTS, reset=True))
        assert [(name, array.shape, array.dtype) for name, array in outputs.items()] == [("logits", (3, 79), np.float32)]


def test_a_session_from_a_callable_is_closed_and_a_given_one_is_not(either: RunnerMaker) -> None:
    with either(SOURCE) as runner:
        session = runner.session
        runner.infer(make_feed([[1]], reset=True))
    with pytest.raises(ClosedError, match="this InferenceSession is closed"):
        session.prefill([[1]])
    with pytest.raises(ClosedError, match=r"mine: the runner is not active"):
        _ = either(SOURCE, name="mine").session
    with SOURCE() as session:
        with either(session) as runner:
            runner.infer(make_feed([[1]], reset=True))
        session.decode([2])


def test_the_time_of_an_inference_is_that_of_the_session() -> None:
    with SessionRunner(SOURCE) as runner:
        runner.infer(make_feed(PROMPTS, reset=True))
        assert runner.last_inference_time() == pytest.approx(runner.session.statistics.prefill_seconds, abs=0.05)
        assert runner.last_inference_time() >= runner.session.statistics.prefill_seconds


def test_metadata_names_the_inputs_and_their_largest_shapes(either: RunnerMaker) -> None:
    with either(SOURCE) as runner:
        metadata = runner.get_input_metadata(use_numpy_dtypes=False)
    assert {name: (str(entry.dtype), list(entry.shape), entry.shape.max) for name, entry in metadata.items()} == {
        "input_ids": ("int32", [None, None], (3, 16)),
        "new_lengths": ("int32", [None], (3,)),
        "reset": ("bool", [1], (1,)),
    }


def test_metadata_may_name_the_tokens_only(either: RunnerMaker) -> None:
    with either(SOURCE, tokens_only=True) as runner:
        assert list(runner.get_input_metadata(use_numpy_dtypes=False)) == ["input_ids"]
        runner.infer(make_feed(PROMPTS, reset=True))  # lengths may be passed nevertheless


def test_default_inputs_are_ragged_rows_in_all_slots(either: RunnerMaker) -> None:
    results = Comparator.run([either(SOURCE, tokens_only=True)], data_loader=DataLoader(val_range={"input_ids": (0, 78)}))
    ((_, (result,)),) = results.items()
    assert result["kvcache_lengths"].tolist() == [16, 15, 14]


def test_without_lengths_all_tokens_are_real(either: RunnerMaker) -> None:
    with either(SOURCE) as runner:
        outputs = runner.infer({"input_ids": np.array([[1, 2], [3, 4]], np.int32)})
    assert outputs["kvcache_lengths"].tolist() == [2, 2]


class TestErrorsOfPolygraphy:
    """With a loader of Polygraphy, errors are its own, and logged."""

    def test_a_folder_that_is_not_there(self, either: RunnerMaker, tmp_path: Path) -> None:
        with (
            pytest.raises(PolygraphyException, match="expected a model folder, an engine folder, or an id"),
            either(SessionFromFolder(tmp_path / "none")),
        ):
            pass

    def test_a_step_that_fails(self, either: RunnerMaker) -> None:
        with either(SessionFromFolder(MODEL, engine="reference", **SIZES)) as runner:
            runner.infer(make_feed(PROMPTS, reset=True))
            with pytest.raises(PolygraphyException, match="expected one"):
                runner.infer(make_feed([[1], [2]], reset=False))


@pytest.mark.parametrize(
    ("feed", "error", "text"),
    [
        (make_feed([[1], [2]], reset=False), ShapeError, "expected one"),
        (make_feed([[1] * 10, [2], [3]], reset=False), CapacityError, "Nothing was changed"),
        (make_feed([[1], []], reset=True), ShapeError, r"prompts\[1\]: expected at least one token"),
        ({"new_lengths": np.ones(3, np.int32)}, PolygraphyException, "input_ids"),
        ({**make_feed([[1]], reset=False), "other": np.zeros(1)}, PolygraphyException, "other"),
    ],
)
def test_after_a_refused_feed_the_next_one_goes_on(either: RunnerMaker, feed: Any, error: type[Exception], text: str) -> None:
    decode = make_feed([[3], [4], [5]], reset=False)
    with either(SOURCE) as runner, either(SOURCE) as undisturbed:
        for one in (runner, undisturbed):
            one.infer(make_feed(PROMPTS, reset=True))
        with pytest.raises(error, match=text):
            runner.infer(feed)
        ours, theirs = runner.infer(decode), undisturbed.infer(decode)
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_polygraphy_runs_them_side_by_side_each_with_its_own_cache() -> None:
    feeds = [make_feed(PROMPTS, reset=True)] + [make_feed([[token], [token + 1], [token + 2]], reset=False) for token in range(5)]
    runners = [SessionRunner(SOURCE), RecomputeRunner(SOURCE), ReferenceRunner(MODEL, **SIZES)]
    for streaming in (False, True):
        results = Comparator.run(runners, data_loader=feeds, streaming=streaming)
        assert Comparator.compare_accuracy(results, comparisons=[(0, 1), (0, 2)])


def test_a_runner_has_the_adapters_of_its_sequences(tmp_path: Path) -> None:
    """Each row its own; a recomputation too, and the reference runner."""
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    adapters = {name: str(write_adapter(tmp_path / name, seed=seed)) for seed, name in enumerate(("sql", "poems"))}
    names, options = ("sql", None, "poems"), {"max_batch_size": 3, "max_sequence_length": 20, "adapters": adapters}
    feeds = [make_feed([[5, 6, 7], [8], [9, 10]], reset=True), make_feed([[3], [4], [5]], reset=False)]
    with SessionSource(model, engine="numpy", **options)() as session:
        expected = [session.prefill([[5, 6, 7], [8], [9, 10]], adapter=names), session.decode([3, 4, 5])]
    source = SessionSource(model, engine="numpy", **options)
    for runner in (
        SessionRunner(source, adapter=names),
        RecomputeRunner(source, adapter=names),
        ReferenceRunner(model, request_adapter=names, **options),
    ):
        with runner:
            for feed, logits in zip(feeds, expected, strict=True):
                assert_close(runner.infer(feed)["logits"], logits)


def test_a_reference_runner_runs_the_reference_engine() -> None:
    with ReferenceRunner(MODEL, **SIZES) as runner, SOURCE() as session:
        assert type(runner.session.engine) is type(session.engine)
        assert runner.name.startswith("kvcache-reference-N")
        np.testing.assert_array_equal(runner.infer(make_feed(PROMPTS, reset=True))["logits"], session.prefill(PROMPTS))


def test_greedy_feeds_follow_the_logits() -> None:
    with SessionRunner(SOURCE) as runner, SOURCE() as session:
        fed = []
        for feed in greedy_feeds(runner, PROMPTS, 4):
            runner.infer(feed)
            fed.append(feed)
        logits = session.prefill(PROMPTS)
        np.testing.assert_array_equal(fed[0]["input_ids"], make_feed(PROMPTS, reset=True)["input_ids"])
        assert [feed["reset"].item() for feed in fed] == [True, False, False, False, False]
        for feed in fed[1:]:
            assert feed["input_ids"].tolist() == logits.argmax(axis=1)[:, np.newaxis].tolist()
            logits = session.decode(feed["input_ids"][:, 0].tolist())


def test_greedy_feeds_notice_that_a_feed_was_not_run() -> None:
    with SessionRunner(SOURCE, name="first") as runner:
        feeds = greedy_feeds(runner, PROMPTS, 3)
        next(feeds)
        with pytest.raises(EngineError, match="feed 0 was not run through first"):
            next(feeds)
        feeds = greedy_feeds(runner, PROMPTS, 3)
        runner.infer(next(feeds))
        next(feeds)
        with pytest.raises(EngineError, match="feed 1 was not run through first"):
            next(feeds)


def test_greedy_feeds_take_text_where_there_is_a_tokenizer() -> None:
    with ReferenceRunner(SHIPPED) as runner:
        tokenizer = runner.session.tokenizer
        assert tokenizer is not None
        feed = next(greedy_feeds(runner, ["Alice was"], 0))
        assert feed["input_ids"].tolist() == [tokenizer.encode("Alice was")]
    with SessionRunner(SOURCE) as runner, pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        next(greedy_feeds(runner, ["Alice was"], 0))


def test_options_of_a_model_are_refused_for_an_engine_folder(tmp_path: Path) -> None:
    (tmp_path / "engine.plan").write_bytes(b"plan")
    with raises(ConfigError, "max_batch_size, dtype", expected=("with a Hugging Face folder only", "is an engine folder")):
        SessionSource(tmp_path, max_batch_size=1, dtype="float16")()
    with pytest.raises(EngineError, match=r"config\.json"):
        SessionSource(tmp_path, engine="reference")()
