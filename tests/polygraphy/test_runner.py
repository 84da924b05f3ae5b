import numpy as np
import polygraphy.config
import pytest
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER

from tests.paths import GOLDEN
from trt_kvcache.errors import CapacityError, EngineError, ShapeError
from trt_kvcache.polygraphy.feeds import greedy_feeds, make_feed
from trt_kvcache.polygraphy.live_rows import live_rows
from trt_kvcache.polygraphy.runner import RecomputeRunner, SessionRunner
from trt_kvcache.session.session_source import SessionSource

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, vocabulary of 79
SIZES = {"max_batch_size": 3, "max_sequence_length": 16, "max_prefill_length": 5, "dtype": "float32"}
SOURCE = SessionSource(MODEL, engine="reference", **SIZES)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]


@pytest.fixture(autouse=True)
def strict_and_quiet(monkeypatch):
    """Polygraphy's own checks, among them that a runner's state is afterwards as before its activation."""
    monkeypatch.setattr(polygraphy.config, "INTERNAL_CORRECTNESS_CHECKS", True)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        yield


@pytest.fixture(params=[SessionRunner, RecomputeRunner])
def either(request):
    return request.param


def _assert_same(outputs, logits, session):
    expected = {"logits": logits, **live_rows(session.cache)}
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array, err_msg=name)


def test_an_inference_is_what_the_session_does():
    with SOURCE() as session, SessionRunner(SOURCE) as runner:
        tokens, turns = [[3], [4], [5]], [[6, 7], [8, 9, 10, 11], [12]]
        _assert_same(runner.infer(make_feed(PROMPTS, reset=True)), session.prefill(PROMPTS), session)
        _assert_same(runner.infer(make_feed(tokens, reset=False)), session.decode([3, 4, 5]), session)
        _assert_same(runner.infer(make_feed(turns, reset=False)), session.append(turns), session)
        _assert_same(runner.infer(make_feed(PROMPTS[:2], reset=True)), session.prefill(PROMPTS[:2]), session)


def test_the_first_inference_of_each_activation_starts_new_sequences(either):
    with SOURCE() as session:
        session.prefill([[40, 41]])
        for rows, lengths in (([[1, 2, 3]], [3]), ([[1, 2], [3]], [2, 1])):
            with either(session) as runner:
                assert runner.infer(make_feed(rows, reset=False))["kvcache_lengths"].tolist() == lengths
        session.decode([2, 3])  # a session that was given stays open


def test_without_live_rows_there_are_logits_only_and_reset_may_be_left_out(either):
    feed = make_feed(PROMPTS, reset=True)
    del feed["reset"]
    with either(SOURCE, live_rows=False) as runner:
        outputs = runner.infer(feed)
        assert [(name, array.shape, array.dtype) for name, array in outputs.items()] == [("logits", (3, 79), np.float32)]
        runner.infer(feed)
        assert runner.session.cache.host_kv_cache_lengths == (14, 4, 6)


@pytest.mark.parametrize(
    ("feed", "error", "text"),
    [
        (make_feed([[1], [2]], reset=False), ShapeError, "expected one"),
        (make_feed([[1] * 10, [2], [3]], reset=False), CapacityError, "Nothing was changed"),
        (make_feed([[1], []], reset=True), ShapeError, r"prompts\[1\]: expected at least one token"),
        ({"input_ids": np.zeros((3, 1), np.int32)}, PolygraphyException, "new_lengths"),
    ],
)
def test_after_a_refused_feed_the_next_one_goes_on(either, feed, error, text):
    decode = make_feed([[3], [4], [5]], reset=False)
    with either(SOURCE) as runner, either(SOURCE) as undisturbed:
        for one in (runner, undisturbed):
            one.infer(make_feed(PROMPTS, reset=True))
        with pytest.raises(error, match=text):
            runner.infer(feed)
        ours, theirs = runner.infer(decode), undisturbed.infer(decode)
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_greedy_feeds_follow_the_logits():
    with SessionRunner(SOURCE) as runner, SOURCE() as session:
        expected, logits = make_feed(PROMPTS, reset=True), session.prefill(PROMPTS)
        for feed in greedy_feeds(runner, PROMPTS, 4):
            assert {name: array.tolist() for name, array in feed.items()} == {name: array.tolist() for name, array in expected.items()}
            runner.infer(feed)
            tokens = logits.argmax(axis=1).tolist()
            expected, logits = make_feed([[token] for token in tokens], reset=False), session.decode(tokens)


def test_greedy_feeds_notice_that_a_feed_was_not_run():
    with SessionRunner(SOURCE, name="first") as runner:
        feeds = greedy_feeds(runner, PROMPTS, 3)
        runner.infer(next(feeds))
        next(feeds)
        with pytest.raises(EngineError, match="feed 1 was not run through first"):
            next(feeds)
