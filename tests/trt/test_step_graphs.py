"""CUDA graphs of ``TensorRTEngine``, against a stand-in that records its calls; no GPU runs here."""

import pytest

from tests.helpers.engine_files import PLAN, make_engine_folder
from tests.helpers.fake_tensorrt import (
    BATCH,
    PREFILL,
    FakeGpuMemory,
    FakeLogger,
    FakeStream,
    FakeTensorRT,
    install,
    make_ready,
    set_shapes,
)
from tests.helpers.models import write_model
from tests.trt.decoding import Decoding
from trt_kvcache import InferenceSession, KVCacheManager
from trt_kvcache.errors import EngineError
from trt_kvcache.trt.cuda_graphs import MAX_GRAPHS, RUNS_BEFORE_RETRY
from trt_kvcache.trt.graph_engine import MAX_PREFILL_GRAPHS, RUNS_OF_A_PREFILL
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("engine")
    return make_engine_folder(write_model(base / "model"), base / "engine")


@pytest.fixture(params=["tensorrt_rtx", "tensorrt"])
def fake(request, folder, monkeypatch, tmp_path):
    made = FakeTensorRT(folder.config.tensors, folder.config.profiles, plan=PLAN)
    install(made, monkeypatch, tmp_path / "caches", request.param)
    return made


@pytest.fixture
def memory():
    return FakeGpuMemory()


@pytest.fixture
def decoding(fake, memory):
    with TensorRTEngine.open(PLAN, memory=memory) as engine:
        yield Decoding(engine, fake, memory)


EAGER = "1"  # the profile of a step that TensorRT runs


def test_decode_is_captured_at_its_third_step_and_then_replayed(decoding):
    assert decoding.run(5) == [EAGER, EAGER, EAGER, "graph 1", "graph 1", "graph 1"]
    assert decoding.engine.graph_refusals == ()


def test_a_graph_has_a_context_of_its_own_with_an_eager_run_before(decoding, fake):
    decoding.run(2)
    _, working, own = fake.contexts
    assert fake.enqueued == [working, own]
    decoding.run(1)
    assert fake.enqueued == [own], "captured"
    assert (own.profile, own.addresses, own.shapes) == (working.profile, working.addresses, working.shapes)
    assert own.memory == working.memory  # one activation memory for all


def test_other_addresses_get_a_graph_and_the_old_ones_find_theirs(decoding):
    decoding.run(4)
    decoding.bind_other_logits()
    assert decoding.run(4) == [EAGER, EAGER, EAGER, "graph 2", "graph 2"]
    decoding.engine.bind("logits", decoding.bound["logits"])
    assert decoding.run(2) == ["graph 1"] * 2


def test_another_batch_gets_a_graph_and_the_old_one_finds_its_own(decoding):
    """The stream of the stand-in refuses a graph whose context has changed."""
    decoding.run(4)
    set_shapes(decoding.engine, 2)
    assert decoding.run(4) == [EAGER, EAGER, EAGER, "graph 2", "graph 2"]
    set_shapes(decoding.engine, BATCH)
    assert decoding.run(1) == ["graph 1"]


def test_a_prefill_between_two_decode_steps_leaves_the_graph_as_it_is(decoding):
    decoding.run(4)
    for width in (PREFILL, 3):
        decoding.engine.use_profile(0)
        make_ready(decoding.engine, decoding.memory, BATCH, width)
        assert decoding.run(1) == ["0"]
        decoding.engine.use_profile(1)
        assert decoding.run(1) == ["graph 1"]


def test_shapes_that_take_turns_are_captured_each_after_its_own_eager_run(decoding):
    for expected in ([EAGER], [EAGER], [EAGER, "graph {}"], ["graph {}"]):
        for batch in (2, BATCH):
            set_shapes(decoding.engine, batch)
            assert decoding.run(1) == [one.format(1 if batch == 2 else 2) for one in expected]


@pytest.mark.parametrize("width", [PREFILL, 1])
def test_a_prefill_is_captured_if_it_is_frequent(decoding, fake, width):
    decoding.engine.use_profile(0)
    make_ready(decoding.engine, decoding.memory, BATCH, width)
    assert decoding.run(RUNS_OF_A_PREFILL + 3) == ["0"] * (RUNS_OF_A_PREFILL + 2) + ["graph 1"] * 2
    assert [context.profile for context in fake.contexts] == [0, 1, 0]


def test_prefills_take_no_graph_of_a_decode_step(decoding):
    decoding.run(3)
    decoding.engine.use_profile(0)
    make_ready(decoding.engine, decoding.memory, BATCH, PREFILL)
    for width in range(1, PREFILL + 1):
        for batch in range(1, BATCH + 1):
            set_shapes(decoding.engine, batch, width)
            decoding.run(RUNS_OF_A_PREFILL + 3)
    closed = [call for call in decoding.closed if call != 1]
    assert 0 < len(closed) == BATCH * PREFILL - MAX_PREFILL_GRAPHS == len(decoding.closed)
    decoding.engine.use_profile(1)
    assert decoding.run(1) == ["graph 1"]


def test_a_graph_that_is_dropped_releases_its_context(decoding):
    kept = []
    for number in range(MAX_GRAPHS + 1):
        kept.append(decoding.bind_other_logits())
        assert decoding.run(3)[-1] == f"graph {number + 1}"
    assert decoding.closed == [1]
    assert len(decoding.engine._plan._contexts) == 2 + MAX_GRAPHS


def test_an_engine_without_a_decode_profile_is_captured_in_its_only_one(fake, memory):
    fake.profiles = fake.profiles[:1]
    with TensorRTEngine.open(PLAN, memory=memory) as engine:
        assert Decoding(engine, fake, memory, profile=0).run(4) == ["0", "0", "0", "graph 1", "graph 1"]


def test_graphs_can_be_off(fake, memory):
    with TensorRTEngine.open(PLAN, memory=memory, cuda_graphs=False) as engine:
        assert Decoding(engine, fake, memory).run(4) == [EAGER] * 4


def test_a_failing_capture_keeps_what_tensorrt_says_and_is_tried_again(decoding, fake):
    fake.run = lambda context: decoding.stream.is_building and fake.logger.log(FakeLogger.Severity.ERROR, "cudaMalloc while capturing")
    decoding.run(2)
    with pytest.warns(RuntimeWarning, match="could not be captured .* cudaMalloc while capturing"):
        assert decoding.run(1) == [EAGER, EAGER], "captured, then run eagerly"
    assert decoding.engine.graph_refusals == ("the step failed. TensorRT says: cudaMalloc while capturing",)
    fake.run = lambda context: None
    assert decoding.run(RUNS_BEFORE_RETRY - 1) == [EAGER] * (RUNS_BEFORE_RETRY - 1)
    assert decoding.run(2) == [EAGER, "graph 2", "graph 2"]


@pytest.mark.parametrize("call", ["create_execution_context", "set_device_memory", "set_input_shape"])
def test_a_context_that_is_refused_costs_the_graph_alone(decoding, fake, call):
    decoding.run(1)
    fake.refuse.add(call)
    fake.errors[call] = "out of memory"
    with pytest.warns(RuntimeWarning, match="could not be captured .* out of memory"):
        assert decoding.run(2) == [EAGER] * 2
    assert sorted(decoding.engine._plan._contexts) == [0, 1]
    fake.refuse.clear()
    fake.errors.clear()
    assert decoding.run(RUNS_BEFORE_RETRY + 2) == [EAGER] * (RUNS_BEFORE_RETRY + 1) + ["graph 1"] * 2


def test_a_step_that_fails_eagerly_after_its_capture_failed_is_an_error(decoding, fake):
    decoding.run(2)
    fake.errors["execute_async_v3"] = "LOST"
    with pytest.warns(RuntimeWarning, match="LOST"), pytest.raises(EngineError, match="LOST"):
        decoding.run(1)


def test_graphs_are_closed_before_the_contexts_after_a_wait(decoding, fake):
    decoding.run(3)
    fake.calls.clear()
    assert decoding.stream.synced == 0
    decoding.engine.close()
    assert decoding.stream.synced == 1
    names = [call[0] for call in fake.calls]
    assert names[0] == "graph.close"
    assert names.count("graph.close") == 1


@pytest.mark.parametrize("fake", ["tensorrt_rtx"], indirect=True)
class TestRtx:
    def test_its_own_graphs_are_off(self, fake, decoding):
        strategies = [call[1].cuda_graph_strategy.name for call in fake.calls if call[0] == "create_execution_context"]
        assert strategies == ["DISABLED"] * 2

    def test_its_words_are_kept_while_it_refuses(self, fake, decoding):
        fake.capturable = False
        fake.errors["is_stream_capturable"] = "DeepJIT prepass(es) still pending, avoid capture"
        assert decoding.run(4) == [EAGER] * 4
        assert decoding.engine.graph_refusals == ("TensorRT says: DeepJIT prepass(es) still pending, avoid capture",)
        fake.capturable = True
        fake.errors.clear()
        assert decoding.run(1) == [EAGER, "graph 1"]

    def test_a_graph_waits_for_the_kernels_of_its_shape(self, fake, decoding):
        decoding.engine.use_profile(0)
        make_ready(decoding.engine, decoding.memory, BATCH, PREFILL)
        decoding.run(RUNS_OF_A_PREFILL + 1)
        configs = [call[1] for call in fake.calls if call[0] == "create_execution_context"]
        assert [one.dynamic_shapes_kernel_specialization_strategy.name for one in configs] == ["EAGER"]
        assert [one.cuda_graph_strategy.name for one in configs] == ["DISABLED"]


@pytest.mark.parametrize("fake", ["tensorrt_rtx"], indirect=True)
def test_a_session_tells_why_steps_run_without_a_graph(fake, folder, memory, monkeypatch):
    monkeypatch.setattr(memory, "create_stream", lambda: memory.streams.append(FakeStream(len(memory.streams))) or memory.streams[-1])
    with (
        TensorRTEngine.open(folder, memory=memory) as engine,
        KVCacheManager(folder.config.cache, memory=memory) as cache,
        InferenceSession(engine, cache) as session,
    ):
        assert session.statistics.graph_refusals == ()
        engine._graphs.refusals.append("TensorRT says: no")
        assert session.statistics.graph_refusals == ("TensorRT says: no",)
