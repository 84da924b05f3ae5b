"""Graphs of steps: captured on second use, replayed from then on, the least recently used one first out of the budget."""

from __future__ import annotations

import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.torch_engine.fake_cuda import FakeCuda  # noqa: E402
from trt_kvcache.torch_engine import step_graphs  # noqa: E402
from trt_kvcache.torch_engine.step_graphs import StepGraphs  # noqa: E402


class Graphs:
    """Graphs within 100 bytes, over a stand-in for CUDA. ``ran`` has the keys whose work was computed, eagerly or by a replay."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.graphs = StepGraphs(torch.device("cpu"), 100)
        self.ran = []

    def run(self, *keys):
        for key in keys:
            self.graphs.run(key, self.cuda.work(lambda key=key: self.ran.append(key)))

    @property
    def counts(self):
        return self.cuda.captures, self.cuda.replays


@pytest.fixture
def made(monkeypatch):
    return Graphs(FakeCuda(monkeypatch))


def test_the_second_run_of_a_key_is_captured_and_replayed(made):
    made.run("a")
    assert made.counts == (0, 0)
    made.run("a")
    assert made.counts == (1, 1)
    made.run("b", "a", "b")
    assert made.counts == (2, 3)
    assert made.ran == ["a", "a", "b", "a", "b"], "each run computes once: a capture computes nothing"


def test_all_graphs_share_a_pool(made):
    made.cuda.pool_nbytes = 30
    made.run("a", "a", "b", "b", "c", "c")
    assert len(made.cuda.pools) == 1
    assert made.graphs.nbytes == made.cuda.nbytes == 60


def test_a_pool_that_grows_is_counted_once(made):
    for key, nbytes in (("a", 20), ("b", 50), ("c", 40)):
        made.cuda.pool_nbytes = nbytes
        made.run(key, key)
    assert made.graphs.nbytes == made.cuda.nbytes == 50 + 3 * 10


def test_the_least_recently_used_graph_goes_first(made):
    made.cuda.graph_nbytes = 30
    made.run(*"aabbcc", "a")
    assert len(made.graphs) == 3
    made.run(*"dd")
    assert (len(made.graphs), made.graphs.nbytes) == (3, 90)
    captures = made.cuda.captures
    made.run(*"acd")
    assert made.cuda.captures == captures, "b went"
    made.run("b")
    assert made.cuda.captures == captures, "its next run is eager"
    made.run("b")
    assert made.cuda.captures == captures + 1


def test_a_graph_is_waited_for_before_it_is_dropped(made):
    made.cuda.graph_nbytes = 60
    made.run(*"aa")
    assert made.cuda.waits == 0
    made.run(*"bb")
    assert made.cuda.waits == 1
    assert made.cuda.nbytes == 60


def test_the_last_captured_graph_stays_whatever_it_takes(made):
    made.cuda.pool_nbytes = 500
    made.run(*"aa", "a")
    assert (len(made.graphs), made.counts) == (1, (1, 2))
    made.run(*"bb")
    assert len(made.graphs) == 1
    assert len(made.cuda.pools) == 1, "a pool is that of a graph that lives"


def test_keys_without_a_graph_are_bounded(made, monkeypatch):
    monkeypatch.setattr(step_graphs, "MAX_KEYS", 3)
    made.run(*"abcd", "a")
    assert made.counts == (0, 0), "a was forgotten, and d is known"
    made.run("d")
    assert made.counts == (1, 1)


def test_graphs_are_bounded_too(made, monkeypatch):
    monkeypatch.setattr(step_graphs, "MAX_KEYS", 2)
    made.cuda.graph_nbytes = 1
    made.run(*"aabbcc")
    assert len(made.graphs) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not permitted")])
def test_a_key_that_cannot_be_captured_stays_eager(made, error):
    made.run(*"aab")
    made.cuda.fails = error
    made.run(*"bbb")
    assert made.ran == list("aabbbb")
    assert made.counts == (2, 1)
    assert made.graphs.refusals == [str(error)]
    made.cuda.fails = None
    made.run(*"abcc")
    assert made.counts == (3, 3), "graphs of other keys are made and replayed"


@pytest.mark.parametrize("key", [None, "c"])
def test_graphs_make_room_for_an_eager_run(made, key):
    made.run(*"aabb")
    calls = []

    def needs_room():
        calls.append(made.cuda.nbytes)
        if made.cuda.nbytes:
            raise torch.OutOfMemoryError("no room")

    made.graphs.run(key, made.cuda.work(needs_room))
    assert calls == [20, 0]
    assert (made.graphs.max_nbytes, made.graphs.nbytes) == (10, 0)
    made.run(*"aabb")
    assert len(made.graphs) == 1


def test_without_graphs_a_lack_of_memory_is_raised(made):
    def fail():
        raise torch.OutOfMemoryError("no room")

    for key in (None, "a"):
        with pytest.raises(torch.OutOfMemoryError):
            made.graphs.run(key, fail)


def test_what_is_wrong_with_the_work_is_raised(made):
    def fail():
        raise RuntimeError("out of luck")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of luck"):
            made.graphs.run("a", made.cuda.work(fail))
    assert made.counts == (0, 0), "what has not run is not captured"


def test_an_interrupt_of_a_capture_leaves_the_key_to_be_captured(made):
    made.run("a")
    made.cuda.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        made.run("a")
    made.cuda.fails = None
    made.run("a")
    assert made.counts == (2, 1)
    assert made.graphs.refusals == []


def test_close_waits_and_releases(made):
    made.run(*"aabb")
    made.graphs.close()
    assert (made.cuda.waits, made.cuda.nbytes, len(made.graphs), made.graphs.nbytes) == (1, 0, 0, 0)
    made.graphs.close()
    assert made.cuda.waits == 1
