"""A stand-in for TensorRT's runtime half that records what is called, and a stand-in for GPU memory.

It knows what the documentation says: shapes and addresses belong to a context, switching a context's profile forgets its shapes.
"""

import enum
from types import SimpleNamespace

from tests.helpers.tensorrt_modules import FakeLogger
from trt_kvcache.engine.decoder_tensors import step_shape
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT


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
        self.capturable = True
        self.activations = (3000, 5000, 4000)  # the first is not the largest
        self.run = lambda context: None  # what a step does

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

    def set_optimization_profile_async(self, index, stream):
        self.profile, self.shapes = index, {}
        return self.fake.record("set_optimization_profile_async", index, stream)

    def set_device_memory(self, address, nbytes):
        self.memory = (address, nbytes)
        self.fake.record("set_device_memory", nbytes)

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return self.fake.record("set_tensor_address", self.profile, name, address)

    def set_input_shape(self, name, shape):
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
        return self.fake.whole.capturable

    def execute_async_v3(self, stream):
        self.fake.run(self)
        return self.fake.record("execute_async_v3", self.profile, stream)
