"""``SegmentedEngine`` against a stand-in that records its calls; no GPU runs here."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from engine_files import make_engine_folder, segment_plans
from fake_tensorrt import FakeGpuMemory, FakeSegment, FakeStream, FakeTensorRT
from small_model import write_model

from trt_kvcache import plan_execution, tensorrt_engine
from trt_kvcache.attention_op import AttentionOp
from trt_kvcache.embedding_op import EmbeddingOp
from trt_kvcache.engine import TensorMode
from trt_kvcache.engine_folder import EngineFolder
from trt_kvcache.errors import BindingError, ClosedError, EngineError, PlaceError
from trt_kvcache.memory import HostMemory
from trt_kvcache.segmented_engine import SegmentedEngine
from trt_kvcache.segments import EMBEDDING, SegmentStep, shape_at
from trt_kvcache.step_graphs import MOST_GRAPHS, StepGraphs
from trt_kvcache.tensorrt_engine import TensorRTEngine

LAYERS, BATCH, PREFILL, S, D, VOCAB = 2, 3, 11, 38, 64, 37
ORDER = ["embedding", 0, "attention", 1, "attention", 2]


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
        return self

    def end_building(self):
        return self

    def complete(self):
        return Graph(self.graphs, self.calls)

    def close(self):
        self.calls.append(("captured",))


class Graph:
    def __init__(self, number, calls):
        self.number, self.calls = number, calls

    def launch(self, stream):
        self.calls.append(("graph", self.number, stream.handle))

    def close(self):
        self.calls.append(("graph.close", self.number))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("segments")
    model = write_model(base / "model", num_hidden_layers=LAYERS, head_dim=D, tie_word_embeddings=request.param)
    return make_engine_folder(model, base / "engine", segmented=True)


@pytest.fixture
def fake(folder, monkeypatch, tmp_path):
    config = folder.config
    made = FakeTensorRT(config.tensors, config.profiles, lambda spec, batch, width: shape_at(spec.shape, batch, width))
    loaded = made.tensorrt("tensorrt_rtx")
    steps = [step for step in config.segments.steps if isinstance(step, SegmentStep)]
    for index, (plan, step) in enumerate(zip(segment_plans(LAYERS), steps, strict=True)):
        made.segments[plan] = FakeSegment(made, index, step.tensors)
        made.segments[plan].activations = (3000, 7000 if index == 1 else 5000)
    monkeypatch.setattr(tensorrt_engine, "load", lambda flavour: loaded)
    monkeypatch.setattr(plan_execution, "gpu_identity", lambda device: ("GPU", "uuid", "8.9", "13000"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
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


def make_ready(engine, memory, batch=BATCH, width=1):
    """Bind what a step needs in the profile in use, and set the shapes; return what is bound."""
    bound = {}
    for spec in engine.tensors.values():
        shape = shape_at(spec.shape, BATCH, PREFILL)
        new = None if spec.alias else memory.to_device(np.zeros(shape, spec.dtype), stream=memory.streams[0])
        bound[spec.name] = new or bound[spec.alias]
        engine.bind(spec.name, bound[spec.name])
        if spec.mode is TensorMode.INPUT:
            engine.set_input_shape(spec.name, shape_at(spec.shape, batch, width))
    return bound


def steps_of(calls):
    """What ran: names of operations, numbers of segments, graphs."""
    wanted = {"enqueue": lambda call: call[1], "execute_async_v3": lambda call: call[1], "graph": lambda call: f"graph {call[1]}"}
    return [wanted[call[0]](call) for call in calls if call[0] in wanted]


def test_opening_makes_contexts_over_one_activation_memory(opens, fake, folder, memory):
    with opens() as engine:
        contexts = [context for segment in fake.segments.values() for context in segment.contexts]
        assert [context.profile for context in contexts] == [0, 1] * (LAYERS + 1)
        assert len({context.memory for context in contexts}) == 1
        assert contexts[0].memory[1] == 7000
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
        assert [name for name in engine.tensors if "key_values" in name] == [
            f"{p}_key_values_{i}" for p in ("past", "present") for i in (0, 1)
        ]
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
def test_a_step_is_enqueued_in_order_on_one_stream(opens, fake, folder, memory, profile, batch, width):
    with opens(cuda_graphs=False) as engine:
        engine.use_profile(profile)
        bound = make_ready(engine, memory, batch, width)
        fake.calls.clear()
        for _ in range(3):
            engine.enqueue(FakeStream(0x77))
        assert steps_of(fake.calls) == ORDER * 3
        assert {call[-1] for call in fake.calls} == {0x77}
        assert {call[2] for call in fake.calls if call[0] == "execute_async_v3"} == {profile}
        (_, _, (table, ids), (hidden,), *_), *attention = (call for call in fake.calls[: len(ORDER)] if call[0] == "enqueue")
        assert ids == (bound["input_ids"].ptr, (batch, width))
        assert (table[1], hidden[1]) == ((VOCAB, 40), (batch, width, 40))
        written = [context.shapes for segment in fake.segments.values() for context in [segment.contexts[profile]]]
        assert written[1] == {"hidden_0": (batch, width, 40), "attended_0": (batch, width, 4, D)}
        for layer, (_, _, inputs, outputs, workspace, _) in enumerate(attention):
            q, k, v, cache, lengths, cos_sin = inputs
            assert [one[1] for one in (q, k, v)] == [(batch, width, heads, D) for heads in (4, 2, 2)]
            assert cache == outputs[1] == (bound[f"past_key_values_{layer}"].ptr, (batch, 2, 2, S, D))
            assert lengths == (bound["kvcache_start_index"].ptr, (batch,))
            assert (cos_sin[1], outputs[0][1]) == ((S, 2, D // 2), (batch, width, 4, D))
            assert workspace == attention[0][4]  # one for all
            assert workspace[1] > 0


def test_no_two_tensors_share_bytes_while_both_live(opens, fake, folder, memory):
    with opens(cuda_graphs=False) as engine:
        make_ready(engine, memory, BATCH, PREFILL)
        addresses = {call[3]: call[4] for call in fake.calls if call[0] == "set_tensor_address" and call[2] == 0}
        for step in folder.config.segments.steps:
            if isinstance(step, SegmentStep):
                spans = sorted(
                    (addresses[one.name], addresses[one.name] + int(np.prod(shape_at(one.shape, BATCH, PREFILL))) * 2)
                    for one in step.tensors
                    if one.name not in engine.tensors and one.name != EMBEDDING
                )
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(address % 256 == 0 for address in addresses.values())
        assert addresses["hidden_0"] != addresses["hidden_1"]


def test_decode_is_captured_once_per_addresses_and_batch(opens, fake, memory):
    stream = GraphStream(0x77, fake.calls)
    with opens() as engine:
        configs = [call[2] for call in fake.calls if call[0] == "create_execution_context"]
        assert len(configs) == 2 * (LAYERS + 1)
        for config in configs:  # TensorRT makes no graph of its own, and compiles before the capture
            assert (config.cuda_graph_strategy.name, config.dynamic_shapes_kernel_specialization_strategy.name) == ("DISABLED", "EAGER")
        engine.use_profile(1)
        bound = make_ready(engine, memory)
        logits = memory.to_device(np.zeros((BATCH, VOCAB), np.float32), stream=stream)

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
        for spec in engine.tensors.values():
            if spec.mode is TensorMode.INPUT:
                engine.set_input_shape(spec.name, shape_at(spec.shape, 2, 1))
        assert runs(3) == ORDER * 3
        fake.calls.clear()
    names = [call[0] for call in fake.calls]
    assert names.count("graph.close") == 2
    assert names.index("graph.close") < names.index("cache.serialize")


def test_graphs_are_bounded_and_captured_work_stays_in_its_graph(memory):
    calls = []
    stream, graphs = GraphStream(1, calls), StepGraphs(memory)
    for key in range(MOST_GRAPHS + 1):
        for _ in range(2):
            graphs.run(key, stream, lambda stream: None, lambda stream: True)
    assert ("graph.close", 1) in calls
    assert ("graph.close", 2) not in calls
    memory.is_capturing = lambda stream: True
    graphs.run(5, stream, lambda stream: calls.append("plain"), lambda stream: True)
    graphs.run(5, FakeStream(2), lambda stream: calls.append("no stream of ours"), lambda stream: True)
    assert calls[-2:] == ["plain", "no stream of ours"]

    def fails(stream):
        raise EngineError("no")

    memory.is_capturing = lambda stream: False
    graphs.run("x", stream, lambda stream: None, lambda stream: True)
    with pytest.raises(EngineError):
        graphs.run("x", stream, fails, lambda stream: True)
    assert calls[-1] == ("captured",)
    graphs.run("x", stream, lambda stream: None, lambda stream: True)
    assert calls[-1][0] == "graph"


def test_bindings_and_shapes_are_checked(opens, fake, memory):
    with opens() as engine:
        engine.use_profile(1)
        with pytest.raises(BindingError, match="`input_ids`: it is not bound in this profile"):
            engine.enqueue(FakeStream(0x77))
        bound = make_ready(engine, memory)
        for change, message in (
            (lambda: engine.set_input_shape("kvcache_start_index", (2,)), r"`kvcache_start_index`: expected shape \(3,\) beside"),
            (lambda: engine.bind("present_key_values_1", bound["past_key_values_0"]), "expected the address of `past_key_values_1`"),
        ):
            change()
            with pytest.raises(BindingError, match=message):
                engine.enqueue(FakeStream(0x77))
            make_ready(engine, memory)
        with pytest.raises(BindingError, match=r"expected a shape from \(1, 1\) to \(3, 1\)"):
            engine.set_input_shape("input_ids", (3, 2))
        with pytest.raises(BindingError, match="`hidden_0`: the engine has no such tensor"):
            engine.bind("hidden_0", bound["logits"])
        fake.calls.clear()
    with pytest.raises(ClosedError, match="this SegmentedEngine is closed"):
        engine.enqueue(FakeStream(0x77))


def test_what_cannot_be_opened(opens, fake, folder, memory, tmp_path):
    with pytest.raises(PlaceError, match="SegmentedEngine: expected the memory of a GPU"):
        SegmentedEngine.open(folder, memory=HostMemory())
    with pytest.raises(EngineError, match=r"got one in segments\. Open it with SegmentedEngine"):
        TensorRTEngine.open(folder, memory=memory)
    whole = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "whole")
    with pytest.raises(EngineError, match="expected an engine in segments, got one in one piece"):
        SegmentedEngine.open(whole, memory=memory)
    with pytest.raises(EngineError, match="expected flavour tensorrt_rtx"):
        opens(flavour="tensorrt")
    fake.segments.pop(segment_plans(LAYERS)[1])
    with pytest.raises(EngineError, match="refuses this engine built with tensorrt_rtx"):
        opens()
    fake.segments[segment_plans(LAYERS)[1]] = fake.segments[segment_plans(LAYERS)[0]]
    with pytest.raises(EngineError, match="the engine's tensors are not those of its config"):
        opens()
    assert memory.live_nbytes == 0


def test_folder(folder, tmp_path):
    config = json.loads((folder.path / "config.json").read_text())
    assert EngineFolder.open(folder.path).config == folder.config
    assert set(folder.read_constants()) == {EMBEDDING, "rope.cos_sin"}
    with folder.read_plan() as plan:
        assert [plan[start:end] for start, end in folder.config.segments.spans] == segment_plans(LAYERS)
    copy = tmp_path / "copy"
    copy.mkdir()

    def refuses(message, call=lambda: EngineFolder.open(copy), **files):
        for name in ("engine.plan", "constants.safetensors", "config.json"):
            (copy / name).write_bytes(files.get(name.split(".")[0], (folder.path / name).read_bytes()))
        with pytest.raises(EngineError, match=message):
            call()

    def changed(change):
        data = json.loads(json.dumps(config))
        change(data)
        return json.dumps(data).encode()

    constants = (folder.path / "constants.safetensors").read_bytes()
    refuses("constants.safetensors: expected [0-9]+ bytes by config.json, got 5", constants=b"12345")
    flipped = constants[:-1] + bytes([constants[-1] ^ 1])
    refuses("constants.safetensors: it was changed since", lambda: EngineFolder.open(copy).read_constants(), constants=flipped)
    for change, message in (
        (lambda data: data.update(segments=None), "segments: expected some of tensorrt_rtx and plugin attention, got none"),
        (lambda data: data["segments"]["steps"].pop(), "segments.steps: expected 6 by model and kv_cache, got 5"),
        (lambda data: data["segments"]["steps"][2].update(inputs=[]), r"segments.steps\[2\]: expected OperationStep"),
        (lambda data: data["segments"]["steps"][2]["attributes"].update(num_heads=8), r"segments.steps\[2\]: expected"),
        (lambda data: data["segments"]["steps"][1].update(plan_nbytes=0), "segment 0: plan_nbytes: expected at least 1, got 0"),
        (lambda data: data["segments"]["steps"][5].update(plan_nbytes=7), "plan.nbytes: expected 8199 by segments, got "),
        (lambda data: data["segments"]["constants"].update(nbytes="1"), "segments.constants.nbytes: expected an integer"),
        (lambda data: data["attention"][1].update(variant="mask"), r"attention\[1\].variant: expected plugin as the first one, got mask"),
        (lambda data: data["kv_cache"].update(layout="separate"), "kv_cache.layout: expected combined by the model, got separate"),
    ):
        refuses(message, config=changed(change))
