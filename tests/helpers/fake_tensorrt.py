"""A stand-in for TensorRT: its modules, its runtime half, which records what is called, GPU memory, and engines over them.

It knows what the documentation says: shapes and addresses belong to a context, switching a context's profile forgets its shapes.
"""

from __future__ import annotations

import enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trt_kvcache.engine.decoder_tensors import shape_at, step_shape
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.trt import engine_sources, graph_engine, module as trt_module, tensorrt_engine
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT


class FakeLogger:
    """The base class of TensorRT's loggers."""

    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4


def fake_module(version: str, *, start: bool = True, log: str = "CUDA initialization failure with error: 35") -> ModuleType:
    """Return a module of this version. With ``start=False`` its runtime logs ``log`` and cannot be created."""
    module: Any = ModuleType("tensorrt")
    module.__version__ = version
    module.ILogger = FakeLogger

    class Runtime:
        def __init__(self, logger: Any) -> None:
            if not start:
                logger.log(FakeLogger.Severity.ERROR, log)
                raise TypeError("pybind11::init(): factory function returned nullptr")

    module.Runtime = Runtime
    return module


class FakeStream:
    """A stream with an address."""

    def __init__(self, handle):
        self.handle = handle
        self.synced = 0

    def __cuda_stream__(self):
        return (0, self.handle)

    def sync(self):
        self.synced += 1


class FakeGpuMemory(HostMemory):
    """Host memory that says it is a GPU's."""

    device, arch = "cuda:0", "sm_86"
    is_host = False

    def __init__(self):
        super().__init__()
        self.streams = []

    def create_stream(self):
        self.streams.append(FakeStream(0x1000 + len(self.streams)))
        return self.streams[-1]

    def check_stream(self, stream):
        assert isinstance(stream, FakeStream)

    def synchronize(self, stream):
        stream.sync()


class FakeTensorRT:
    """The module, and everything it makes. ``calls`` is what was called, in order."""

    def __init__(self, specs, profiles, *, plan=b"plan"):
        self.specs = {spec.name: spec for spec in specs}
        self.profiles = list(profiles)
        self.plan = plan
        self.calls = []
        self.errors = {}  # what to log, by call
        self.refuse = set()  # calls that return False or None
        self.cache_content = b"compiled"
        self.cache_refuses = False  # whether a runtime cache says that it cannot read its file
        self.host_tensors = set()
        self.alias_of = lambda name: self.specs[name].alias  # None: TensorRT before 10.15, which does not have the method
        self.contexts = []
        self.logger = None
        self.segments = {}  # plan to FakeSegment
        self.capturable, self.whole = True, None  # the whole, of a segment
        self.activations = (3000, 5000, 4000)  # the first is not the largest
        self.run = lambda context: None  # what a step does
        self.enqueued = []  # contexts, in order, of all segments

    def record(self, name, *details):
        """Note a call; log what is to be logged for it; say whether it succeeds."""
        self.calls.append((name, *details))
        if name in self.errors:
            self.logger.log(FakeLogger.Severity.ERROR, self.errors[name])
        return name not in self.refuse

    def tensorrt(self, flavour):
        """Return it as :func:`trt_kvcache.trt.module.load` would."""
        fake = self

        class Runtime:
            def __init__(self, logger):
                fake.logger = logger
                fake.record("Runtime")

            def __setattr__(self, name, value):
                fake.record(name, value)

            def deserialize_cuda_engine(self, plan):
                ok = fake.record("deserialize_cuda_engine", bytes(plan))
                found = fake.segments.get(bytes(plan), fake if bytes(plan) == fake.plan else None)
                return _Engine(found) if ok and found else None

        self.module = SimpleNamespace(
            ILogger=FakeLogger,
            INetworkDefinition=SimpleNamespace(),  # without plugin layers, as TensorRT for RTX
            Runtime=Runtime,
            TensorLocation=enum.Enum("TensorLocation", ["DEVICE", "HOST"]),
            TensorIOMode=enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"]),
            DataType=enum.Enum("DataType", ["FLOAT", "HALF", "BF16", "INT8", "INT32", "INT64", "BOOL", "UINT8", "FP8"]),
            ExecutionContextAllocationStrategy=enum.Enum("ExecutionContextAllocationStrategy", ["STATIC", "USER_MANAGED"]),
            CudaGraphStrategy=enum.Enum("CudaGraphStrategy", ["DISABLED", "WHOLE_GRAPH_CAPTURE"]),
            DynamicShapesKernelSpecializationStrategy=enum.Enum("KernelSpecialization", ["LAZY", "EAGER", "NONE"]),
        )
        self.loaded = TensorRT(module=self.module, flavour=flavour, version="1.7.1", log=TensorRTLog(self.module))
        return self.loaded


class FakeSegment(FakeTensorRT):
    """One plan of several; what is called is noted with ``label`` in the calls of ``whole``."""

    def __init__(self, whole, label, specs):
        super().__init__(specs, whole.profiles)
        self.whole, self.label = whole, label
        self.module, self.loaded = whole.module, whole.loaded

    def record(self, name, *details):
        return self.whole.record(name, self.label, *details)


class _Part:
    """Something that TensorRT makes."""

    def __init__(self, fake):
        self.fake = fake


class _Engine(_Part):
    def __init__(self, fake):
        super().__init__(fake)
        self.names = sorted(fake.specs)  # not our order
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(fake.profiles)
        if fake.alias_of is not None:
            self.get_aliased_input_tensor = fake.alias_of

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_location(self, name):
        return self.fake.module.TensorLocation["HOST" if name in self.fake.host_tensors else "DEVICE"]

    def get_tensor_mode(self, name):
        return self.fake.module.TensorIOMode[self.fake.specs[name].mode.name]

    def get_tensor_shape(self, name):
        return list(self.fake.specs[name].shape)

    def get_tensor_dtype(self, name):
        return self.fake.loaded.data_type(self.fake.specs[name].dtype)

    def get_tensor_profile_shape(self, name, index):
        spec, profile = self.fake.specs[name], self.fake.profiles[index]
        assert -1 in spec.shape
        low = list(step_shape(spec, DEFAULT_NAMES, batch=profile.min_batch, width=profile.min_width, logits=1))
        high = list(step_shape(spec, DEFAULT_NAMES, batch=profile.max_batch, width=profile.max_width, logits=profile.max_logits))
        return [low, high, high]

    def get_device_memory_size_for_profile_v2(self, index):
        return self.fake.activations[index]

    def create_runtime_config(self):
        return _RuntimeConfig(self.fake) if self.fake.record("create_runtime_config") else None

    def create_execution_context(self, argument):
        if not self.fake.record("create_execution_context", argument):
            return None
        self.fake.contexts.append(_Context(self.fake))
        return self.fake.contexts[-1]


class _RuntimeConfig(_Part):
    def set_execution_context_allocation_strategy(self, strategy):
        self.fake.record("set_execution_context_allocation_strategy", strategy.name)

    def create_runtime_cache(self):
        self.fake.record("create_runtime_cache")
        return _RuntimeCache(self.fake)

    def set_runtime_cache(self, cache):
        return self.fake.record("set_runtime_cache")


class _RuntimeCache(_Part):
    def deserialize(self, blob):
        self.fake.record("cache.deserialize", blob)
        if self.fake.cache_refuses:
            self.fake.logger.log(FakeLogger.Severity.ERROR, "cache of another driver")
        return not self.fake.cache_refuses

    def serialize(self):
        self.fake.record("cache.serialize")
        return self.fake.cache_content


class _Context(_Part):
    def __init__(self, fake):
        super().__init__(fake)
        self.profile, self.shapes, self.memory = 0, {}, None
        self.addresses = {}
        self.changes = 0  # of shapes and addresses

    def set_optimization_profile_async(self, index, stream):
        self.profile, self.shapes = index, {}
        return self.fake.record("set_optimization_profile_async", index, stream)

    def set_device_memory(self, address, nbytes):
        self.memory = (address, nbytes)
        self.fake.record("set_device_memory", nbytes)

    def set_tensor_address(self, name, address):
        self.changes += 1
        self.addresses[name] = address
        return self.fake.record("set_tensor_address", self.profile, name, address)

    def get_tensor_address(self, name):
        return self.addresses[name]

    def set_input_shape(self, name, shape):
        self.changes += 1
        ok = self.fake.record("set_input_shape", self.profile, name, shape)
        if ok:
            self.shapes[name] = shape
        return ok

    def get_tensor_shape(self, name):
        spec = self.fake.specs[name]
        if spec.mode is TensorMode.INPUT:
            return list(self.shapes.get(name, spec.shape))
        batch = next(iter(self.shapes.values()), (-1,))[0]
        logits = self.shapes.get(DEFAULT_NAMES.last_token_ids, (-1, -1))[1]  # the only other size of an output that is free
        return [batch, *(logits if size < 0 else size for size in spec.shape[1:])]  # not asked for of segments

    def is_stream_capturable(self, stream):
        self.fake.record("is_stream_capturable", stream)
        return self.fake.capturable if self.fake.whole is None else self.fake.whole.capturable

    def execute_async_v3(self, stream):
        self.fake.run(self)
        (self.fake.whole or self.fake).enqueued.append(self)
        return self.fake.record("execute_async_v3", self.profile, stream)


# The engine of the model that ``models.write_model`` writes: H=2, S=38, D=24, 37 tokens, B=3, prefill up to 11.
H, S, D, VOCAB, BATCH, PREFILL = 2, 38, 24, 37, 3, 11
#: What the GPU and its driver say they are.
IDENTITY = ("GPU", "uuid", "8.9", "13000")


def install(fake, monkeypatch, caches, flavour="tensorrt_rtx"):
    """Make ``load`` give this TensorRT; return the list of flavours that it is asked for."""
    loaded, asked = fake.tensorrt(flavour), []
    for module in (engine_sources, tensorrt_engine):
        monkeypatch.setattr(module, "load", lambda wanted: asked.append(wanted) or loaded)
    monkeypatch.setattr(graph_engine, "gpu_identity", lambda device: IDENTITY)
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
