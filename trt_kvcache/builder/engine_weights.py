"""``EngineWeights``: sizes of the weights of an engine, in its plan and in the memory of the host that builds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trt_kvcache.dtypes import itemsize
from trt_kvcache.model import AttentionConfig, ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, PER_LAYER_PROJECTION, embedding_name, embedding_tables, tensor_shapes
from trt_kvcache.model.weight_parts import exact_tensors, expert_tensors, layer_parts

#: Host memory of Python with TensorRT loaded after a build, and additional memory for each layer of a network.
_HOST, _HOST_PER_LAYER = 215_000_000, 9_300_000

#: Copies of the weights on the host when the plan is complete: pages of the checkpoint (or converted, packed), TensorRT, the plan.
_COPIES = 3.09

#: Bytes for each value of an int4 matrix while TensorRT packs it: the widened and the packed values. One matrix at a time, before
#: there is a plan, and before dense weights are copied.
_WIDENED_INT4 = 2.9

#: Copies of the weights of a segment in TensorRT while it builds it.
_COPIES_OF_SEGMENT = 1.3

#: Bytes for each element of a quantized embedding while it is written as a constant: the quantized value, float32, and 16 bits.
_DEQUANTIZED = 7.1


@dataclass(frozen=True)
class PackedBytes:
    """A packed weight in an engine."""

    nbytes: int  # of values and scales
    type: str  # dtype of the values in TensorRT


@dataclass(frozen=True)
class EngineWeights:
    """Sizes of the weights of an engine, in the plan and in the memory of the host during the build."""

    model: ModelConfig
    sizes: Mapping[str, int]  # bytes of each weight
    packed: Mapping[str, PackedBytes]  # weights that are packed in the plan
    constants: Mapping[str, PackedBytes | None]  # weights next to the plan; None if they are dense
    has_plugin_layers: bool  # TensorRT then stores no weight twice

    @classmethod
    def of(
        cls, model: ModelConfig, packed: Mapping[str, PackedBytes], dtype: str, *, segmented: bool, has_plugin_layers: bool
    ) -> EngineWeights:
        """Return the weights of an engine. In segments, embedding tables are constants next to the plan."""
        constants = {name: packed.get(name) for name in embedding_tables(model)} if segmented else {}
        in_plan = {name: one for name, one in packed.items() if name not in constants}
        exact = exact_tensors(model)  # of routers
        dense = {name: math.prod(shape) * itemsize("float32" if name in exact else dtype) for name, shape in tensor_shapes(model).items()}
        return cls(model, dense | {name: one.nbytes for name, one in in_plan.items()}, in_plan, constants, has_plugin_layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return sum(self.sizes.values())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the weights that are not packed."""
        return self.nbytes - sum(one.nbytes for one in self.packed.values())

    @property
    def plan_nbytes(self) -> int:
        """Bytes of the weights in the plan."""
        return self.nbytes - sum(self.sizes[name] for name in self.constants) + self._transposed_nbytes

    @property
    def _transposed_nbytes(self) -> int:
        """Bytes of the second copy of a tied embedding in 8 bits: the lookup takes rows, the product columns. int4 takes rows twice."""
        embedding = self.packed.get(embedding_name(self.model))
        is_stored_once = self.has_plugin_layers or not self.model.tie_word_embeddings
        return 0 if embedding is None or is_stored_once or embedding.type == "int4" else embedding.nbytes

    def peak_of_one_network(self) -> float:
        """Return the peak memory of the host: when the plan is complete, or while the largest int4 matrix is packed."""
        shapes = tensor_shapes(self.model)
        widened = max((math.prod(shapes[name]) for name, one in self.packed.items() if one.type == "int4"), default=0)
        dense, packed = self.dense_nbytes, self.nbytes - self.dense_nbytes
        at_the_plan = _COPIES * dense + 2 * self._transposed_nbytes  # in TensorRT and in the plan
        at_packing = dense + _WIDENED_INT4 * widened
        stacked = sum(
            self.sizes[name] for name in expert_tensors(self.model) - self.packed.keys()
        )  # of all experts of a layer in one array
        return _HOST + self.model.num_layers * _HOST_PER_LAYER + _COPIES * packed + max(at_the_plan, at_packing) + stacked

    def peak_of_segments(self, plan: int) -> float:
        """Return the peak memory of the host for a plan of this size.

        It is reached when the largest segment is built, the checkpoint is hashed, or constants are written.
        """
        next_to_plan = sum(self.sizes[name] for name in self.constants)
        built = _COPIES_OF_SEGMENT * self._largest_segment_nbytes
        hashed = sum(self.sizes[name] for name, one in self.constants.items() if one is None)
        shapes = tensor_shapes(self.model)
        written = _DEQUANTIZED * sum(math.prod(shapes[name]) for name, one in self.constants.items() if one is not None)
        return _HOST + plan + self.nbytes - next_to_plan + max(built, hashed, written)

    @property
    def _largest_segment_nbytes(self) -> int:
        """Bytes of the largest segment: an attention layer and the layers after it up to the next one; the last has the head."""
        segments = [self.sizes.get(PER_LAYER_PROJECTION, 0)]
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer.mixer, AttentionConfig):
                segments.append(0)
            segments[-1] += sum(self.sizes[name] for name in {part.tensor for part in layer_parts(self.model, index).values()})
        segments[-1] += 0 if self.model.tie_word_embeddings else self.sizes[HEAD]
        return max(segments)
