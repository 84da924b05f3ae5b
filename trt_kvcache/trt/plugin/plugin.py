"""The plugin class, derived from the plugin interfaces of the TensorRT that was imported."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from trt_kvcache.ops.attention_attributes import QUANTIZED_ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.enqueue import PluginEnqueue, current_memory
from trt_kvcache.trt.plugin.plugin_tensors import check_dtypes, check_shapes, input_names, inputs_of, outputs_of
from trt_kvcache.trt.plugin.reported import reporter
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, check_plugins, needs_extra_reference, never_free, plugin_version


def _sizes(dims: Any) -> tuple[int | None, ...]:
    """Return the sizes of a ``Dims``; None for -1."""
    return tuple(None if size < 0 else int(size) for size in dims)


@cache
def plugin_class(tensorrt: TensorRT) -> Any:
    """Return the class of the plugin, for full TensorRT from 10.3 on and for RTX; the same class at every call."""
    check_plugins(tensorrt)
    trt, reported = tensorrt.module, reporter(tensorrt)

    class KVCacheAttention(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc, name-defined]
        """Attention over a combined cache as an ``IPluginV3``, with the methods that TensorRT calls."""

        def __init__(self, attributes: AttentionAttributes) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = PLUGIN_NAME, plugin_version(attributes), PLUGIN_NAMESPACE
            self.attributes = attributes
            self._inputs, self._outputs = inputs_of(attributes), outputs_of(attributes)
            self.num_outputs = len(self._outputs)
            self._field_arrays = attributes.plugin_field_arrays()  # the plugin fields point into them
            self._stored_fields: Any = None
            self._stored_struct: Any = None
            self._prepared: PluginEnqueue | None = None
            if needs_extra_reference(tensorrt):
                never_free(self)

        # IPluginV3OneCore

        @reported
        def get_capability_interface(self, kind: Any) -> Any:
            return self

        @reported
        def clone(self) -> KVCacheAttention:
            return KVCacheAttention(self.attributes)

        # IPluginV3OneBuildV2

        @reported
        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            names = input_names(self.attributes, len(input_types))
            check_dtypes(self.attributes, dict(zip(names, map(tensorrt.dtype_name, input_types), strict=True)))
            return [input_types[names.index(like)] for like, _ in self._outputs.values()]

        @reported
        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            names = input_names(self.attributes, len(inputs))
            known = [[size.get_constant_value() if size.is_constant() else None for size in shape] for shape in inputs]
            check_shapes(self.attributes, dict(zip(names, known, strict=True)))
            return [trt.DimsExprs(inputs[names.index(like)]) for like, _ in self._outputs.values()]

        @reported
        def get_aliased_input(self, output: int) -> int:
            like, aliased = tuple(self._outputs.values())[output]
            return tuple(self._inputs).index(like) if aliased else -1

        @reported
        def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            names = (*input_names(self.attributes, num_inputs), *(like for like, _ in self._outputs.values()))
            desc = tensors[position].desc
            if desc.format != trt.TensorFormat.LINEAR:
                return False
            expected = self._inputs[names[position]][1]
            if position == 0:
                return desc.type in (trt.DataType.HALF, trt.DataType.BF16)
            return bool(desc.type == (tensors[0].desc.type if expected == "q" else tensorrt.data_type(expected)))

        @reported
        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            names = input_names(self.attributes, len(inputs))
            check_dtypes(self.attributes, {name: tensorrt.dtype_name(one.desc.type) for name, one in zip(names, inputs, strict=True)})
            for dims in ([one.min for one in inputs], [one.max for one in inputs]):
                check_shapes(self.attributes, dict(zip(names, map(_sizes, dims), strict=True)))

        @reported
        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return workspace_nbytes(self.attributes)

        # IPluginV3OneRuntime

        @reported
        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._prepared = None
            self._read_inputs(inputs)

        def _read_inputs(self, inputs: Sequence[Any]) -> tuple[str, dict[str, Any]]:
            """Return the dtype of q, and the shapes of the inputs by name, both checked."""
            names = input_names(self.attributes, len(inputs))
            dtypes = {name: tensorrt.dtype_name(one.type) for name, one in zip(names, inputs, strict=True)}
            dtype = check_dtypes(self.attributes, dtypes)
            shapes = {name: _sizes(one.dims) for name, one in zip(names, inputs, strict=True)}
            check_shapes(self.attributes, shapes)
            return dtype, shapes

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
                self._prepared = PluginEnqueue(self.attributes, *self._read_inputs(input_desc), current_memory())
            self._prepared.run(inputs, outputs, workspace, stream)

        @reported
        def attach_to_context(self, context: Any) -> KVCacheAttention:
            return KVCacheAttention(self.attributes)

        @reported
        def set_tactic(self, tactic: int) -> None:
            """Do nothing: there is one tactic."""

        @reported
        def get_fields_to_serialize(self) -> Any:
            # TensorRT calls this from its own threads and dereferences the pointer that it gets. There a list is not converted,
            # and a result that nobody keeps is gone: so it is the C++ class itself, which points into the list, and the plugin keeps both.
            if self._stored_fields is None:
                kinds, arrays = trt.PluginFieldType, self._field_arrays
                stored = [trt.PluginField(name, array, getattr(kinds, QUANTIZED_ATTRIBUTE_TYPES[name])) for name, array in arrays.items()]
                self._stored_fields = trt.PluginFieldCollection(stored)
                self._stored_struct = trt.PluginFieldCollection_(self._stored_fields)
            return self._stored_struct

    return KVCacheAttention
