"""The one place that imports TensorRT: full TensorRT or TensorRT for RTX, never before it is asked for.

Both have the same network API. Full TensorRT needs a GPU to build an engine; TensorRT for RTX builds on any machine.
"""

import importlib
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from trt_kvcache._util.checks import one_of
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import DTypeError, EngineError, KVCacheError
from trt_kvcache.trt.log import TensorRTLog

_PIP_HINT = {
    "tensorrt": "pip install 'trt-kvcache[tensorrt]' (from NVIDIA's package index), or the TensorRT of the machine",
    "tensorrt_rtx": "pip install 'trt-kvcache[rtx]'",
}

#: Full TensorRT: the first version with aliased plugin outputs, with KVCacheUpdate, and whose attention knows a causal mask at the
#: lower right.
_FIRST = (10, 3)
_FIRST_WITH_KV_UPDATE = (10, 15)
_FIRST_WITH_CAUSAL_KIND = (10, 16)

#: Our dtype names and those of ``DataType``. The third column of the table in :mod:`trt_kvcache.dtypes`.
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
_NAMES = {data_type: name for name, data_type in _DATA_TYPES.items()}


@dataclass(frozen=True, eq=False)
class TensorRT:
    """An imported TensorRT.

    Parameters
    ----------
    module : module
        ``tensorrt`` or ``tensorrt_rtx``.
    flavour : str
        Its name.
    version : str
        As the module says, such as ``"1.7.1.116"``.
    log : TensorRTLog
        Its only logger.
    """

    module: Any
    flavour: str
    version: str
    log: TensorRTLog

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT for RTX: it builds without a GPU, and compiles for the GPU at run time."""
        return self.flavour == "tensorrt_rtx"

    @property
    def has_kv_update(self) -> bool:
        """Whether there is a KVCacheUpdate layer."""
        return self.is_rtx or _release(self.version) >= _FIRST_WITH_KV_UPDATE

    @property
    def has_native_attention(self) -> bool:
        """Whether attention can be causal from the lower right, with a key length per slot."""
        return self.is_rtx or _release(self.version) >= _FIRST_WITH_CAUSAL_KIND

    def data_type(self, name: str) -> Any:
        """Return TensorRT's ``DataType`` of one of our dtype names. Raises :class:`DTypeError` for an unknown name."""
        one_of("dtype", name, _DATA_TYPES, error=DTypeError)
        return getattr(self.module.DataType, _DATA_TYPES[name])

    def dtype_name(self, data_type: Any) -> str:
        """Return our name of a ``DataType``; one that we do not have comes back as TensorRT calls it, in lower case."""
        return str(_NAMES.get(data_type.name, data_type.name.lower()))

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


def load(flavour: str = "auto", *, error: type[KVCacheError] = EngineError) -> TensorRT:
    """Import TensorRT.

    Parameters
    ----------
    flavour : str
        ``"tensorrt"``, ``"tensorrt_rtx"``, or ``"auto"``: full TensorRT if it is there, has KVCacheUpdate and can start (it needs
        a GPU), else TensorRT for RTX, else an older TensorRT, for plugin attention.
    error : type
        What to raise.

    Raises
    ------
    KVCacheError
        Of type ``error``: an unknown flavour, or none that works; the text says why for each, and how to install it.
    """
    one_of("TensorRT flavour", flavour, FLAVOURS, error=error)
    tried, older = [], []
    for candidate in FLAVOURS[1:] if flavour == "auto" else (flavour,):
        found = _import(candidate)
        if isinstance(found, str):
            tried.append(f"{candidate}: {found}")
        elif found.has_kv_update:
            return found
        else:
            older.append(found)
    if older:
        return older[0]
    raise error(f"TensorRT cannot be used. {' '.join(tried)}")


@cache
def _import(flavour: str) -> TensorRT | str:
    """Return the imported TensorRT, or why it cannot be used."""
    try:
        module = importlib.import_module(flavour)
    except ModuleNotFoundError as error:
        if error.name == flavour:
            return f"not installed; {_PIP_HINT[flavour]}."
        return f"cannot be imported ({error})."
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be imported ({error})."
    version = getattr(module, "__version__", None)
    if version is None or not hasattr(module, "ILogger"):
        return f"the module of that name is not TensorRT; {_PIP_HINT[flavour]}."
    tensorrt = TensorRT(module=module, flavour=flavour, version=str(version), log=TensorRTLog(module))
    if tensorrt.is_rtx:
        return tensorrt
    if _release(tensorrt.version) < _FIRST:
        return f"version {version} is too old. Expected 10.16 or newer, or 10.3 for plugin attention."
    return _start_failure(tensorrt) or tensorrt


def _start_failure(tensorrt: TensorRT) -> str | None:
    """Return why full TensorRT cannot start here (no GPU, or too old a driver), or None if it can."""
    with tensorrt.log.collect() as messages:
        try:
            tensorrt.module.Runtime(tensorrt.log.logger)
        except (TypeError, RuntimeError) as error:
            return f"cannot start here: {' | '.join(messages.errors or messages.warnings) or error}."
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
