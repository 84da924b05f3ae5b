"""``CustomOperation``: any registered operation (``CustomOp``) as a plugin layer, so that a network needs no cut for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from trt_kvcache.errors import EngineError
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.int32_packing import is_packed_as_int32, packed_shape, unpacked_shape
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.enqueue import current_memory
from trt_kvcache.trt.plugin.operation_enqueue import OperationEnqueue
from trt_kvcache.trt.plugin.operation_fields import OPERATION_FIELD_TYPES, OperationFields
from trt_kvcache.trt.plugin.reported import reporter
from trt_kvcache.trt.plugin.versions import PLUGIN_NAMESPACE, check_plugins, needs_extra_reference, never_free

#: Name and version of the plugin in TensorRT's registry.
OPERATION_PLUGIN_NAME, OPERATION_PLUGIN_VERSION = "CustomOperation", "1"


@cache
def operation_plugin_class(tensorrt: TensorRT) -> Any:
    """Return the class of the plugin; the same class at every call."""
    check_plugins(tensorrt)
    trt, reported = tensorrt.module, reporter(tensorrt, OPERATION_PLUGIN_NAME)

    class CustomOperation(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc, name-defined]
        """A registered operation as an ``IPluginV3``, with the methods that TensorRT calls."""

        def __init__(self, fields: OperationFields) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = OPERATION_PLUGIN_NAME, OPERATION_PLUGIN_VERSION, PLUGIN_NAMESPACE
            self.fields = fields
            self._op: CustomOp = fields.create_op()
            self._outputs = self._op.outputs(fields.inputs)
            self.num_outputs = len(self._outputs)
            self._field_arrays = fields.plugin_field_arrays()  # the plugin fields point into them
            self._stored_fields: Any = None
            self._stored_struct: Any = None
            self._prepared: OperationEnqueue | None = None
            if needs_extra_reference(tensorrt):
                never_free(self)

        # IPluginV3OneCore

        @reported
        def get_capability_interface(self, kind: Any) -> Any:
            return self

        @reported
        def clone(self) -> CustomOperation:
            return CustomOperation(self.fields)

        # IPluginV3OneBuildV2

        @reported
        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            return [tensorrt.data_type(_dtype(one)) for one in self._outputs]

        @reported
        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            shapes = []
            for output in self._outputs:
                if output.alias is not None:
                    shapes.append(trt.DimsExprs(inputs[output.alias]))
                    continue
                batch_and_width = iter(self._sizes_of_step(inputs))
                shapes.append(trt.DimsExprs([next(batch_and_width) if size < 0 else builder.constant(size) for size in output.shape]))
            return shapes

        def _sizes_of_step(self, inputs: Sequence[Any]) -> list[Any]:
            """Return the sizes that are -1 in the input with most of them: slots, and new tokens per slot."""
            unknown = [[size for size, known in zip(dims, one.shape, strict=True) if known < 0] for dims, one in self._pairs(inputs)]
            return max(unknown, key=len)

        def _pairs(self, inputs: Sequence[Any]) -> list[tuple[Any, TensorType]]:
            return list(zip(inputs, self.fields.inputs, strict=True))

        @reported
        def get_aliased_input(self, output: int) -> int:
            alias = self._outputs[output].alias
            return -1 if alias is None else alias

        @reported
        def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            desc = tensors[position].desc
            return bool(desc.format == trt.TensorFormat.LINEAR and desc.type == tensorrt.data_type(_dtype(self._type_at(position))))

        def _type_at(self, position: int) -> TensorType:
            return (*self.fields.inputs, *self._outputs)[position]

        @reported
        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            for dims in ([one.min for one in inputs], [one.max for one in inputs]):
                self._op.outputs(self._types(dims))

        @reported
        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return self._op.workspace_nbytes(self._types([one.max for one in inputs]))

        def _types(self, dims: Sequence[Any]) -> list[TensorType]:
            """Return the types of inputs of these sizes, as the operation sees them."""
            return [
                TensorType(unpacked_shape(tuple(sizes)) if is_packed_as_int32(one) else tuple(sizes), one.dtype)
                for sizes, one in self._pairs(dims)
            ]

        # IPluginV3OneRuntime

        @reported
        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._prepared = None
            self._op.outputs(self._types([one.dims for one in inputs]))

        @reported
        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self._prepared is None:
                self._prepared = OperationEnqueue(self._op, self._types([one.dims for one in input_desc]), current_memory())
            self._prepared.run(inputs, outputs, workspace, stream)

        @reported
        def attach_to_context(self, context: Any) -> CustomOperation:
            return CustomOperation(self.fields)

        @reported
        def set_tactic(self, tactic: int) -> None:
            """Do nothing: there is one tactic."""

        @reported
        def get_fields_to_serialize(self) -> Any:
            if self._stored_fields is None:  # as in KVCacheAttention, of the C++ class, and kept
                kinds, arrays = trt.PluginFieldType, self._field_arrays
                stored = [trt.PluginField(name, array, getattr(kinds, OPERATION_FIELD_TYPES[name])) for name, array in arrays.items()]
                self._stored_fields = trt.PluginFieldCollection(stored)
                self._stored_struct = trt.PluginFieldCollection_(self._stored_fields)
            return self._stored_struct

    return CustomOperation


@cache
def register_operations(tensorrt: TensorRT) -> Any:
    """Register the plugin with TensorRT's plugin registry: before a network uses it, and before an engine that has it is opened."""
    plugin, trt = operation_plugin_class(tensorrt), tensorrt.module

    class CustomOperationCreator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = OPERATION_PLUGIN_NAME, OPERATION_PLUGIN_VERSION, PLUGIN_NAMESPACE
            empty, kinds = np.empty(0), trt.PluginFieldType
            names = [trt.PluginField(name, empty, getattr(kinds, kind)) for name, kind in OPERATION_FIELD_TYPES.items()]
            self.field_names = trt.PluginFieldCollection(names)

        @reporter(tensorrt, OPERATION_PLUGIN_NAME)
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            return plugin(OperationFields.from_plugin_fields(fields))

    creator = CustomOperationCreator()
    if not trt.get_plugin_registry().register_creator(creator, PLUGIN_NAMESPACE):
        raise EngineError(f"{OPERATION_PLUGIN_NAME} {OPERATION_PLUGIN_VERSION}: {tensorrt} has a creator of this name that is not ours.")
    return creator


def as_plugin_input(one: TensorType) -> TensorType:
    """Return an input as a plugin layer takes it: 8-bit values packed as int32."""
    return TensorType(packed_shape(one.shape), "int32") if is_packed_as_int32(one) else one


def _dtype(one: TensorType) -> str:
    """Return the dtype of a tensor as TensorRT sees it."""
    return as_plugin_input(one).dtype
