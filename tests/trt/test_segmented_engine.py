"""``SegmentedEngine`` against a stand-in that records its calls; no GPU runs here."""

import itertools
import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.engine_files import make_engine_folder, segment_plans
from tests.helpers.fake_tensorrt import FakeGpuMemory, FakeSegment, FakeStream, FakeTensorRT
from tests.helpers.small_model import write_model
from tests.helpers.tensorrt_engines import BATCH, PREFILL, VOCAB, S, enqueue, install, make_ready, refuses, set_shapes, tensor
from trt_kvcache.engine.decoder_tensors import shape_at
from trt_kvcache.engine_folder.decoder_segments import EMBEDDING
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BindingError, ClosedError, ConfigError, CudaError, EngineError, PlaceError
from trt_kvcache.memory.cuda_driver import cuda_core_error
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.ops import registry
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.registry import register_operation
from trt_kvcache.ops.segments import Segment
from trt_kvcache.trt.cuda_graphs import MAX_GRAPHS, CudaGraphCache
from trt_kvcache.trt.segmented_engine import SegmentedEngine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

LAYERS, D = 2, 64
ORDER = ["embedding", "0", "attention", "1", "attention", "2"]


class GraphStream(FakeStream):
    """A stream that captures: a graph notes that it was launched. It is its own graph builder."""

    def __init__(self, handle, calls):
        super().__init__(handle)
        self.calls, self.graphs = calls, 0

    def create_graph_builder(self):
        self.graphs += 1
        return self

    def begin_building(self, mode):
        assert mode == "thread_local"

    def end_building(self):
        return self

    def complete(self):
        number, note = self.graphs, self.calls.append
        return SimpleNamespace(launch=lambda stream: note(("graph", number, stream.handle)), close=lambda: note(("graph.close", number)))

    def close(self):
        self.calls.append(("captured",))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("segments")
    model = write_model(base / "model", num_hidden_layers=LAYERS, head_dim=D, tie_word_embeddings=request.param)
    return make_engine_folder(model, base / "engine", segmented=True)


@pytest.fixture
def fake(folder, monkeypatch, tmp_path):
    config = folder.config
    made = FakeTensorRT(config.tensors, config.profiles, lambda spec, batch, width: shape_at(spec.shape, batch, width))
    install(made, monkeypatch, tmp_path / "caches")
    steps = [step for step in config.segments.stages if isinstance(step, Segment)]
    for index, (plan, step) in enumerate(zip(segment_plans(LAYERS), steps, strict=True)):
        made.segments[plan] = FakeSegment(made, index, step.tensors)
        made.segments[plan].activations = (3000, 7000 if index == 1 else 5000)
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


def steps_of(calls):
    wanted = {"enqueue": "{}", "execute_async_v3": "{}", "graph": "graph {}"}
    return [wanted[what].format(*rest) for what, *rest in calls if what in wanted]


def test_opening_makes_contexts_over_one_memory(opens, fake, folder, memory):
    with opens() as engine:
        contexts = [context for segment in fake.segments.values() for context in segment.contexts]
        assert [context.profile for context in contexts] == [0, 1] * (LAYERS + 1)
        assert len({context.memory for context in contexts}) == 1
        assert contexts[0].memory[1] == 7000
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
        assert (tuple(engine.profiles), engine.names, engine.memory) == (folder.config.profiles, folder.config.names, memory)
        tables = [call for call in fake.calls if call[0] == "set_tensor_address" and call[3] == EMBEDDING]
        assert [call[1:3] for call in tables] == ([(LAYERS, 0), (LAYERS, 1)] if folder.config.model.tie_word_embeddings else [])
        assert len({call[4] for call in tables}) <= 1
        live = memory.live_nbytes
        for profile, width in ((0, PREFILL), (1, 1)):
            engine.use_profile(profile)
            make_ready(engine, memory, width=width)
            before = memory.live_nbytes
            for _ in range(3):
                engine.enqueue(GraphStream(0x77, fake.calls))
            assert memory.live_nbytes == before > live  # no step allocates
    assert memory.live_nbytes == 0  # what was bound is let go of too


@pytest.mark.parametrize(("profile", "batch", "width"), [(0, 2, 5), (1, 3, 1)])
def test_a_step_is_enqueued_in_order(opens, fake, folder, memory, profile, batch, width):
    with opens(cuda_graphs=False) as engine:
        engine.use_profile(profile)
        bound = make_ready(engine, memory, batch, width)
        fake.calls.clear()
        for _ in range(3):
            enqueue(engine)
        assert steps_of(fake.calls) == ORDER * 3
        assert {call[-1] for call in fake.calls} == {0x77}
        assert {call[2] for call in fake.calls if call[0] == "execute_async_v3"} == {profile}
        (_, _, (table, ids), (hidden,), *_), *attention = (call for call in fake.calls[: len(ORDER)] if call[0] == "enqueue")
        assert ids == (bound["input_ids"].ptr, (batch, width))
        assert (table[1], hidden[1]) == ((VOCAB, 40), (batch, width, 40))
        (second,) = [segment.contexts[profile].shapes for segment in fake.segments.values() if segment.label == 1]
        assert second == {"hidden_0": (batch, width, 40), "attended_0": (batch, width, 4, D)}
        for layer, (_, _, inputs, outputs, workspace, _) in enumerate(attention):
            q, k, v, cache, lengths, cos_sin = inputs
            assert [one[1] for one in (q, k, v)] == [(batch, width, heads, D) for heads in (4, 2, 2)]
            assert cache == outputs[1] == (bound[f"past_key_values_{layer}"].ptr, (batch, 2, 2, S, D))
            assert lengths == (bound["kvcache_start_index"].ptr, (batch,))
            assert (cos_sin[1], outputs[0][1]) == ((S, 2, D // 2), (batch, width, 4, D))
            assert workspace == attention[0][4]  # one for all
            assert workspace[1] > 0


def test_no_two_live_tensors_share_bytes(opens, fake, folder, memory):
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


def test_decode_is_captured_once(opens, fake, memory):
    stream = GraphStream(0x77, fake.calls)
    with opens() as engine:
        configs = [call[2] for call in fake.calls if call[0] == "create_execution_context"]
        assert len(configs) == 2 * (LAYERS + 1)
        for config in configs:  # TensorRT makes no graph of its own, and compiles before the capture
            assert (config.cuda_graph_strategy.name, config.dynamic_shapes_kernel_specialization_strategy.name) == ("DISABLED", "EAGER")
        engine.use_profile(1)
        bound = make_ready(engine, memory)
        logits = tensor(memory, (BATCH, VOCAB), "float32")

        def runs(count):
            fake.calls.clear()
            for _ in range(count):
                engine.enqueue(stream)
            return steps_of(fake.calls)

        assert runs(4) == [*ORDER, *ORDER, "graph 1", "graph 1", "graph 1"]  # plainly; captured and launched; replayed
        engine.bind("logits", logits)  # the other buffer
        assert runs(3) == [*ORDER, *ORDER, "graph 2", "graph 2"]
        engine.bind("logits", bound["logits"])  # back: its graph is known
        assert runs(2) == ["graph 1"] * 2
        engine.use_profile(0)
        make_ready(engine, memory, BATCH, PREFILL)
        assert runs(2) == ORDER * 2  # prefill is not captured
        engine.use_profile(1)
        fake.capturable = False
        set_shapes(engine, 2)
        assert runs(3) == ORDER * 3
        fake.capturable = True
        set_shapes(engine, 3)
        assert runs(1) == ["graph 1"]
        engine.bind("logits", tensor(memory, (BATCH, VOCAB), "float32"))
        runs(1)
        for batch in (2, 3):  # a capture follows a plain run of its shapes
            set_shapes(engine, batch)
            assert runs(1) == ORDER
        assert runs(1) == [*ORDER, "graph 3"]
        fake.calls.clear()
    names = [call[0] for call in fake.calls]
    assert names.count("graph.close") == 3
    assert names.index("graph.close") < names.index("cache.serialize")


def test_graphs_are_bounded(memory):
    calls = []
    stream, graphs = GraphStream(1, calls), CudaGraphCache(memory)

    def run(key, work=lambda stream: calls.append("plain"), stream=stream):
        return graphs.run(key, stream, work, lambda stream: True)

    for key in range(MAX_GRAPHS + 1):
        assert run(key)
        assert stream.synced == 0
        assert not run(key)
    assert (stream.synced, [call for call in calls if call[0] == "graph.close"]) == (1, [("graph.close", 1)])  # after a wait
    for key in range(2 * MAX_GRAPHS):  # those that never come back push none out
        run(("once", key))
    assert not run(5)
    memory.is_capturing = lambda stream: True
    assert not run(5)
    assert not run(5, stream=FakeStream(2))  # no stream of ours
    assert calls[-2:] == ["plain"] * 2


def test_a_failing_capture_is_warned_of_once(memory):
    calls = []
    stream, graphs = GraphStream(1, calls), CudaGraphCache(memory)

    def run(key):
        return graphs.run(key, stream, lambda stream: None, lambda stream: True)

    def raises(kind):
        def refuse(*args):
            raise kind("LOST")

        return refuse

    for kind in (RuntimeError, cuda_core_error()):
        stream.end_building = raises(kind)
        assert run(kind)
        with nullcontext() if calls else pytest.warns(RuntimeWarning, match="runs without one: LOST"):
            assert run(kind)
        assert run(kind)
    assert calls == [("captured",)] * 2
    del stream.end_building
    run("x")
    stream.complete = lambda: SimpleNamespace(launch=raises(cuda_core_error()))
    refuses(CudaError, "the CUDA graph of a step cannot be launched: LOST", run, "x")


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["eager", "to be captured", "replayed"])
def test_what_is_bound_must_be_open(opens, fake, memory, steps):
    stream = GraphStream(0x77, fake.calls)
    with opens() as engine:
        engine.use_profile(1)
        bound = make_ready(engine, memory)
        for _ in range(steps):
            engine.enqueue(stream)
        bound["past_key_values_1"].allocation.close()
        fake.calls.clear()
        refuses(ClosedError, "`past_key_values_1`: the memory that is bound is closed", engine.enqueue, stream)
        assert fake.calls == []


def test_what_is_refused_leaves_no_mixture(opens, fake, memory, monkeypatch):
    with opens(cuda_graphs=False) as engine:
        bound = make_ready(engine, memory, 3, 5)
        last = fake.segments[segment_plans(LAYERS)[LAYERS]].contexts[0]
        kind = type(last)

        def breaks(method, message, change, *given):
            real = getattr(kind, method)
            with monkeypatch.context() as patch:
                patch.setattr(kind, method, lambda self, *given: self is not last and real(self, *given))
                refuses(EngineError, None, change, *given)
            refuses(BindingError, message, enqueue, engine)

        breaks("set_input_shape", "is not known", engine.set_input_shape, "input_ids", (3, 7))
        set_shapes(engine, 3, 7)
        enqueue(engine)
        breaks("set_tensor_address", "`logits`: it is not bound", engine.bind, "logits", bound["logits"])


class Halved(EmbeddingOp):
    name = "halved"

    def __init__(self, *, factor):
        self.attributes = {"factor": factor}


def test_an_operation_of_ones_own(fake, folder, memory, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "OPERATIONS", dict(registry.OPERATIONS))
    shutil.copytree(folder.path, tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    data = json.loads(config.read_text())
    data["segments"]["steps"][0].update(operation="halved", attributes={"factor": 0.5})
    config.write_text(json.dumps(data))
    refuses(EngineError, r"segments.steps\[0\]: expected", EngineFolder.open, config.parent)
    register_operation("halved", Halved)
    with pytest.raises(ConfigError, match="kind: expected another name than attention, embedding, halved, got 'halved'"):
        register_operation("halved", Halved)
    with SegmentedEngine.open(config.parent, memory=memory) as engine:
        make_ready(engine, memory)
        fake.calls.clear()
        enqueue(engine)
        assert steps_of(fake.calls) == ["halved", *ORDER[1:]]
    data["segments"]["steps"][0]["inputs"] = ["input_ids"]
    config.write_text(json.dumps(data))
    refuses(EngineError, r"segments.steps\[0\]: expected", EngineFolder.open, config.parent)


def test_shapes_agree(opens, fake, memory):
    with opens() as engine:
        engine.use_profile(1)
        bound = make_ready(engine, memory)
        engine.set_input_shape("kvcache_start_index", (2,))
        refuses(BindingError, r"`kvcache_start_index`: expected shape \(3,\) beside", enqueue, engine)
        refuses(BindingError, r"expected a shape from \(1, 1\) to \(3, 1\)", engine.set_input_shape, "input_ids", (3, 2))
        refuses(BindingError, "`hidden_0`: the engine has no such tensor", engine.bind, "hidden_0", bound["logits"])
        fake.calls.clear()
    refuses(ClosedError, "this SegmentedEngine is closed", enqueue, engine)


def test_what_cannot_be_opened(opens, fake, folder, memory, monkeypatch, tmp_path):
    refuses(PlaceError, "SegmentedEngine: expected the memory of a GPU", SegmentedEngine.open, folder, memory=HostMemory())
    with monkeypatch.context() as older:
        older.setattr(memory, "arch", "sm_75", raising=False)
        refuses(EngineError, r"capability 8\.0 or more, which our kernels need, got sm_75", opens)
    refuses(EngineError, r"got one in segments\. Open it with SegmentedEngine", TensorRTEngine.open, folder, memory=memory)
    whole = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "whole")
    refuses(EngineError, "expected an engine in segments, got one in one piece", SegmentedEngine.open, whole, memory=memory)
    refuses(EngineError, "expected flavour tensorrt_rtx", opens, flavour="tensorrt")
    fake.segments.pop(segment_plans(LAYERS)[1])
    refuses(EngineError, "refuses this engine built with tensorrt_rtx", opens)
    fake.segments[segment_plans(LAYERS)[1]] = fake.segments[segment_plans(LAYERS)[0]]
    refuses(EngineError, "the engine's tensors are not those of its config", opens)
    assert memory.live_nbytes == 0


def test_folder(folder, tmp_path):
    assert EngineFolder.open(folder.path).config == folder.config
    assert set(folder.read_constants()) == {EMBEDDING, "rope.cos_sin"}
    with folder.read_plan() as plan:
        assert [plan[start:end] for start, end in folder.config.segments.spans] == segment_plans(LAYERS)
    copy = tmp_path / "copy"
    copy.mkdir()

    def breaks(message, call=lambda: EngineFolder.open(copy), **files):
        for path in folder.path.iterdir():
            (copy / path.name).write_bytes(files.get(path.stem, path.read_bytes()))
        refuses(EngineError, message, call)

    text = (folder.path / "config.json").read_text()
    steps = json.loads(text)["segments"]["steps"]

    def changed(place, values):
        data = inner = json.loads(text)
        for key in place.split():
            inner = inner[int(key) if key.isdigit() else key]
        inner.update(values)
        return json.dumps(data).encode()

    constants = (folder.path / "constants.safetensors").read_bytes()
    breaks("constants.safetensors: expected [0-9]+ bytes by config.json, got 5", constants=b"12345")
    flipped = constants[:-1] + bytes([constants[-1] ^ 1])
    breaks("constants.safetensors: it was changed since", lambda: EngineFolder.open(copy).read_constants(), constants=flipped)
    for place, values, message in (
        ("", {"segments": None}, "segments: expected some of tensorrt_rtx and plugin attention, got none"),
        ("segments", {"steps": steps[:-1]}, "segments.steps: expected 6 by model and kv_cache, got 5"),
        ("segments steps 2", {"inputs": []}, r"segments.steps\[2\]: expected CustomOpNode"),
        ("segments steps 2 attributes", {"num_heads": 8}, r"segments.steps\[2\]: expected"),
        ("segments steps 1", {"plan_nbytes": 0}, "segment 0: plan_nbytes: expected at least 1, got 0"),
        ("segments steps 5", {"plan_nbytes": 7}, "plan.nbytes: expected 8199 by segments, got "),
        ("segments constants", {"nbytes": "1"}, "segments.constants.nbytes: expected an integer"),
        ("attention 1", {"variant": "mask"}, r"attention\[1\].variant: expected plugin as the first one, got mask"),
        ("kv_cache", {"layout": "separate"}, "kv_cache.layout: expected combined by the model, got separate"),
    ):
        breaks(message, config=changed(place, values))
