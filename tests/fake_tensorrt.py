"""A stand-in for TensorRT's runtime half that records what is called, and a stand-in for GPU memory.

It knows what the documentation says: shapes and addresses belong to a context, switching a context's profile forgets its shapes,
an enqueue fails with a shape or an address missing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from test_trt_module import FakeLogger

from trt_kvcache.engine import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.memory import HostMemory
from trt_kvcache.trt_log import TensorRTLog
from trt_kvcache.trt_module import TensorRT

ShapeOf = Callable[[TensorSpec, int, int], tuple[int, ...]]


class FakeStream:
    """A stream with an address."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.synced = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def sync(self) -> None:
        self.synced += 1


class FakeGpuMemory(HostMemory):
    """Host memory that says it is a GPU's."""

    device = "cuda:0"
    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[FakeStream] = []

    def create_stream(self) -> Any:
        self.streams.append(FakeStream(0x1000 + len(self.streams)))
        return self.streams[-1]

    def check_stream(self, stream: Any) -> None:
        assert isinstance(stream, FakeStream)

    def synchronize(self, stream: Any) -> None:
        stream.sync()


class FakeTensorRT:
    """The module, and everything it makes. ``calls`` is what was called, in order."""

    def __init__(self, specs: list[TensorSpec], profiles: list[EngineProfile], shape_of: ShapeOf, *, plan: bytes = b"plan") -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.profiles = profiles
        self.shape_of = shape_of
        self.plan = plan
        self.calls: list[Any] = []
        self.errors: dict[str, str] = {}  # what to log, by call
        self.refuse: set[str] = set()  # calls that return False or None
        self.cache_content: bytes | None = b"compiled"
        self.cache_refuses = False
        self.host_tensors: set[str] = set()
        self.contexts: list[Any] = []
        self.logger: Any = None

    def record(self, name: str, *details: Any) -> bool:
        """Note a call; log what is to be logged for it; say whether it succeeds."""
        self.calls.append((name, *details))
        if name in self.errors:
            self.logger.log(FakeLogger.Severity.ERROR, self.errors[name])
        return name not in self.refuse

    def tensorrt(self, flavour: str = "tensorrt_rtx") -> TensorRT:
        """Return it as :func:`trt_kvcache.trt_module.load` would."""
        fake = self

        class Runtime:
            def __init__(self, logger: Any) -> None:
                fake.logger = logger
                fake.record("Runtime")

            def deserialize_cuda_engine(self, plan: Any) -> Any:
                ok = fake.record("deserialize_cuda_engine", bytes(plan))
                return _Engine(fake) if ok and bytes(plan) == fake.plan else None

        class ExecutionContextAllocationStrategy(enum.Enum):
            STATIC = 0
            USER_MANAGED = 2

        names = ["FLOAT", "HALF", "BF16", "INT8", "INT32", "INT64", "BOOL", "UINT8", "FP8"]
        module = SimpleNamespace(
            ILogger=FakeLogger,
            Runtime=Runtime,
            TensorLocation=enum.Enum("TensorLocation", ["DEVICE", "HOST"]),
            TensorIOMode=enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"]),
            DataType=enum.Enum("DataType", names),
            ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
        )
        self.module = module
        self.loaded = TensorRT(module=module, flavour=flavour, version="1.7.1", log=TensorRTLog(module))
        return self.loaded


class _Engine:
    def __init__(self, fake: FakeTensorRT) -> None:
        self.fake = fake
        self.names = sorted(fake.specs)  # not our order
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(fake.profiles)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_location(self, name: str) -> Any:
        locations = self.fake.module.TensorLocation
        return locations.HOST if name in self.fake.host_tensors else locations.DEVICE

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.fake.module.TensorIOMode
        return modes.INPUT if self.fake.specs[name].mode is TensorMode.INPUT else modes.OUTPUT

    def get_tensor_shape(self, name: str) -> Any:
        return list(self.fake.specs[name].shape)

    def get_tensor_dtype(self, name: str) -> Any:
        return self.fake.loaded.data_type(self.fake.specs[name].dtype)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.fake.specs[name].alias

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        spec, profile = self.fake.specs[name], self.fake.profiles[index]
        assert -1 in spec.shape
        low = list(self.fake.shape_of(spec, profile.min_batch, profile.min_width))
        high = list(self.fake.shape_of(spec, profile.max_batch, profile.max_width))
        return [low, high, high]

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return (3000, 5000)[index]  # the first is not the largest

    def create_runtime_config(self) -> Any:
        return _RuntimeConfig(self.fake) if self.fake.record("create_runtime_config") else None

    def create_execution_context(self, argument: Any) -> Any:
        if not self.fake.record("create_execution_context", argument):
            return None
        self.fake.contexts.append(_Context(self.fake))
        return self.fake.contexts[-1]


class _RuntimeConfig:
    def __init__(self, fake: FakeTensorRT) -> None:
        self.fake = fake

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.fake.record("set_execution_context_allocation_strategy", strategy.name)

    def create_runtime_cache(self) -> Any:
        self.fake.record("create_runtime_cache")
        return _RuntimeCache(self.fake)

    def set_runtime_cache(self, cache: Any) -> bool:
        return self.fake.record("set_runtime_cache")


class _RuntimeCache:
    def __init__(self, fake: FakeTensorRT) -> None:
        self.fake = fake

    def deserialize(self, blob: bytes) -> bool:
        self.fake.record("cache.deserialize", blob)
        if self.fake.cache_refuses:
            self.fake.logger.log(FakeLogger.Severity.ERROR, "cache of another driver")
        return not self.fake.cache_refuses

    def serialize(self) -> bytes | None:
        self.fake.record("cache.serialize")
        return self.fake.cache_content


class _Context:
    def __init__(self, fake: FakeTensorRT) -> None:
        self.fake = fake
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: tuple[int, int] | None = None

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile, self.shapes = index, {}
        return self.fake.record("set_optimization_profile_async", index, stream)

    def set_device_memory(self, address: int, nbytes: int) -> None:
        self.memory = (address, nbytes)
        self.fake.record("set_device_memory", nbytes)

    def set_tensor_address(self, name: str, address: int) -> bool:
        if not self.fake.record("set_tensor_address", self.profile, name, address):
            return False
        self.addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if not self.fake.record("set_input_shape", self.profile, name, shape):
            return False
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> list[int]:
        spec = self.fake.specs[name]
        if spec.mode is TensorMode.INPUT:
            return list(self.shapes.get(name, spec.shape))
        batch = next(iter(self.shapes.values()), (-1,))[0]
        return [batch, *spec.shape[1:]]

    def execute_async_v3(self, stream: int) -> bool:
        return self.fake.record("execute_async_v3", self.profile, stream)
