"""``SegmentedEngine`` against a stand-in that records its calls; no GPU runs here."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.engine_files import make_engine_folder, segment_plans
from tests.helpers.fake_tensorrt import (
    BATCH,
    PREFILL,
    VOCAB,
    FakeGpuMemory,
    FakeSegment,
    FakeTensorRT,
    S,
    enqueue,
    install,
    make_ready,
    refuses,
    set_shapes,
)
from tests.helpers.models import write_model
from tests.trt.decoding import Decoding, steps_of
from tests.trt.graph_stream import GraphStream
from trt_kvcache.engine.decoder_tensors import shape_at
from trt_kvcache.engine_folder.decoder_segments import EMBEDDING
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BindingError, ClosedError, EngineError, PlaceError
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.ops import registry
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.registry import register_operation
from trt_kvcache.ops.segments import Segment
from trt_kvcache.trt.graph_engine import RUNS_OF_A_PREFILL
from trt_kvcache.trt.segmented_engine import SegmentedEngine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

LAYERS, D = 2, 64
ORDER = ["embedding", "0", "attention", "1", "attention", "2"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("segments")
    model = write_model(base / "model", num_hidden_layers=LAYERS, head_dim=D, tie_word_embeddings=request.param)
    return make_engine_folder(model, base / "engine", segmented=True)


@pytest.fixture
def fake(folder, monkeypatch, tmp_path):
    return fake_of(folder, monkeypatch, tmp_path)


def fake_of(folder, monkeypatch, tmp_path):
    """Return a stand-in for TensorRT that knows the segments of a folder."""
    config = folder.config
    made = FakeTensorRT(config.tensors, config.profiles)
    install(made, monkeypatch, tmp_path / "caches")
    steps = [step for step in config.segments.stages if isinstance(step, Segment)]
    for index, (plan, step) in enumerate(zip(segment_plans(LAYERS), steps, strict=True)):
        made.segments[plan] = FakeSegment(made, index, step.tensors)
        made.segments[plan].activations = (3000, 7000 if index == 1 else 5000, 4000)
    for op in (AttentionOp, EmbeddingOp):

        def enqueue(self, inputs, outputs, workspace, stream):
            ins, outs = ([(one.ptr, one.shape) for one in side] for side in (inputs, outputs))
            made.calls.append(("enqueue", self.name, ins, outs, (workspace.ptr, workspace.nbytes), stream.handle))

        monkeypatch.setattr(op, "enqueue", enqueue)
    return made


@pytest.fixture
def memory():
    return FakeGpuMemory()


@pytest.fixture
def opens(fake, folder, memory):
    return lambda **options: SegmentedEngine.open(folder, memory=memory, **options)


def test_opening_creates_contexts_of_all_segments_over_one_shared_memory(opens, fake):
    with opens():
        contexts = [context for segment in fake.segments.values() for context in segment.contexts]
        assert [context.profile for context in contexts] == [0, 1] * (LAYERS + 1)
        assert len({context.memory for context in contexts}) == 1
        assert contexts[0].memory[1] == 7000  # the largest of all


def test_tensors_and_profiles_are_those_of_the_folder(opens, folder, memory):
    with opens() as engine:
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
        assert tuple(engine.profiles) == folder.config.profiles
        assert (engine.names, engine.memory) == (folder.config.names, memory)


def test_a_tied_head_reads_the_embedding_table(opens, fake, folder):
    with opens():
        tables = [call for call in fake.calls if call[0] == "set_tensor_address" and call[3] == EMBEDDING]
    assert [call[1:3] for call in tables] == ([(LAYERS, 0), (LAYERS, 1)] if folder.config.model.tie_word_embeddings else [])
    assert len({call[4] for call in tables}) <= 1


@pytest.mark.parametrize(("profile", "width"), [(0, PREFILL), (1, 1)], ids=["prefill", "decode"])
def test_no_step_allocates(opens, fake, memory, profile, width):
    with opens() as engine:
        engine.use_profile(profile)
        make_ready(engine, memory, width=width)
        before = memory.live_nbytes
        for _ in range(3):
            engine.enqueue(GraphStream(0x77, fake.calls))
        assert memory.live_nbytes == before


def test_close_releases_everything(opens, memory):
    with opens() as engine:
        make_ready(engine, memory)
    assert memory.live_nbytes == 0  # what was bound is let go of too


either_profile = pytest.mark.parametrize(("profile", "batch", "width"), [(0, 2, 5), (1, 3, 1)], ids=["prefill", "decode"])


@pytest.fixture
def step(opens, fake, memory):
    """Return a function that runs one step without graphs, and gives what is bound and what was called."""

    def run(profile, batch, width):
        with opens(cuda_graphs=False) as engine:
            engine.use_profile(profile)
            bound = make_ready(engine, memory, batch, width)
            fake.calls.clear()
            enqueue(engine)
            return bound, fake.calls[:]

    return run


@either_profile
def test_stages_are_enqueued_in_order_on_one_stream(step, profile, batch, width):
    _, calls = step(profile, batch, width)
    assert steps_of(calls) == ORDER
    assert {call[-1] for call in calls if call[0] in ("enqueue", "execute_async_v3")} == {0x77}
    assert {call[2] for call in calls if call[0] == "execute_async_v3"} == {profile}


@either_profile
def test_the_embedding_reads_the_bound_token_ids(step, profile, batch, width):
    bound, calls = step(profile, batch, width)
    _, _, (table, ids), (hidden,), *_ = next(call for call in calls if call[0] == "enqueue")
    assert ids == (bound["input_ids"].ptr, (batch, width))
    assert (table[1], hidden[1]) == ((VOCAB, 40), (batch, width, 40))


@either_profile
def test_segments_get_the_shapes_of_what_they_read(step, fake, profile, batch, width):
    step(profile, batch, width)
    (second,) = [segment.contexts[profile].shapes for segment in fake.segments.values() if segment.label == 1]
    assert second == {"hidden_0": (batch, width, 40), "attended_0": (batch, width, 4, D)}


@either_profile
def test_attention_works_on_the_bound_cache_in_place(step, profile, batch, width):
    bound, calls = step(profile, batch, width)
    _, *attention = (call for call in calls if call[0] == "enqueue")
    for layer, (_, _, inputs, outputs, workspace, _) in enumerate(attention):
        q, k, v, cache, lengths, cos_sin = inputs
        assert [one[1] for one in (q, k, v)] == [(batch, width, heads, D) for heads in (4, 2, 2)]
        assert cache == outputs[1] == (bound[f"past_key_values_{layer}"].ptr, (batch, 2, 2, S, D))
        assert lengths == (bound["kvcache_start_index"].ptr, (batch,))
        assert (cos_sin[1], outputs[0][1]) == ((S, 2, D // 2), (batch, width, 4, D))
        assert workspace[1] > 0
    assert len({call[4] for call in attention}) == 1, "one workspace for all"


def test_tensors_that_are_live_together_do_not_overlap(opens, fake, folder, memory):
    with opens(cuda_graphs=False) as engine:
        make_ready(engine, memory, BATCH, PREFILL)
        addresses = {call[3]: call[4] for call in fake.calls if call[0] == "set_tensor_address" and call[2] == 0}
        for step in folder.config.segments.stages:
            if isinstance(step, Segment):
                spans = sorted(
                    (addresses[one.name], addresses[one.name] + int(np.prod(shape_at(one.shape, BATCH, PREFILL))) * 2)
                    for one in step.tensors
                    if one.name not in engine.tensors and one.name != EMBEDDING
                )
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(address % 256 == 0 for address in addresses.values())
        assert addresses["hidden_0"] != addresses["hidden_1"]


@pytest.fixture
def decoding(opens, fake, memory):
    with opens() as engine:
        yield Decoding(engine, fake, memory)


def strategies(fake):
    """Return the strategies of all contexts: of graphs and of kernels, by segment and profile."""
    configs = [call[2] for call in fake.calls if call[0] == "create_execution_context"]
    return [(one.cuda_graph_strategy.name, one.dynamic_shapes_kernel_specialization_strategy.name) for one in configs]


def test_tensorrt_makes_no_graph_of_its_own_and_compiles_before_the_capture(opens, fake):
    with opens():
        assert strategies(fake) == [("DISABLED", "LAZY"), ("DISABLED", "EAGER")] * (LAYERS + 1)


def test_nothing_waits_for_kernels_where_nothing_is_captured(opens, fake):
    with opens(cuda_graphs=False):
        assert strategies(fake) == [("DISABLED", "LAZY")] * 2 * (LAYERS + 1)


def test_all_segments_share_one_runtime_cache(opens, fake, tmp_path):
    with opens():
        pass
    names = [call[0] for call in fake.calls]
    assert names.count("create_runtime_cache") == 1
    assert names.count("set_runtime_cache") == 2 * (LAYERS + 1)  # prefill and decode
    assert len(list((tmp_path / "caches" / "trt_kvcache").glob("*.rtxcache"))) == 1


def test_decode_is_captured_at_its_third_step_and_then_replayed(decoding):
    assert decoding.run(5) == [*ORDER, *ORDER, *ORDER, "graph 1", "graph 1", "graph 1"]


def test_a_graph_has_contexts_of_its_own_in_all_segments(decoding, fake):
    decoding.run(3)
    for segment, captured_from in zip(fake.segments.values(), fake.enqueued, strict=True):
        working, own = segment.contexts[1:]
        assert own is captured_from
        assert (own.profile, own.addresses, own.shapes, own.memory) == (working.profile, working.addresses, working.shapes, working.memory)


def test_a_segment_that_refuses_a_context_leaves_none_behind(decoding, fake):
    decoding.run(1)
    last = list(fake.segments.values())[-1]
    fake.errors["create_execution_context"] = "out of memory"
    with pytest.warns(RuntimeWarning, match="could not be captured .* out of memory"):
        assert decoding.run(1) == ORDER
    assert len(last.contexts) == 2
    assert {len(plan._contexts) for plan in decoding.engine._plans.plans} == {2}


def test_other_addresses_get_a_graph_of_their_own(decoding):
    decoding.run(4)
    decoding.bind_other_logits()
    assert decoding.run(4) == [*ORDER, *ORDER, *ORDER, "graph 2", "graph 2"]


def test_a_graph_is_found_again_by_its_addresses(decoding):
    decoding.run(3)
    decoding.bind_other_logits()
    decoding.run(3)
    decoding.engine.bind("logits", decoding.bound["logits"])
    assert decoding.run(2) == ["graph 1"] * 2


def test_a_prefill_is_captured_if_it_is_frequent(decoding):
    decoding.engine.use_profile(0)
    make_ready(decoding.engine, decoding.memory, BATCH, PREFILL)
    assert decoding.run(RUNS_OF_A_PREFILL + 3) == [*ORDER * (RUNS_OF_A_PREFILL + 2), "graph 1", "graph 1"]


@pytest.fixture
def verifying(folder, monkeypatch, tmp_path, memory):
    """An engine with the logits of 7 tokens per slot, in its profile for drafts."""
    made = make_engine_folder(folder.config.checkpoint.path, tmp_path / "engine", segmented=True, max_logits_per_slot=7)
    fake = fake_of(made, monkeypatch, tmp_path)
    with SegmentedEngine.open(made, memory=memory) as engine:
        yield Decoding(engine, fake, memory, profile=2, width=5, logits=5)


def test_the_verification_of_drafts_is_captured_for_each_width(verifying):
    assert verifying.run(4) == [*ORDER, *ORDER, *ORDER, "graph 1", "graph 1"]
    set_shapes(verifying.engine, BATCH, 3, 3)
    assert verifying.run(4) == [*ORDER, *ORDER, *ORDER, "graph 2", "graph 2"]
    set_shapes(verifying.engine, BATCH, 5, 5)
    assert verifying.run(1) == ["graph 1"]


def test_another_number_of_logits_is_another_graph(verifying):
    verifying.run(2)
    set_shapes(verifying.engine, BATCH, 5, 4)
    assert verifying.run(1) == ORDER


def test_a_short_prefill_in_the_profile_for_drafts_is_captured_as_a_prefill(verifying):
    set_shapes(verifying.engine, BATCH, 5, 1)
    assert verifying.run(RUNS_OF_A_PREFILL + 2) == [*ORDER * (RUNS_OF_A_PREFILL + 2), "graph 1"]


def test_nothing_is_captured_where_tensorrt_says_no(decoding, fake):
    fake.capturable = False
    assert decoding.run(3) == ORDER * 3
    fake.capturable = True
    assert decoding.run(1) == [*ORDER, "graph 1"]


def test_a_capture_follows_an_eager_run_of_its_shapes(decoding):
    decoding.run(1)
    for batch in (2, 3):
        set_shapes(decoding.engine, batch)
        assert decoding.run(1) == ORDER
    assert decoding.run(1) == [*ORDER, "graph 1"], "the second step of these shapes ran in the context that this one is captured from"


def test_graphs_are_closed_before_the_runtime_cache_is_saved(decoding, fake):
    decoding.run(3)
    fake.calls.clear()
    decoding.engine.close()
    names = [call[0] for call in fake.calls]
    assert names.count("graph.close") == 1
    assert names.index("graph.close") < names.index("cache.serialize")


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["eager", "to be captured", "replayed"])
def test_a_step_over_closed_memory_is_refused(decoding, fake, steps):
    decoding.run(steps)
    decoding.bound["past_key_values_1"].allocation.close()
    fake.calls.clear()
    refuses(ClosedError, "`past_key_values_1`: the memory that is bound is closed", decoding.engine.enqueue, decoding.stream)
    assert fake.calls == []


@pytest.fixture
def refusing(fake, monkeypatch):
    """Return a function that calls something while the last segment refuses a method of its context."""

    def call(method, change, *given):
        last = fake.segments[segment_plans(LAYERS)[LAYERS]].contexts[0]
        real = getattr(type(last), method)
        with monkeypatch.context() as patch:
            patch.setattr(type(last), method, lambda self, *given: self is not last and real(self, *given))
            refuses(EngineError, None, change, *given)

    return call


def test_a_shape_that_one_segment_refuses_is_set_in_none(opens, memory, refusing):
    with opens(cuda_graphs=False) as engine:
        make_ready(engine, memory, 3, 5)
        refusing("set_input_shape", engine.set_input_shape, "input_ids", (3, 7))
        refuses(BindingError, "is not known", enqueue, engine)
        set_shapes(engine, 3, 7)
        enqueue(engine)


def test_an_address_that_one_segment_refuses_is_not_bound(opens, memory, refusing):
    with opens(cuda_graphs=False) as engine:
        bound = make_ready(engine, memory, 3, 5)
        refusing("set_tensor_address", engine.bind, "logits", bound["logits"])
        refuses(BindingError, "`logits`: it is not bound", enqueue, engine)


class Halved(EmbeddingOp):
    name = "halved"

    def __init__(self, *, factor):
        self.attributes = {"factor": factor}


@pytest.fixture
def halved(monkeypatch):
    """Register the operation ``halved`` for one test."""
    monkeypatch.setattr(registry, "OPERATIONS", dict(registry.OPERATIONS))
    register_operation("halved", Halved)


@pytest.fixture
def with_first_stage(folder, tmp_path):
    """Return a function that gives a copy of the folder whose first stage has other values."""

    def change(**values):
        config = shutil.copytree(folder.path, tmp_path / "changed") / "config.json"
        data = json.loads(config.read_text())
        data["segments"]["steps"][0].update(values)
        config.write_text(json.dumps(data))
        return config.parent

    return change


HALVED = {"operation": "halved", "attributes": {"factor": 0.5}}


@pytest.mark.usefixtures("halved")
def test_a_registered_operation_runs_in_place_of_ours(fake, memory, with_first_stage):
    with SegmentedEngine.open(with_first_stage(**HALVED), memory=memory) as engine:
        make_ready(engine, memory)
        fake.calls.clear()
        enqueue(engine)
        assert steps_of(fake.calls) == ["halved", *ORDER[1:]]


def test_an_operation_that_is_not_registered_is_refused(with_first_stage):
    refuses(EngineError, r"segments.steps\[0\]: expected", EngineFolder.open, with_first_stage(**HALVED))


@pytest.mark.usefixtures("halved")
def test_a_registered_operation_with_other_tensors_is_refused(with_first_stage):
    refuses(EngineError, r"segments.steps\[0\]: expected", EngineFolder.open, with_first_stage(**HALVED, inputs=["input_ids"]))


def test_shapes_of_different_batches_are_refused(decoding):
    decoding.engine.set_input_shape("kvcache_start_index", (2,))
    refuses(BindingError, r"`kvcache_start_index`: expected shape \(3,\) with", enqueue, decoding.engine)


def test_a_shape_outside_the_profile_is_refused(decoding):
    refuses(BindingError, r"expected a shape from \(1, 1\) to \(3, 1\)", decoding.engine.set_input_shape, "input_ids", (3, 2))


def test_intermediate_tensors_cannot_be_bound(decoding):
    refuses(BindingError, "`hidden_0`: the engine has no such tensor", decoding.engine.bind, "hidden_0", decoding.bound["logits"])


def test_a_step_of_a_closed_engine_is_refused(decoding):
    decoding.engine.close()
    refuses(ClosedError, "this SegmentedEngine is closed", enqueue, decoding.engine)


class TestOpeningIsRefused:
    @pytest.fixture(autouse=True)
    def nothing_is_left(self, memory):
        yield
        assert memory.live_nbytes == 0

    def test_host_memory(self, folder):
        refuses(PlaceError, "SegmentedEngine: expected the memory of a GPU", SegmentedEngine.open, folder, memory=HostMemory())

    def test_a_gpu_that_is_too_old_for_the_kernels(self, opens, memory, monkeypatch):
        monkeypatch.setattr(memory, "arch", "sm_75", raising=False)
        refuses(EngineError, r"capability 8\.0 or more, which our kernels need, got sm_75", opens)

    def test_an_engine_in_segments_by_tensorrt_engine(self, fake, folder, memory):
        refuses(EngineError, r"got one in segments\. Open it with SegmentedEngine", TensorRTEngine.open, folder, memory=memory)

    def test_an_engine_in_one_piece(self, fake, memory, tmp_path):
        whole = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "whole")
        refuses(EngineError, "expected an engine in segments, got one in one piece", SegmentedEngine.open, whole, memory=memory)

    def test_another_flavour(self, opens):
        refuses(EngineError, "expected flavour tensorrt_rtx", opens, flavour="tensorrt")

    def test_a_segment_that_tensorrt_refuses(self, opens, fake):
        fake.segments.pop(segment_plans(LAYERS)[1])
        refuses(EngineError, "refuses this engine built with tensorrt_rtx", opens)

    def test_a_segment_with_other_profiles(self, opens, fake):
        segment = fake.segments[segment_plans(LAYERS)[1]]
        segment.profiles = [replace(segment.profiles[0], max_width=12), segment.profiles[1]]
        refuses(EngineError, "the engine is not what its config.json says: expected shapes", opens)

    def test_a_segment_with_other_tensors(self, opens, fake):
        plans = segment_plans(LAYERS)
        fake.segments[plans[1]] = fake.segments[plans[0]]
        refuses(EngineError, "the engine's tensors are not the tensors of its config", opens)
