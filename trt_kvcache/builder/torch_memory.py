"""``TorchMemory``: GPU memory of a session with the PyTorch engine, for models that TensorRT's networks do not compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_nbytes, rounding_schemes
from trt_kvcache.checkpoint.quantized.table_blocks import table_blocks
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.adapter_inputs import AdapterInputs, padded_rank
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.hidden_tensors import hidden_states_nbytes
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, supports_attention
from trt_kvcache.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RoutedMlpConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING, embedding_tables, shared_tensors, tensor_shapes
from trt_kvcache.model.weight_parts import exact_tensors, expert_tensors

#: Kinds of quantized values that the engine keeps packed, and the largest share that its layout adds to them.
_PACKED_KINDS, _PADDING = frozenset({"int4", "uint4", "int8", "uint8", "e4m3"}), 0.03

#: Bits of a weight in blocks of GGUF that the kernels of this package read packed: as in the file, and those of int8 for Q5_0.
BLOCK_BITS = {"Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q5_0": 8.5}

#: FP4 is kept packed in these formats, by their titles; in the second one not in matrices with factors of inputs.
_MXFP4, _NVFP4, _FACTORS = "MXFP4", "NVFP4", "AWQ"

#: Part of the title of formats with act-order, in which weights of experts are not kept packed.
_ACT_ORDER = "act-order"

#: The workspace for dequantized weights; the share of the GPU that CUDA graphs may take; tensors of a layer, in rows of its widest one.
_WORKSPACE_NBYTES, _GRAPHS, _TENSORS_PER_ROW = 64 << 20, 1 / 32, 3


@dataclass(frozen=True)
class TorchMemory:
    """A model, and the bytes of the weights that stay packed; all others are in the dtype of the computation."""

    model: ModelConfig
    packed: Mapping[str, float]
    adapters: AdapterInputs | None = None  # ranks of the adapters next to the weights
    on_host: frozenset[str] = frozenset()  # names of tables in host memory
    head: TorchMemory | None = None  # its draft head

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        adapters_rank: int | None = None,
        has_host_table: bool = False,
        head: Checkpoint | None = None,
    ) -> TorchMemory:
        """Read a checkpoint, and that of its draft head; no weights are read. ``has_host_table``: per-layer embeddings in host memory."""
        title = checkpoint.weights.format
        is_mxfp4, is_nvfp4 = _MXFP4 in title.upper(), _NVFP4 in title.upper() and _FACTORS not in title
        kinds = checkpoint.value_kinds & (_PACKED_KINDS | ({"e2m1"} if is_mxfp4 or is_nvfp4 else set()))
        names = {name for kind in kinds for name in checkpoint.names_of_kind(kind)}
        if _ACT_ORDER in title:
            names -= expert_tensors(checkpoint.config)
        has_rows = checkpoint.config.per_layer_embedding is not None and table_blocks(checkpoint, PER_LAYER_EMBEDDING) is not None
        matrices = _matrices(checkpoint.config)
        packed = matrices & names | ({PER_LAYER_EMBEDDING} if has_rows else set())
        adapters = None if adapters_rank is None else AdapterInputs.of(checkpoint.config, rank=padded_rank(adapters_rank))
        on_host = frozenset({PER_LAYER_EMBEDDING} if has_host_table else ())
        shapes, types = tensor_shapes(checkpoint.config), {name: checkpoint.block_type(name) for name in matrices}
        sizes: dict[str, float] = {name: checkpoint.nbytes_of(name) for name in packed}
        sizes |= {name: math.prod(shapes[name]) * BLOCK_BITS[kind] / 8 for name, kind in types.items() if kind in BLOCK_BITS}
        return cls(checkpoint.config, sizes, adapters, on_host, None if head is None else cls.of(head))

    def rounded(self, quantize: str) -> TorchMemory:
        """Return the same model with weights rounded to ``quantize``."""
        shapes, schemes = tensor_shapes(self.model), rounding_schemes(self.model, Quantization.parse(quantize))
        names = _matrices(self.model) & schemes.keys()
        sizes = {name: rounded_nbytes((shapes[name][0], shapes[name][1]), schemes[name], self.model.dtype) for name in names}
        head = self.head.rounded(quantize) if self.head is not None and self.head.model.eagle3_input is None else self.head
        return replace(self, packed=sizes, head=head)

    def weights_nbytes(self, dtype: str) -> int:
        """Return the bytes of weights on the GPU, without those that a draft head shares; routers in float32. In float32 none is packed."""
        exact, packed = exact_tensors(self.model), self.packed if dtype in ELEMENT_TYPES else {}
        return round(
            sum(
                packed[name] * (1 + _PADDING) if name in packed else math.prod(shape) * itemsize("float32" if name in exact else dtype)
                for name, shape in tensor_shapes(self.model).items()
                if name not in self.on_host and name not in shared_tensors(self.model)
            )
        )

    def cache_for(self, slots: int, length: int, dtype: str, quantized: QuantizedKV | None) -> DecoderCacheConfig | None:
        """Return the cache; None if the attention kernels, which alone read quantized K and V on a GPU, do not support the model."""
        known = dtype in ELEMENT_TYPES and all(map(supports_attention, self.model.attention_layers))
        if quantized is not None and not known:
            return None
        sizes = {"max_batch_size": slots, "max_sequence_length": length}
        return decoder_cache_config(self.model, **sizes, dtype=dtype, attention="plugin", quantized=quantized)

    def device_nbytes(self, cache: DecoderCacheConfig, dtype: str, *, max_prefill_length: int, gpu_nbytes: int) -> int:
        """Return the bytes of a session: weights, adapters, cache, draft head, largest step, logits, workspace, and graphs."""
        slots = cache.max_batch_size
        step = _TENSORS_PER_ROW * slots * max_prefill_length * max(map(_widest, self.model.layers)) * itemsize(dtype)
        logits = slots * self.model.vocab_size * itemsize("float32")
        workspace = _WORKSPACE_NBYTES if self.packed else 0
        adapters = 0 if self.adapters is None else self.adapters.nbytes(self.model, dtype)
        head = 0 if self.head is None else self._head_nbytes(self.head, cache, dtype, max_prefill_length=max_prefill_length)
        return self.weights_nbytes(dtype) + adapters + cache.nbytes + step + logits + workspace + head + round(gpu_nbytes * _GRAPHS)

    def _head_nbytes(self, head: TorchMemory, cache: DecoderCacheConfig, dtype: str, *, max_prefill_length: int) -> int:
        """Return the bytes of a draft head, which shares tensors with the model, and those of hidden states."""
        sizes = {"max_prefill_length": max_prefill_length, "max_sequence_length": cache.max_sequence_length}
        states = hidden_states_nbytes(self.model, head.model, slots=cache.max_batch_size, dtype=dtype, **sizes)
        length = min(cache.max_sequence_length, head.model.max_position_embeddings)
        of_head = head.cache_for(cache.max_batch_size, length, dtype, None)
        assert of_head is not None, "K and V are not quantized"
        return states + head.device_nbytes(of_head, dtype, max_prefill_length=min(max_prefill_length, length), gpu_nbytes=0)


def _matrices(model: ModelConfig) -> set[str]:
    """Return the names of the matrices that the engine may keep packed: no embedding."""
    others = {*embedding_tables(model), *exact_tensors(model)}
    return {name for name, shape in tensor_shapes(model).items() if len(shape) == 2} - others


def _widest(layer: LayerConfig) -> int:
    """Return the elements of a token at the widest point of a layer; of experts, those of all that it has chosen."""
    widths = [0]
    if isinstance(layer.mixer, AttentionConfig):
        heads = layer.mixer.num_heads * (2 if layer.mixer.output_gate else 1) + 2 * layer.mixer.num_kv_heads
        widths.append(heads * layer.mixer.head_dim)
    if layer.recurrence is not None:
        widths.append(5 * layer.recurrence.channels)
    if isinstance(layer.mlp, MlpConfig):
        widths.append(_inner(layer.mlp))
    elif isinstance(layer.mlp, RoutedMlpConfig):
        widths.append(layer.mlp.router.experts_per_token * _inner(layer.mlp.expert))
    return max(widths)


def _inner(mlp: MlpConfig) -> int:
    return mlp.intermediate_size * (2 if mlp.gated else 1)
