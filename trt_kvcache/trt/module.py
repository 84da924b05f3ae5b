"""The one place that imports TensorRT: full TensorRT or TensorRT for RTX, and neither before it is needed.

Both have the same network API, but only that of full TensorRT adds plugin layers. Full TensorRT needs a GPU to build an engine; TensorRT
for RTX builds on any machine.
"""

import importlib
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from trt_kvcache._util.checks import one_of
from trt_kvcache.engine.attention_variants import AttentionVariant, attention_variant
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import DTypeError, EngineError, KVCacheError
from trt_kvcache.memory.cuda_driver import driver_failure, driver_version
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.wheels import rtx_wheels, wheels_failure

_INSTALL_HINT = {
    "tensorrt": "pip install 'trt-kvcache[tensorrt]' (from NVIDIA's package index), or the TensorRT of the machine",
    "tensorrt_rtx": "pip install 'trt-kvcache[rtx]', or 'trt-kvcache[rtx-cu12]' for NVIDIA driver 570 to 575",
}

#: Members of ``DataType`` by our dtype names. The third column of the table in :mod:`trt_kvcache.dtypes`.
_DATA_TYPES = {
    "float16": "HALF",
    "bfloat16": "BF16",
    "float32": "FLOAT",
    "float8_e4m3fn": "FP8",
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
}

#: Dtypes of ml_dtypes that constants alone have.
CONSTANT_DTYPES = {"int4": "INT4", "float4_e2m1fn": "FP4", "float8_e8m0fnu": "E8M0"}
_DATA_TYPES |= CONSTANT_DTYPES
_DTYPE_NAMES = {data_type: name for name, data_type in _DATA_TYPES.items()}


@dataclass(frozen=True, eq=False)
class TensorRT:
    """An imported TensorRT. Made by :func:`load`."""

    module: Any  # tensorrt or tensorrt_rtx
    flavour: str  # name of the module
    version: str  # such as "1.7.1.116"
    log: TensorRTLog  # the only logger of the module

    @property
    def is_rtx(self) -> bool:
        """True for TensorRT for RTX, which builds without a GPU and compiles for the GPU at run time."""
        return self.flavour == "tensorrt_rtx"

    def supports(self, variant: AttentionVariant) -> bool:
        """Return whether the network API has the layers of a variant of attention; for plugin in TensorRT for RTX, segments do."""
        return self.release >= (variant.first_rtx if self.is_rtx else variant.first_tensorrt)

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor number of the version, such as ``(10, 15)``."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    def create(self, kind: str) -> Any:
        """Return a ``"Runtime"`` or ``"Builder"``, after checking GPU (full TensorRT) or wheel (for RTX).

        Without a GPU, some releases return an invalid pointer in place of null, and its first use ends the process.
        """
        failure = (_wheel_failure() if kind == "Runtime" else None) if self.is_rtx else driver_failure()
        if failure is not None:
            self.log.receive(failure, is_error=True)
            raise RuntimeError(failure)
        return getattr(self.module, kind)(self.log.logger)

    def data_type(self, name: str) -> Any:
        """Return the ``DataType`` of a dtype name."""
        one_of("dtype", name, _DATA_TYPES, error=DTypeError)
        return getattr(self.module.DataType, _DATA_TYPES[name])

    def dtype_name(self, data_type: Any) -> str:
        """Return the dtype name of a ``DataType``."""
        return str(_DTYPE_NAMES.get(data_type.name, data_type.name.lower()))

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


def load(flavour: str = "auto", *, error: type[KVCacheError] = EngineError) -> TensorRT:
    """Import TensorRT. A module is imported once per process, and has one logger."""
    one_of("TensorRT flavour", flavour, FLAVOURS, error=error)
    failures, older = [], []
    for candidate in FLAVOURS[1:] if flavour == "auto" else (flavour,):
        found = _import(candidate)
        if isinstance(found, str):
            failures.append(f"{candidate}: {found}")
        elif found.supports(attention_variant("native")):
            return found
        else:
            older.append(found)
    if older:
        return older[0]
    raise error(f"TensorRT cannot be used. {' '.join(failures)}")


@cache
def _import(flavour: str) -> TensorRT | str:
    """Return the imported TensorRT, or why it cannot be used."""
    try:
        module = importlib.import_module(flavour)
    except ModuleNotFoundError as error:
        if error.name == flavour:
            return f"not installed; {_INSTALL_HINT[flavour]}."
        return f"cannot be imported ({error})."
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be imported ({error})."
    version = getattr(module, "__version__", None)
    if version is None or not hasattr(module, "ILogger"):
        return f"the module of that name is not TensorRT; {_INSTALL_HINT[flavour]}."
    tensorrt = TensorRT(module=module, flavour=flavour, version=str(version), log=TensorRTLog(module))
    if tensorrt.is_rtx:
        return tensorrt
    native, plugin = attention_variant("native"), attention_variant("plugin")
    if not tensorrt.supports(plugin):
        return f"version {version} is too old. Expected {native.first_release} or newer, or {plugin.first_release} for plugin attention."
    return _start_failure(tensorrt) or tensorrt


def _wheel_failure() -> str | None:
    """Return why the wheel of TensorRT for RTX that is installed cannot run with the NVIDIA driver, or None. Builds need no driver."""
    version = driver_version()
    return None if version is None else wheels_failure(rtx_wheels(), version[0])


def _start_failure(tensorrt: TensorRT) -> str | None:
    """Return why full TensorRT cannot start here (no GPU, or too old a driver), or None if it can."""
    with tensorrt.log.collect() as messages:
        try:
            tensorrt.create("Runtime")
        except (TypeError, RuntimeError) as error:
            return f"cannot start here: {' | '.join(messages.errors or messages.warnings) or error}."
    return None
