"""``PluginNode``: description of a plugin layer, before it is added to a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.ops.custom_op import TensorType


@dataclass(frozen=True, kw_only=True, eq=False)
class PluginNode:
    """A plugin layer: its creator in TensorRT's registry, its fields, and its tensors as TensorRT sees them."""

    name: str  # of the layer
    plugin: str  # name, version and namespace of the creator
    version: str
    namespace: str
    fields: Mapping[str, np.ndarray[Any, Any]]  # one value each, or the bytes of a text
    field_types: Mapping[str, str]  # members of PluginFieldType, by name of the field
    inputs: tuple[TensorType, ...]  # -1 for sizes that are known at run time only
    num_outputs: int
