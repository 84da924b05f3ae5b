"""``estimate_build``: sizes of an engine and memory of its build, in bytes, before the build starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trt_kvcache.builder.capable_gpus import have_fp4
from trt_kvcache.builder.checked_build import CheckedBuild, checked_build
from trt_kvcache.builder.engine_weights import EngineWeights, PackedBytes
from trt_kvcache.builder.network.packed_products import product_tensors
from trt_kvcache.builder.network.packed_weight import CONSTANT_TYPES, NATIVE_TYPES
from trt_kvcache.builder.network.selective_scan import CHUNK_TOKENS
from trt_kvcache.builder.options import BuildKeywords, BuildOptions, takes_build_options
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.torch_memory import BLOCK_BITS
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized.quantization import SCHEMES, Quantization
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_nbytes, rounding_schemes
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.hidden_tensors import hidden_states_nbytes
from trt_kvcache.engine_folder.decoder_segments import decoder_constants
from trt_kvcache.engine_folder.v_outputs import v_output_nbytes, v_outputs
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RoutedMlpConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, RecurrentConfig
from trt_kvcache.model.tensor_shapes import embedding_tables, tensor_shapes
from trt_kvcache.model.weight_parts import expert_tensors
from trt_kvcache.ops.expert_attributes import ExpertAttributes
from trt_kvcache.ops.experts_op import ExpertsOp

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The type in TensorRT of packed weights that are bytes of a plugin layer, such as those of experts.
BYTES = "int32"

#: Bytes of compiled kernels in the plan: once if there is attention, for each layer, and for each one of an engine in segments.
_KERNELS, _KERNELS_PER_LAYER, _KERNELS_PER_SEGMENT = 2_500_000, 1_050_000, 2_100_000

#: The same of layers with packed weights, whose products are other kernels.
_KERNELS_PER_PACKED_LAYER, _KERNELS_PER_PACKED_SEGMENT = 1_450_000, 1_400_000

#: The same for each layer whose soft-capped scores are built from plain layers.
_KERNELS_PER_CAPPED_LAYER = 1_500_000

#: The same for each layer whose states go from token to token, by the kind of its mixer.
_KERNELS_PER_SCAN = {"mamba2": 2_000_000, "gated_delta_net": 4_800_000}

#: The same of the third profile, which an engine with the logits of more tokens has: once and for each layer, in one piece and in segments.
_VERIFY_KERNELS = (2_250_000, 630_000)
_VERIFY_KERNELS_IN_SEGMENTS = (520_000, 1_050_000)


@dataclass(frozen=True, kw_only=True)
class BuildEstimate:
    """Bytes of a build and of the engine that it makes.

    Parameters
    ----------
    weights_nbytes : int
        Weights of the model in the dtype of the engine, or packed.
    plan_nbytes : int
        The serialised engine: weights and compiled kernels, and a plugin library.
    constants_nbytes : int
        Constants of an engine in segments: embedding tables, cosines and sines. 0 for other engines.
    cache_nbytes : int
        K, V and states as allocated. Exact.
    activations_nbytes : int
        Activations and logits of the largest enqueue, from the shapes of the network: TensorRT may need more or less. With GQA and native
        attention of TensorRT for RTX, the prefill copies K and V of all rows for each query head: the copies are included. So is the
        memory of ``v_outputs``.
    adapters_nbytes : int
        The inputs for adapters: A and B for ``adapters_rank`` ranks. 0 for a build without.
    embeddings_nbytes : int
        The input for rows in place of rows of the embedding (``max_embeddings``). 0 for a build without.
    host_peak_nbytes : int
        Most memory of the host during the build.
    hidden_states_nbytes : int
        Hidden states that a draft head reads: those of all tokens in the cache, and those of an enqueue. 0 for a build without
        ``draft_head``.
    draft_head : BuildEstimate or None
        The engine of the draft head, and its cache.

    See Also
    --------
    trt_kvcache.BuildReport : Sizes and memory of a build that was done.
    """

    weights_nbytes: int
    plan_nbytes: int
    constants_nbytes: int
    cache_nbytes: int
    activations_nbytes: int
    adapters_nbytes: int
    embeddings_nbytes: int
    host_peak_nbytes: int
    hidden_states_nbytes: int = 0
    draft_head: BuildEstimate | None = None

    @property
    def device_nbytes(self) -> int:
        """GPU memory of a session with this engine: plan, constants, cache, activations, inputs of its own, and draft head."""
        inputs = self.adapters_nbytes + self.embeddings_nbytes + self.hidden_states_nbytes
        own = self.plan_nbytes + self.constants_nbytes + self.cache_nbytes + self.activations_nbytes + inputs
        return own + (0 if self.draft_head is None else self.draft_head.device_nbytes)

    @property
    def disk_nbytes(self) -> int:
        """The engine folder, without a copy of the checkpoint."""
        return self.plan_nbytes + self.constants_nbytes + (0 if self.draft_head is None else self.draft_head.disk_nbytes)


@takes_build_options
def estimate_build(model_path: str | os.PathLike[str], **options: Unpack[BuildKeywords]) -> BuildEstimate:
    """Estimate the sizes and the memory of a build, after the checks of ``build_engine``. TensorRT is not needed.

    Names, shapes and dtypes of the weights are read. A folder with ``config.json`` alone is enough where weights are not stored
    quantized.

    Parameters
    ----------
    model_path : path
        A Hugging Face folder.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`, as for :func:`~trt_kvcache.build_engine`.

    Returns
    -------
    BuildEstimate
        The weights, and K, V and states, are exact. Plan and peak were within 10 % of the builds of ``benchmarks/build_estimate.py``:
        TensorRT for RTX 1.7, all its GPUs, Linux, models without states, with dense weights and rounded ones. The plan of a small model is
        mostly kernels, and less certain. Activations are not measured.

    Raises
    ------
    ConfigError, CheckpointError
        As ``build_engine`` does before it reads weights. Checks that need TensorRT are made where it is installed.

    Examples
    --------
    >>> from trt_kvcache import estimate_build
    >>> estimate = estimate_build("examples/tiny-llama", max_batch_size=4, max_sequence_length=256)
    >>> estimate.cache_nbytes, estimate.weights_nbytes
    (262144, 60736)
    """
    with closing(checked_build(model_path, None, BuildOptions.of(options), dry_run=True)) as checked:
        return estimate_checked(checked)


def estimate_checked(checked: CheckedBuild) -> BuildEstimate:
    """Estimate a build that was checked."""
    options = checked.options
    has_fp4 = have_fp4(options.compute_capabilities, is_rtx=options.flavour != "tensorrt")
    head = None if checked.draft_head is None else checked.draft_head.checkpoint
    source = PackedModel.of(checked.checkpoint, has_fp4=has_fp4, packed_kernels=options.packed_kernels, head=head)
    return source.estimate(options, checked.cache)


@dataclass(frozen=True)
class PackedModel:
    """A model and the bytes of its packed weights: all that an estimate needs of a checkpoint."""

    model: ModelConfig
    packed: Mapping[str, PackedBytes]
    head: PackedModel | None = None  # its draft head

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, has_fp4: bool, packed_kernels: bool = False, head: Checkpoint | None = None) -> PackedModel:
        """Read a checkpoint, and that of its draft head; no weights are read. Without FP4, its weights take the bytes of int8."""
        shapes = tensor_shapes(checkpoint.config)
        types = CONSTANT_TYPES | (NATIVE_TYPES if has_fp4 else {})
        in_layers = expert_tensors(checkpoint.config) | (product_tensors(checkpoint.config) if packed_kernels else set())
        packed = {}
        for kind in checkpoint.value_kinds:
            for name in checkpoint.names_of_kind(kind):
                widened = math.prod(shapes[name]) // 2 if kind == "e2m1" and not has_fp4 and name not in in_layers else 0
                packed[name] = PackedBytes(checkpoint.nbytes_of(name) + widened, BYTES if name in in_layers else types[kind])
        for name in in_layers:
            block = checkpoint.block_type(name)
            if block in BLOCK_BITS:
                packed[name] = PackedBytes(round(math.prod(shapes[name]) * BLOCK_BITS[block] / 8), BYTES)
        if head is None:
            return cls(checkpoint.config, packed)
        of_head = PackedModel.of(head, has_fp4=has_fp4)
        return cls(checkpoint.config, packed, replace(of_head, model=with_own_tensors(head.config)))

    def weights_nbytes(self, dtype: str) -> int:
        """Return the bytes of the weights of an engine that computes in a dtype."""
        return EngineWeights.of(self.model, self.packed, dtype, segmented=False, has_plugin_layers=True).nbytes

    def rounded(self, quantize: str) -> PackedModel:
        """Return the same model with weights rounded to ``quantize``."""
        shapes, schemes = tensor_shapes(self.model), rounding_schemes(self.model, Quantization.parse(quantize))
        experts = expert_tensors(self.model)
        packed = {
            name: PackedBytes(
                rounded_nbytes((shapes[name][0], shapes[name][1]), scheme, self.model.dtype),
                BYTES if name in experts else f"int{SCHEMES[scheme][0]}",
            )
            for name, scheme in schemes.items()
        }
        head = self.head.rounded(quantize) if self.head is not None and self.head.model.eagle3_input is None else self.head
        return replace(self, packed=packed, head=head)

    def estimate(self, options: ResolvedOptions, cache: DecoderCacheConfig) -> BuildEstimate:
        """Return the bytes of a build: see :func:`estimate_build`."""
        model, computed = self.model, options.dtype
        segmented = options.in_segments
        weights = EngineWeights.of(model, self.packed, computed, segmented=segmented, has_plugin_layers=options.attention == "plugin")
        kernels = _kernels_nbytes(model, segmented=segmented, is_packed=bool(weights.packed.keys() - {*embedding_tables(model)}))
        if options.attention == "mask":
            kernels += sum(mixer.softcap is not None for mixer in model.attention_layers) * _KERNELS_PER_CAPPED_LAYER
        if len(options.profiles) > 2:
            once, per_layer = _VERIFY_KERNELS_IN_SEGMENTS if segmented else _VERIFY_KERNELS
            kernels += once + model.num_layers * per_layer
        library = options.plugin_library
        plan = weights.plan_nbytes + kernels + (0 if library is None else library.stat().st_size)
        constants = decoder_constants(model, cache, dtype=computed)
        head = None if self.head is None else self._head_estimate(self.head, options)
        peak = round(weights.peak_of_segments(plan) if segmented else weights.peak_of_one_network()) + (
            weights.dense_nbytes // itemsize(computed) * itemsize(model.dtype) if computed != model.dtype else 0
        )
        v_nbytes = sum(v_output_nbytes(v_outputs(model, computed), options.profiles)) if options.v_outputs else 0
        return BuildEstimate(
            weights_nbytes=weights.nbytes,
            plan_nbytes=plan,
            constants_nbytes=sum(dense_nbytes(spec.shape, spec.dtype) for spec in constants) if segmented else 0,
            cache_nbytes=cache.nbytes,
            activations_nbytes=_activations_nbytes(model, computed, options) + v_nbytes,
            adapters_nbytes=0 if options.adapter_inputs is None else options.adapter_inputs.nbytes(model, computed),
            embeddings_nbytes=sum(dense_nbytes(spec.shape, spec.dtype) for spec in options.embedding_tensors(model)),
            host_peak_nbytes=peak if head is None else max(head.host_peak_nbytes, head.plan_nbytes + peak),  # it is built first
            hidden_states_nbytes=0 if self.head is None else self._hidden_states_nbytes(self.head.model, options),
            draft_head=head,
        )

    def _head_estimate(self, head: PackedModel, options: ResolvedOptions) -> BuildEstimate:
        of_head = options.of_draft_head(head.model)
        return head.estimate(of_head, of_head.cache_for(head.model))

    def _hidden_states_nbytes(self, head: ModelConfig, options: ResolvedOptions) -> int:
        lengths = {"max_sequence_length": options.max_sequence_length, "max_prefill_length": options.max_prefill_length}
        return hidden_states_nbytes(self.model, head, slots=options.max_batch_size, dtype=options.dtype, **lengths)


def with_own_tensors(head: ModelConfig) -> ModelConfig:
    """Return a draft head that has a copy of the tensors of its model, as its engine does."""
    own = head.eagle3_input
    return head if own is None else replace(head, eagle3_input=replace(own, shares_embedding=False, shares_head=False))


def _kernels_nbytes(model: ModelConfig, *, segmented: bool, is_packed: bool) -> int:
    """Return the bytes of compiled kernels of all layers with two profiles. Attention cuts an engine into segments, nothing else does."""
    per_layer = _KERNELS_PER_PACKED_LAYER if is_packed else _KERNELS_PER_LAYER
    per_segment = _KERNELS_PER_PACKED_SEGMENT if is_packed else _KERNELS_PER_SEGMENT
    scans = [_KERNELS_PER_SCAN[mixer.kind] for mixer in model.recurrent_layers if mixer.kind in _KERNELS_PER_SCAN]
    kernels = model.num_layers * per_layer + sum(scans)
    if not model.attention_layers:
        return kernels
    if not segmented:
        return _KERNELS + kernels
    return kernels + (len(model.attention_layers) + len(scans)) * (per_segment - per_layer)


def _activations_nbytes(model: ModelConfig, dtype: str, options: ResolvedOptions) -> int:
    """Return the bytes of activations at the widest point of a layer, for the largest enqueue, and of the logits."""
    tokens = options.max_batch_size * options.max_prefill_length
    mixers = max(map(_mixer_width, model.layers))
    mlps = max(map(_mlp_width, model.layers))
    per_layer = 0 if model.per_layer_embedding is None else model.per_layer_embedding.size * model.num_layers
    projected = 2 * per_layer  # the rows and the projection, of which the inputs of all layers are made
    widest = 2 * model.hidden_size + per_layer + max(mixers, mlps, projected)  # the residual, its norm, and the inputs of all layers
    capped = max((mixer.num_heads for mixer in model.attention_layers if mixer.softcap is not None), default=0)
    before_and_after_softmax = 2 * capped * options.max_sequence_length * itemsize("float32")
    scores = before_and_after_softmax if options.attention == "mask" else 0
    scores = max(scores, *(_scan_nbytes(mixer, options.max_prefill_length) for mixer in model.recurrent_layers), 0)
    rows = options.max_batch_size * options.max_logits_per_slot
    logits = rows * model.vocab_size * (itemsize(dtype) + itemsize("float32"))
    workspaces = (_workspace_nbytes(layer.mlp, model.hidden_size, dtype, tokens) for layer in model.layers)
    return tokens * (widest * itemsize(dtype) + scores) + logits + _expanded_kv_nbytes(model, dtype, options) + max(workspaces)


def _expanded_kv_nbytes(model: ModelConfig, dtype: str, options: ResolvedOptions) -> int:
    """Return the bytes of K and V of all S rows, repeated for each query head: prefill of native attention in RTX makes them with GQA."""
    if options.attention != "native" or options.flavour == "tensorrt":
        return 0
    widest = max((mixer.num_heads * mixer.head_dim for mixer in model.attention_layers if mixer.group > 1), default=0)
    return 2 * options.max_batch_size * options.max_sequence_length * widest * itemsize(dtype)


def _mixer_width(layer: LayerConfig) -> int:
    """Return the number of elements per token at the widest point of a mixer."""
    mixer = layer.mixer
    attention = (2 * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim if isinstance(mixer, AttentionConfig) else 0
    # of a recurrent mixer the three parts, and input and output of the convolution
    return max(attention, 0 if layer.recurrence is None else 5 * layer.recurrence.channels)


def _mlp_width(layer: LayerConfig) -> int:
    """Return the number of elements per token at the widest point of an MLP outside of its experts: gate, up, their product."""
    mlp = layer.mlp
    if isinstance(mlp, RoutedMlpConfig):
        return 2 * (mlp.latent_size or 0) + (0 if mlp.shared is None else 3 * mlp.shared.intermediate_size)
    return 0 if mlp is None else 3 * mlp.intermediate_size


def _workspace_nbytes(mlp: MlpConfig | RoutedMlpConfig | None, hidden_size: int, dtype: str, tokens: int) -> int:
    """Return the bytes of the workspace of experts."""
    if not isinstance(mlp, RoutedMlpConfig):
        return 0
    op = ExpertsOp(**ExpertAttributes.of(mlp).attributes())
    inputs = op.input_types(hidden_size, mlp.latent_size or hidden_size, dtype, batch=1, tokens=tokens)
    return op.workspace_nbytes([*inputs.values()])


def _scan_nbytes(mixer: RecurrentConfig, width: int) -> int:
    """Return the bytes per token of the intra-chunk attention matrix, in a scan from plain TensorRT layers."""
    if isinstance(mixer, Mamba2Config):
        return 3 * mixer.num_heads * min(width, CHUNK_TOKENS) * itemsize("float32")
    return 4 * mixer.num_value_heads * width * itemsize("float32") if isinstance(mixer, GatedDeltaNetConfig) else 0
