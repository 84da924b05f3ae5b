"""What the plugin is called, and all that differs between the versions of TensorRT it runs in."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

from trt_kvcache.errors import EngineError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.ops.attention_shapes import INPUTS, OUTPUTS
from trt_kvcache.trt.module import TensorRT

#: How TensorRT finds the plugin. The version changes with :func:`abi_digest`.
PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE = "KVCacheAttention", "1", "trt_kvcache"

_NEEDED = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime", "IPluginCreatorV3One")
_NEEDED_AHEAD_OF_TIME = ("register", "aot_impl", "KernelLaunchParams", "SymIntExprs", "SymInt32")


def abi_digest() -> str:
    """Return a digest of the inputs, outputs and fields."""
    return hashlib.sha256(repr((INPUTS, OUTPUTS, ATTRIBUTE_TYPES)).encode()).hexdigest()[:16]


def check_plugins(tensorrt: TensorRT) -> None:
    """Check that plugins can have aliased outputs here. Raises :class:`EngineError`: TensorRT is older than 10.3."""
    missing = [name for name in _NEEDED if not hasattr(tensorrt.module, name)]
    if missing:
        raise EngineError(f"{PLUGIN_NAME}: expected TensorRT 10.3 or newer, got {tensorrt}, which has no {missing[0]}.")


def can_add_plugins(tensorrt: TensorRT) -> bool:
    """Tell whether networks have plugin layers: not those of TensorRT for RTX."""
    return hasattr(tensorrt.module.INetworkDefinition, "add_plugin_v3")


def allow_aliasing(tensorrt: TensorRT, config: Any) -> None:
    """Let plugins write to their inputs in what is built with this ``IBuilderConfig``; no such switch: it is always so."""
    feature = getattr(tensorrt.module.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
    if feature is not None:
        config.set_preview_feature(feature, True)


def ahead_of_time_module(tensorrt: TensorRT) -> Any:
    """Return ``tensorrt.plugin``. Raises :class:`EngineError` where it is not there, or knows no ``aot_impl``."""
    name = f"{tensorrt.flavour}.plugin"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise EngineError(f"{name}: expected full TensorRT with plugins compiled ahead of time, got {tensorrt} ({error}).") from None
    missing = [needed for needed in _NEEDED_AHEAD_OF_TIME if not hasattr(module, needed)]
    if missing:
        raise EngineError(f"{name}: expected plugins compiled ahead of time, {tensorrt} has no {missing[0]}. Use a newer TensorRT.")
    return module


def constant_of(expression: Any) -> int | None:
    """Return the value of a symbolic size of ``tensorrt.plugin``, or None where it is not constant."""
    if not expression.is_constant:
        return None
    value = expression.constant_value
    return int(value() if callable(value) else value)  # a method in some versions
