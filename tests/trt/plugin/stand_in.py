"""A stand-in for the part of TensorRT that a plugin sees, for what the real module without a GPU cannot do."""

import enum
from types import SimpleNamespace

from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT

DataType = enum.Enum("DataType", "HALF BF16 FLOAT INT32")
_BASES = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime", "IPluginCreatorV3One")
_LOGGER = type("ILogger", (), {"Severity": enum.IntEnum("Severity", "ERROR WARNING")})


class Size:
    """A symbolic size; ``value`` is None where it is not constant."""

    def __init__(self, value):
        self.value = value

    def is_constant(self):
        return self.value is not None

    def get_constant_value(self):
        assert self.value is not None
        return self.value


def tensorrt(**changed):
    """Return a TensorRT whose module has these classes, and what ``changed`` says."""
    module = SimpleNamespace(ILogger=_LOGGER, DataType=DataType, DimsExprs=tuple, **{name: type(name, (), {}) for name in _BASES})
    for name, value in changed.items():
        setattr(module, name, value)
    return TensorRT(module=module, flavour="tensorrt", version="10.3.0", log=TensorRTLog(module))
