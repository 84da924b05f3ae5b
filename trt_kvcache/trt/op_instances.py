"""The custom operations of an engine in segments, and the workspaces that they work in."""

from collections.abc import Mapping, Sequence
from typing import Any

from trt_kvcache.engine.decoder_tensors import shape_at
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.segments import CustomOpNode, Stage
from trt_kvcache.trt.engine_resources import EngineResources


class OpInstances:
    """One operation for all nodes of the same kind and attributes, and one workspace for all operations of the same name."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        tensors: Mapping[str, TensorSpec],
        profiles: Sequence[EngineProfile],
        resources: EngineResources,
        stream: Any,
    ) -> None:
        self._ops: dict[tuple[str, str], CustomOp] = {}
        nbytes_by_name: dict[str, int] = {}
        for node in stages:
            if not isinstance(node, CustomOpNode):
                continue
            op = self._ops.get(_key(node))
            if op is None:
                op = self._ops[_key(node)] = node.create_op()
            for profile in profiles:
                sizes = (profile.max_batch, profile.max_width)
                types = [TensorType(shape_at(tensors[name].shape, *sizes), tensors[name].dtype) for name in node.inputs]
                nbytes_by_name[op.name] = max(nbytes_by_name.get(op.name, 0), op.workspace_nbytes(types))
        self._workspaces = {
            name: DeviceTensor(resources.allocate(nbytes, stream=stream, zeroed=True), shape=(nbytes,), dtype="uint8")
            for name, nbytes in nbytes_by_name.items()
        }

    def op(self, node: CustomOpNode) -> CustomOp:
        """Return the operation of a node."""
        return self._ops[_key(node)]

    def workspace(self, op: CustomOp) -> DeviceTensor:
        """Return the workspace of an operation."""
        return self._workspaces[op.name]


def _key(node: CustomOpNode) -> tuple[str, str]:
    return node.operation, repr(sorted(node.attributes.items()))
