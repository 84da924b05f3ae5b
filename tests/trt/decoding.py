"""An engine over the stand-in of TensorRT that runs the same step again and again."""

from tests.helpers.fake_tensorrt import BATCH, VOCAB, make_ready, tensor
from tests.trt.graph_stream import GraphStream


def steps_of(calls):
    wanted = {"enqueue": "{}", "execute_async_v3": "{}", "graph": "graph {}"}
    return [wanted[what].format(*rest) for what, *rest in calls if what in wanted]


class Decoding:
    """An engine in one profile, by default that for decoding, and a stream that captures."""

    def __init__(self, engine, fake, memory, *, profile=1, **sizes):
        self.engine, self.fake, self.memory = engine, fake, memory
        self.stream = GraphStream(0x77, fake.calls, fake.enqueued)
        self.closed = []  # numbers of graphs
        engine.use_profile(profile)
        self.bound = make_ready(engine, memory, **sizes)

    def run(self, count):
        """Enqueue so many steps; return their stages, and the graphs that were launched."""
        self.fake.calls.clear()
        for _ in range(count):
            self.engine.enqueue(self.stream)
        self.closed += [call[1] for call in self.fake.calls if call[0] == "graph.close"]
        return steps_of(self.fake.calls)

    def bind_other_logits(self):
        other = tensor(self.memory, (BATCH, VOCAB), "float32")
        self.engine.bind("logits", other)
        return other
