"""The stages of an engine in segments: TensorRT engines, and the custom operations between them.

With ``plugin_layers="segments"`` a network is cut at each attention over the combined cache, and at each registered operation. The network
between two cuts is a segment, which is built as a separate TensorRT engine. Segments and operations are the stages of the engine; they run
one after another on one stream, and are connected by the names of their tensors, as the nodes of an ONNX graph are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.registry import create_operation, is_user_operation


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stage that is a TensorRT engine."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class CustomOpNode:
    """A stage that is a :class:`~trt_kvcache.ops.custom_op.CustomOp`."""

    operation: str  # registered name: see trt_kvcache.ops.registry
    attributes: Mapping[str, int | float]
    inputs: tuple[str, ...]  # names, in the order of the operation
    outputs: tuple[str, ...]

    def create_op(self) -> CustomOp:
        """Create the operation with these attributes."""
        return create_operation(self.operation, self.attributes)


Stage = Segment | CustomOpNode


def can_replace(stage: Stage, expected: Stage) -> bool:
    """Return whether a stage equals the expected one, or is a registered operation with the same inputs and outputs."""
    if isinstance(stage, CustomOpNode) and isinstance(expected, CustomOpNode) and is_user_operation(stage.operation):
        return (stage.inputs, stage.outputs) == (expected.inputs, expected.outputs)
    return stage == expected


def intermediate_tensors(stages: Sequence[Stage], external: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors that one stage writes and a later one reads; ``external`` are inputs, outputs and constants."""
    known = {spec.name: spec for spec in external}
    intermediates: dict[str, TensorSpec] = {}
    for stage in stages:
        if isinstance(stage, Segment):
            outputs = {spec.name: spec for spec in stage.tensors if spec.mode is TensorMode.OUTPUT}
        else:
            types = [TensorType(known[name].shape, known[name].dtype) for name in stage.inputs]
            results = zip(stage.outputs, stage.create_op().outputs(types), strict=True)
            outputs = {name: TensorSpec.output(name, output.shape, output.dtype) for name, output in results}
        intermediates.update({name: spec for name, spec in outputs.items() if name not in known})
        known.update(intermediates)
    return intermediates
