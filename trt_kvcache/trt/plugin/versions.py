"""Name and versions of the plugin, and everything that differs between the releases of TensorRT that it runs in."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from typing import Any

from trt_kvcache.errors import EngineError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, KV_FIELD_VALUES, QUANTIZED_ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.plugin_tensors import (
    HEAD_SCALES,
    INPUTS,
    OUTPUTS,
    QUANTIZED_INPUTS,
    QUANTIZED_OUTPUTS,
    QUANTIZED_TREE_INPUTS,
    TREE_INPUTS,
)

#: Name and namespace of the plugin in TensorRT's registry, with one of :data:`PLUGIN_ABIS` as version.
PLUGIN_NAME, PLUGIN_NAMESPACE = "KVCacheAttention", "trt_kvcache"

#: The version over K and V in the dtype of q, and the version over quantized K and V.
PLUGIN_VERSION, QUANTIZED_VERSION = "1", "2"

#: The same where new tokens may be trees.
TREE_VERSION, QUANTIZED_TREE_VERSION = "3", "4"

#: Inputs, outputs and fields of each version. A change takes a new version, and the old one stays: engines name it.
PLUGIN_ABIS = {
    PLUGIN_VERSION: (INPUTS, OUTPUTS, ATTRIBUTE_TYPES),
    QUANTIZED_VERSION: (QUANTIZED_INPUTS, HEAD_SCALES, QUANTIZED_OUTPUTS, OUTPUTS, QUANTIZED_ATTRIBUTE_TYPES, KV_FIELD_VALUES),
    TREE_VERSION: (TREE_INPUTS, OUTPUTS, ATTRIBUTE_TYPES),
    QUANTIZED_TREE_VERSION: (QUANTIZED_TREE_INPUTS, HEAD_SCALES, QUANTIZED_OUTPUTS, OUTPUTS, QUANTIZED_ATTRIBUTE_TYPES, KV_FIELD_VALUES),
}

_NEEDED = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime", "IPluginCreatorV3One")
_NEEDED_AHEAD_OF_TIME = ("register", "aot_impl", "KernelLaunchParams", "SymIntExprs", "SymInt32")


def plugin_version(attributes: AttentionAttributes) -> str:
    """Return the version of the plugin for these attributes; older releases open engines of the lower ones."""
    if attributes.kv_dtype is None:
        return TREE_VERSION if attributes.takes_trees else PLUGIN_VERSION
    return QUANTIZED_TREE_VERSION if attributes.takes_trees else QUANTIZED_VERSION


def abi_digest(version: str) -> str:
    """Return a digest of inputs, outputs and attributes. An engine depends on all of them, so a test holds digest and version together."""
    return hashlib.sha256(repr(PLUGIN_ABIS[version]).encode()).hexdigest()[:16]


def check_plugins(tensorrt: TensorRT) -> None:
    """Check that this TensorRT has plugins with aliased outputs."""
    missing = [name for name in _NEEDED if not hasattr(tensorrt.module, name)]
    if missing:
        raise EngineError(f"{PLUGIN_NAME}: expected TensorRT 10.3 or newer, got {tensorrt}, which has no {missing[0]}.")


def needs_extra_reference(tensorrt: TensorRT) -> bool:
    """Return whether Python must never free a plugin: before 10.4.

    There the C++ destructor drops a reference that it does not have, and frees the plugin twice; one more reference prevents it.
    """
    return not tensorrt.is_rtx and tensorrt.release < (10, 4)


def never_free(plugin: Any) -> None:
    """Give a plugin the reference of :func:`needs_extra_reference`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(plugin))


def can_add_plugins(tensorrt: TensorRT) -> bool:
    """Return whether the network API adds plugin layers (``add_plugin_v3``): not in TensorRT for RTX, whose parser does."""
    return hasattr(tensorrt.module.INetworkDefinition, "add_plugin_v3")


def allow_aliasing(tensorrt: TensorRT, config: Any) -> None:
    """Allow plugins to write to their inputs (``PreviewFeature.ALIASED_PLUGIN_IO_10_03``); other releases allow it anyway."""
    feature = getattr(tensorrt.module.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
    if feature is not None:
        config.set_preview_feature(feature, True)


def ahead_of_time_module(tensorrt: TensorRT) -> Any:
    """Return the module ``tensorrt.plugin``; raises EngineError if it has no plugins that are compiled ahead of time."""
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
    """Return the value of a symbolic size; None where it is not constant."""
    if not expression.is_constant:
        return None
    value = expression.constant_value
    return int(value() if callable(value) else value)  # a method in some versions
