"""The plugin as a class of an imported TensorRT."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.ops.attention_shapes import INPUTS, OUTPUTS, check_dtypes, check_shapes, input_names, workspace_nbytes
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.enqueue import PluginEnqueue, current_memory
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, check_plugins

_INPUT_NAMES = tuple(INPUTS)


def _sizes(dims: Any) -> tuple[int | None, ...]:
    return tuple(None if size < 0 else int(size) for size in dims)


@cache
def plugin_class(tensorrt: TensorRT) -> Any:
    """Return the class of the plugin: ``plugin_class(tensorrt)(fields)`` goes to ``INetworkDefinition.add_plugin_v3``.

    Raises
    ------
    EngineError
        This TensorRT has no plugins with aliased outputs.
    """
    check_plugins(tensorrt)
    trt = tensorrt.module

    class KVCacheAttention(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):  # type: ignore[misc, name-defined]
        """RoPE, append and attention over the combined cache. What TensorRT calls, in the words of its documentation."""

        def __init__(self, fields: AttentionAttributes) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE
            self.num_outputs = len(OUTPUTS)
            self.fields = fields
            self._arrays = fields.plugin_field_arrays()  # plugin fields point into them
            self._step: PluginEnqueue | None = None

        # --- core ---

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> KVCacheAttention:
            return KVCacheAttention(self.fields)

        # --- build ---

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            names = input_names(self.fields, len(input_types))
            check_dtypes(dict(zip(names, map(tensorrt.dtype_name, input_types), strict=True)))
            return [input_types[0]] * len(OUTPUTS)

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            names = input_names(self.fields, len(inputs))
            known = [[size.get_constant_value() if size.is_constant() else None for size in shape] for shape in inputs]
            check_shapes(self.fields, dict(zip(names, known, strict=True)))
            return [trt.DimsExprs(inputs[names.index(like)]) for like, _ in OUTPUTS.values()]

        def get_aliased_input(self, output: int) -> int:
            like, aliased = tuple(OUTPUTS.values())[output]
            return _INPUT_NAMES.index(like) if aliased else -1

        def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
            names = (*input_names(self.fields, num_inputs), *(like for like, _ in OUTPUTS.values()))
            desc = tensors[position].desc
            if desc.format != trt.TensorFormat.LINEAR:
                return False
            expected = INPUTS[names[position]][1]
            if position == 0:
                return desc.type in (trt.DataType.HALF, trt.DataType.BF16)
            return bool(desc.type == (tensors[0].desc.type if expected == "q" else tensorrt.data_type(expected)))

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            names = input_names(self.fields, len(inputs))
            check_dtypes({name: tensorrt.dtype_name(one.desc.type) for name, one in zip(names, inputs, strict=True)})
            for dims in ([one.min for one in inputs], [one.max for one in inputs]):
                check_shapes(self.fields, dict(zip(names, map(_sizes, dims), strict=True)))

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return workspace_nbytes(self.fields, width=int(inputs[0].min[1]))

        # --- runtime ---

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._step = None
            self._read(inputs)

        def _read(self, inputs: Sequence[Any]) -> tuple[str, dict[str, Any]]:
            """Return the dtype of q and the shapes of the inputs, checked."""
            names = input_names(self.fields, len(inputs))
            dtype = check_dtypes({name: tensorrt.dtype_name(one.type) for name, one in zip(names, inputs, strict=True)})
            shapes = {name: _sizes(one.dims) for name, one in zip(names, inputs, strict=True)}
            check_shapes(self.fields, shapes)
            return dtype, shapes

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self._step is None:
                self._step = PluginEnqueue(self.fields, *self._read(input_desc), current_memory())
            self._step.run(inputs, outputs, workspace, stream)

        def attach_to_context(self, context: Any) -> KVCacheAttention:
            return self.clone()

        def set_tactic(self, tactic: int) -> None:
            """Do nothing: there is one way to do it for each shape."""

        def get_fields_to_serialize(self) -> Any:
            kinds = trt.PluginFieldType
            return trt.PluginFieldCollection(
                [trt.PluginField(name, array, getattr(kinds, ATTRIBUTE_TYPES[name])) for name, array in self._arrays.items()]
            )

    return KVCacheAttention
