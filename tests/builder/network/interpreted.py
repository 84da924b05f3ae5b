"""What a session needs to run on networks in the interpreter, by way of the engines that run TensorRT."""

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
        for name, output in interpret(tensorrt, definition.network, constants, feed, plugins).items():
            arrays[name][...] = output

    return run
