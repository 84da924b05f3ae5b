"""A ``TensorRTEngine`` over the stand-in of ``fake_tensorrt``, and what its steps need."""

import numpy as np
import pytest

from tests.helpers.fake_tensorrt import FakeStream
from trt_kvcache.engine.decoder_tensors import shape_at, step_shape
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.trt import engine_sources, loaded_plan, module as trt_module, tensorrt_engine

# The engine of ``small_model``: H=2, S=38, D=24, 37 tokens, B=3, prefill up to 11.
H, S, D, VOCAB, BATCH, PREFILL = 2, 38, 24, 37, 3, 11
#: What the GPU and its driver say they are.
IDENTITY = ("GPU", "uuid", "8.9", "13000")


def install(fake, monkeypatch, caches, flavour="tensorrt_rtx"):
    """Make ``load`` give this TensorRT; return the list of flavours that it is asked for."""
    loaded, asked = fake.tensorrt(flavour), []
    for module in (engine_sources, tensorrt_engine):
        monkeypatch.setattr(module, "load", lambda wanted: asked.append(wanted) or loaded)
    monkeypatch.setattr(loaded_plan, "gpu_identity", lambda device: IDENTITY)
    monkeypatch.setattr(trt_module, "driver_failure", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    return asked


def refuses(error, message, call, *args, **options):
    with pytest.raises(error, match=message):
        call(*args, **options)


def tensor(memory, shape, dtype):
    return memory.to_device(np.zeros(shape, dtype), stream=memory.streams[0])


def make_ready(engine, memory, batch=BATCH, width=1, logits=1):
    """Bind what a step needs in the profile in use, and set the shapes; return what is bound."""
    bound = {}
    for spec in engine.tensors.values():
        bound[spec.name] = bound[spec.alias] if spec.alias else tensor(memory, shape_at(spec.shape, BATCH, PREFILL), spec.dtype)
        engine.bind(spec.name, bound[spec.name])
    set_shapes(engine, batch, width, logits)
    return bound


def enqueue(engine):
    engine.enqueue(FakeStream(0x77))


def set_shapes(engine, batch, width=1, logits=1):
    for spec in engine.tensors.values():
        if spec.mode is TensorMode.INPUT:
            engine.set_input_shape(spec.name, step_shape(spec, engine.names, batch=batch, width=width, logits=logits))
