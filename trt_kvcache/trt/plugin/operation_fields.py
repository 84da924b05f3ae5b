"""``OperationFields``: a custom operation, and the tensors that it reads, as fields of a plugin layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.registry import OPERATIONS, create_operation
from trt_kvcache.trt.plugin.field_text import field_text

#: ``PluginFieldType`` of each field. All are texts, the last two JSON, so that attributes of any operation fit, and doubles stay whole.
OPERATION_FIELD_TYPES = {"operation": "CHAR", "attributes": "CHAR", "inputs": "CHAR"}


@dataclass(frozen=True)
class OperationFields:
    """A registered operation with its attributes, and the inputs that the network gives it; -1 for sizes known at run time only."""

    operation: str
    attributes: Mapping[str, int | float]
    inputs: tuple[TensorType, ...]

    def create_op(self) -> CustomOp:
        """Create the operation; raises EngineError where this process has none of this name."""
        if self.operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise EngineError(
                f"operation {self.operation!r}: expected a registered one, so one of {known}. Call register_operation before this "
                "engine is built or opened."
            )
        return create_operation(self.operation, self.attributes)

    def plugin_field_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the data of the plugin fields. ``PluginField`` points into the arrays: keep them alive as long as the fields."""
        inputs = [[one.dtype, *one.shape] for one in self.inputs]
        texts = {"operation": self.operation, "attributes": json.dumps(dict(self.attributes)), "inputs": json.dumps(inputs)}
        return {name: np.frombuffer(text.encode(), np.int8) for name, text in texts.items()}

    @classmethod
    def from_plugin_fields(cls, fields: Iterable[Any]) -> OperationFields:
        """Read a ``PluginFieldCollection``."""
        texts = {str(field.name): field_text(field) for field in fields}
        if texts.keys() != OPERATION_FIELD_TYPES.keys():
            raise ConfigError(f"fields: expected {', '.join(OPERATION_FIELD_TYPES)}, got {', '.join(texts) or 'none'}.")
        inputs = [TensorType(tuple(shape), dtype) for dtype, *shape in json.loads(texts["inputs"])]
        return cls(texts["operation"], json.loads(texts["attributes"]), tuple(inputs))
