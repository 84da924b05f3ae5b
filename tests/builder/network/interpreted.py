"""What a session needs to run on networks in the interpreter, by way of the engines that run TensorRT."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

from tests.helpers.fake_tensorrt import FakeStream
from tests.trt.plugin.on_host import array_at
from trt_kvcache.engine.decoder_tensors import step_shape
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.memory.host_memory import HostMemory, HostStream

from .interpreter import interpret

#: Longer than an enqueue takes, of one token, and between.
PROMPTS = [[5, 9, 3, 30, 11, 2, 7, 40, 1, 12, 13, 14, 15], [8], [21, 22, 4]]


class AddressedStream(FakeStream, HostStream):
    """A stream of host memory with an address."""


class AddressedMemory(HostMemory):
    def create_stream(self):
        return AddressedStream(0x77)


class CapturingStream(AddressedStream):
    """A stream that captures, and is its own graph builder."""

    is_building = False

    def __init__(self, memory):
        super().__init__(0x77)
        self.memory = memory

    def create_graph_builder(self):
        return self

    def begin_building(self, mode):
        self.memory.captured, self.is_building = [], True

    def end_building(self):
        self.is_building = False
        return self

    def complete(self):
        captured, self.memory.captured = self.memory.captured, None
        return SimpleNamespace(launch=partial(self.memory.replay, captured), close=lambda: None)

    def close(self):
        """It is the stream."""


class CapturingMemory(AddressedMemory):
    """Memory whose streams capture what a stand-in of TensorRT runs. ``replayed`` counts the graphs that were launched, by profile."""

    def __init__(self, *fakes):
        super().__init__()
        self.captured, self.replayed, self.runs = None, Counter(), {}
        for fake in fakes:
            self.watch(fake)

    def watch(self, fake):
        """Capture what a stand-in runs, too."""
        self.runs[fake], fake.run = fake.run, self.note_or_run

    def create_stream(self):
        return CapturingStream(self)

    def note_or_run(self, context):
        if self.captured is None:
            self.runs[context.fake](context)
        else:
            self.captured.append((context, context.changes))

    def replay(self, captured, stream):
        for context, changes in captured:
            assert context.changes == changes, "undefined: the context has changed"
            self.replayed[context.profile] += 1
            self.runs[context.fake](context)


def serve(session, prompts=PROMPTS):
    """Run rounds of ragged prompts, decode steps, next turns, and a queue whose batches grow and shrink; return all tokens."""
    tokens = []
    for _ in range(5):
        steps = [session.prefill(prompts)]
        steps += [session.decode([3, 4, 5]) for _ in range(3)]
        steps += [session.append([[], [7, 8, 9], [3]])[1:], session.decode([6, 7, 8])]
        tokens += [step.argmax(axis=1).tolist() for step in steps]
    handles = [
        session.submit(prompt, temperature=0.0, max_new_tokens=count, ignore_eos=True)
        for prompt, count in zip(prompts * 2, range(3, 9), strict=True)
    ]
    while session.step():
        pass
    return tokens + [list(handle.tokens) for handle in handles]


def interpreter_of(tensorrt, definition, constants, plugins=()):
    """Return what runs the network of an execution context, at the addresses that are bound; ``plugins`` as in :func:`interpret`."""

    def run(context):
        known = (context.shapes.get(name) for name in ("input_ids", "hidden_0", definition.tensors[0].name))
        slots, width = next(shape for shape in known if shape)[:2]
        _, logits = context.shapes.get("last_token_ids", (0, 1))
        sizes = {"batch": slots, "width": width, "logits": logits}
        arrays = {
            spec.name: array_at(context.addresses[spec.name], step_shape(spec, DEFAULT_NAMES, **sizes), spec.dtype)
            for spec in definition.tensors
        }
        feed = {spec.name: arrays[spec.name] for spec in definition.tensors if spec.mode is TensorMode.INPUT}
        assert {name: array.shape for name, array in feed.items()}.items() >= context.shapes.items()
        v_outputs = {spec.name: arrays[spec.name] for spec in definition.tensors if spec.name.startswith("v_") and spec.name not in feed}
        for name, output in interpret(tensorrt, definition.network, constants, feed, plugins, v_outputs).items():
            arrays[name][...] = output

    return run
