"""The creators of the plugin, one of each version, with which TensorRT makes the plugin when it deserialises an engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from trt_kvcache.errors import EngineError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, QUANTIZED_ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.operation_plugin import register_operations
from trt_kvcache.trt.plugin.plugin import plugin_class
from trt_kvcache.trt.plugin.plugin_library import creator_of_library
from trt_kvcache.trt.plugin.reported import reporter
from trt_kvcache.trt.plugin.versions import (
    PLUGIN_ABIS,
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    QUANTIZED_TREE_VERSION,
    QUANTIZED_VERSION,
    TREE_VERSION,
)


def register(tensorrt: TensorRT) -> dict[str, Any]:
    """Register the plugins with TensorRT's plugin registry: before a network uses them, and before an engine that has them is opened.

    Returns the creators of attention by version: of a plugin library where this process has loaded one.
    """
    register_operations(tensorrt)
    return {version: creator_of_library(tensorrt, version) or register_version(tensorrt, version) for version in PLUGIN_ABIS}


@cache
def register_version(tensorrt: TensorRT, version: str) -> Any:
    """Register one version of the plugin: see :func:`register`."""
    plugin = plugin_class(tensorrt)
    trt = tensorrt.module
    quantized, takes_trees = version in (QUANTIZED_VERSION, QUANTIZED_TREE_VERSION), version in (TREE_VERSION, QUANTIZED_TREE_VERSION)
    types = QUANTIZED_ATTRIBUTE_TYPES if quantized else ATTRIBUTE_TYPES

    class KVCacheAttentionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = PLUGIN_NAME, version, PLUGIN_NAMESPACE
            empty = np.empty(0)
            kinds = trt.PluginFieldType
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(name, empty, getattr(kinds, kind)) for name, kind in types.items()]
            )

        @reporter(tensorrt)
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            return plugin(AttentionAttributes.from_plugin_fields(fields, quantized=quantized, takes_trees=takes_trees))

    creator = KVCacheAttentionCreator()
    if not trt.get_plugin_registry().register_creator(creator, PLUGIN_NAMESPACE):
        raise EngineError(f"{PLUGIN_NAME} {version}: {tensorrt} has a creator of this name and version that is not ours.")
    return creator
