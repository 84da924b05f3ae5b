"""``v_outputs``: the V of each attention plugin layer as an output of the engine, which nobody reads.

On Thor, with TensorRT 10.13, TensorRT Edge-LLM found that the projection of V was right, and the rows of V after its plugin were wrong.
With V marked as an output the rows were right (TensorRT-Edge-LLM, issue 151).
"""

from collections.abc import Sequence

from trt_kvcache.engine.decoder_tensors import shape_at
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine_folder.decoder_segments import attention_tensor_names
from trt_kvcache.memory.shapes import align_up, dense_nbytes
from trt_kvcache.model import ModelConfig


def v_output_name(layer: int) -> str:
    """Return the name of a layer's V ``[B, s, heads, D]``, as between segments."""
    return attention_tensor_names(layer)[2]


def v_outputs(model: ModelConfig, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the V of each layer that stores K and V, in the dtype of computation."""
    return tuple(
        TensorSpec.output(v_output_name(index), (-1, -1, mixer.num_kv_heads, mixer.head_dim), dtype)
        for index, mixer in zip(model.kv_indices, model.kv_layers, strict=True)
    )


def v_output_nbytes(specs: Sequence[TensorSpec], profiles: Sequence[EngineProfile]) -> tuple[int, ...]:
    """Return the bytes of memory of each of them, in the largest enqueue and up to the next aligned address."""
    # Layers do not share memory, although a V is not needed after its own layer: TensorRT may compute V elsewhere, and copy it to an
    # output that nobody reads as late as it likes, then over the V of a later layer.
    largest = (max(dense_nbytes(shape_at(spec.shape, one.max_batch, one.max_width), spec.dtype) for one in profiles) for spec in specs)
    return tuple(map(align_up, largest))
