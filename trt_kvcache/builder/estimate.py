"""``estimate_build``: what a build will need and what it will give, in bytes, before it is started."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trt_kvcache.builder.code_types import are_native
from trt_kvcache.builder.network.selective_scan import CHUNK_TOKENS
from trt_kvcache.builder.options import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_PREFILL_LENGTH, BuildOptions, default_sequence_length
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.rounded_weight import rounded_nbytes, rounding_schemes
from trt_kvcache.checkpoint.stored_format import stored_format
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.attention_variants import default_attention
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.decoder_segments import decoder_constants
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.model import AttentionConfig, LayerConfig, ModelConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, RecurrentConfig
from trt_kvcache.model.tensor_shapes import embedding_name, tensor_shapes

#: Bytes of compiled kernels in the plan: once if there is attention, for each layer, and for each one of an engine in segments.
_KERNELS, _KERNELS_PER_LAYER, _KERNELS_PER_SEGMENT = 2_500_000, 1_050_000, 2_100_000

#: The same for each layer whose soft-capped scores are built from plain layers.
_KERNELS_PER_CAPPED_LAYER = 1_500_000

#: The same for each layer whose states go from token to token, by the kind of its mixer.
_KERNELS_PER_SCAN = {"mamba2": 2_000_000, "gated_delta_net": 4_800_000}

#: The same of the third profile, which an engine with the logits of more tokens has: once and for each layer, in one piece and in segments.
_VERIFY_KERNELS = (2_250_000, 630_000)
_VERIFY_KERNELS_IN_SEGMENTS = (520_000, 1_050_000)

#: The peak of the host: Python with TensorRT loaded, and what TensorRT keeps for each layer.
_HOST, _HOST_PER_LAYER = 207_000_000, 12_000_000

#: How often the host holds the weights at the peak: in pages of the checkpoint, converted or packed, in TensorRT, and in the plan.
_COPIES = 3.1
#: The same of an engine in segments: of the embedding, which stands beside its plan, and of the rest.
_COPIES_IN_SEGMENTS = (2.9, 2.07)


@dataclass(frozen=True, kw_only=True)
class BuildEstimate:
    """Bytes of a build and of the engine that it makes.

    Parameters
    ----------
    weights_nbytes : int
        Weights of the model in the dtype of the engine, or packed.
    plan_nbytes : int
        The serialised engine: weights and compiled kernels.
    constants_nbytes : int
        What an engine in segments has beside its plan: the embedding table, cosines and sines. 0 for other engines.
    cache_nbytes : int
        K, V and states as allocated. Exact.
    activations_nbytes : int
        Activations and logits of the largest enqueue, as the shapes of the network tell: TensorRT may need more or less.
    host_peak_nbytes : int
        Most memory of the host during the build.

    See Also
    --------
    trt_kvcache.BuildReport : What a build did take.
    """

    weights_nbytes: int
    plan_nbytes: int
    constants_nbytes: int
    cache_nbytes: int
    activations_nbytes: int
    host_peak_nbytes: int

    @property
    def device_nbytes(self) -> int:
        """GPU memory of a session with this engine: plan, constants, cache and activations."""
        return self.plan_nbytes + self.constants_nbytes + self.cache_nbytes + self.activations_nbytes

    @property
    def disk_nbytes(self) -> int:
        """The engine folder, without a copy of the checkpoint."""
        return self.plan_nbytes + self.constants_nbytes


def estimate_build(
    model_path: str | os.PathLike[str],
    *,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_sequence_length: int | None = None,
    max_prefill_length: int | None = None,
    max_logits_per_slot: int | Literal["all"] = 1,
    dtype: str | None = None,
    attention: str | None = None,
    flavour: str = "auto",
    quantize: str | None = None,
    kv_dtype: str | None = None,
    kv_scales: str | None = None,
    compute_capabilities: Sequence[str] | None = None,
) -> BuildEstimate:
    """Estimate what ``build_engine`` would take and give. TensorRT is not needed.

    Only ``config.json`` is read, and where weights are stored quantized the shapes of all tensors.

    Parameters
    ----------
    model_path : path
        A Hugging Face folder.
    max_batch_size, max_sequence_length, max_prefill_length : int
        As for ``build_engine``, with the same defaults.
    max_logits_per_slot : int or "all"
        As for ``build_engine``.
    dtype : str, optional
        What the engine computes in; that of the checkpoint if left out.
    attention : str, optional
        ``"native"``, ``"mask"`` or ``"plugin"``; chosen as by ``build_engine`` if left out.
    flavour : str
        ``"tensorrt"`` builds plugin attention into one network; otherwise it runs between the segments of the engine.
    quantize, kv_dtype, kv_scales : str, optional
        As for ``build_engine``.
    compute_capabilities : sequence of str, optional
        As for ``build_engine``. They say whether FP4 is stored as it is.

    Returns
    -------
    BuildEstimate
        The weights, and K, V and states, are exact. Plan and peak were within 10 % of the builds of ``benchmarks/build_estimate.py``:
        TensorRT for RTX 1.7, all its GPUs, Linux, models without states and without quantized weights, whose peak is less certain. The
        plan of a small model is mostly kernels, and less certain too.
        Activations are not measured.

    Raises
    ------
    ConfigError
        The model cannot be built with these options.
    CheckpointError
        There is no ``config.json``, or it is damaged or not supported; or weights are stored quantized, and are not there.

    Examples
    --------
    >>> from trt_kvcache import estimate_build
    >>> estimate = estimate_build("examples/tiny-llama", max_batch_size=4, max_sequence_length=256)
    >>> estimate.cache_nbytes, estimate.weights_nbytes
    (262144, 60736)
    """
    source = PackedModel.read(model_path, quantize=quantize, compute_capabilities=compute_capabilities, flavour=flavour)
    return source.estimate(
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        max_prefill_length=max_prefill_length,
        max_logits_per_slot=max_logits_per_slot,
        dtype=dtype,
        attention=attention,
        flavour=flavour,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
    )


@dataclass(frozen=True)
class PackedModel:
    """A model and the bytes of its packed weights: all that an estimate needs of a folder.

    Parameters
    ----------
    model : ModelConfig
        Of ``config.json``.
    packed : mapping of str to int
        Bytes of each weight that the engine has packed, by name.
    static_kv : pair of str, optional
        Dtype of K and V and what shares a scale, ``"tensor"`` or ``"head"``, where the folder has static scales of them.
    """

    model: ModelConfig
    packed: Mapping[str, int]
    static_kv: tuple[str, str] | None = None

    @classmethod
    def read(
        cls,
        model_path: str | os.PathLike[str],
        *,
        quantize: str | None = None,
        compute_capabilities: Sequence[str] | None = None,
        flavour: str = "auto",
    ) -> PackedModel:
        """Read a folder.

        Parameters
        ----------
        model_path : path
            As for :func:`estimate_build`, with its errors.
        quantize : str, optional
            As there.
        compute_capabilities : sequence of str, optional
            As there.
        flavour : str
            As there.
        """
        path = Path(model_path)
        data = read_json(path / "config.json")
        model = ModelConfig.from_dict(data)
        is_native = are_native(compute_capabilities, is_rtx=flavour != "tensorrt")
        if stored_format(data, path) is None:
            return cls(model, _rounded_sizes(model, quantize))
        with Checkpoint.open(path, quantize=quantize) as checkpoint:
            return cls(model, _stored_sizes(checkpoint, is_native=is_native), _static_kv(checkpoint))

    def estimate(
        self,
        *,
        max_batch_size: int,
        max_sequence_length: int | None,
        max_prefill_length: int | None = None,
        max_logits_per_slot: int | Literal["all"] = 1,
        dtype: str | None = None,
        attention: str | None = None,
        flavour: str = "auto",
        kv_dtype: str | None = None,
        kv_scales: str | None = None,
    ) -> BuildEstimate:
        """Return the bytes of a build: see :func:`estimate_build`.

        Parameters
        ----------
        max_batch_size, max_sequence_length, max_prefill_length : int
            As for :func:`estimate_build`, with its errors.
        max_logits_per_slot : int or "all"
            As there.
        dtype, attention : str, optional
            As there.
        flavour : str
            As there.
        kv_dtype, kv_scales : str, optional
            As there.
        """
        model, packed = self.model, dict(self.packed)
        length = default_sequence_length(model) if max_sequence_length is None else max_sequence_length
        options = BuildOptions(
            max_batch_size=max_batch_size,
            max_sequence_length=length,
            max_prefill_length=min(length, DEFAULT_MAX_PREFILL_LENGTH) if max_prefill_length is None else max_prefill_length,
            max_logits_per_slot=max_logits_per_slot,
            dtype=dtype,
            attention=attention or ("plugin" if kv_dtype else "native"),
            flavour=flavour,
        )
        if attention is None and kv_dtype is None:
            options = replace(options, attention=default_attention(model, options.max_sequence_length))
        computed = dtype or model.dtype
        cache = options.cache_for(model, _any_scales(model, kv_dtype, kv_scales))
        options.check_kernels(model)
        segmented = options.attention == "plugin" and flavour != "tensorrt"
        sizes = {name: math.prod(shape) * itemsize(computed) for name, shape in tensor_shapes(model).items()} | packed
        embedding_nbytes = math.prod(tensor_shapes(model)[embedding_name(model)]) * itemsize(computed)
        if segmented:
            sizes[embedding_name(model)] = embedding_nbytes  # constants beside the plan are never packed
            packed.pop(embedding_name(model), None)
        weights, embedding = sum(sizes.values()), embedding_nbytes if segmented else 0
        dense = weights - sum(packed.values())
        twice = packed.get(embedding_name(model), 0) if model.tie_word_embeddings else 0  # TensorRT packs rows and columns apart
        kernels = _kernels_nbytes(model, segmented=segmented)
        if options.attention == "mask":
            kernels += sum(mixer.softcap is not None for mixer in model.attention_layers) * _KERNELS_PER_CAPPED_LAYER
        if len(options.profiles) > 2:
            once, per_layer = _VERIFY_KERNELS_IN_SEGMENTS if segmented else _VERIFY_KERNELS
            kernels += once + model.num_layers * per_layer
        constants = decoder_constants(model, cache, dtype=computed)
        return BuildEstimate(
            weights_nbytes=weights,
            plan_nbytes=weights + twice - embedding + kernels,
            constants_nbytes=sum(dense_nbytes(spec.shape, spec.dtype) for spec in constants) if segmented else 0,
            cache_nbytes=cache.nbytes,
            activations_nbytes=_activations_nbytes(model, computed, options),
            host_peak_nbytes=(
                _host_peak_nbytes(model, weights, embedding, segmented=segmented)
                + twice
                + (_converted_nbytes(model, computed, dense, packed) if computed != model.dtype else 0)
            ),
        )


def _any_scales(model: ModelConfig, kv_dtype: str | None, kv_scales: str | None) -> QuantizedKV | None:
    """Return how K and V are quantized, as far as bytes go: the values of static scales are in the checkpoint."""
    if kv_dtype is None:
        return None
    return QuantizedKV(kv_dtype, kv_scales or "token", () if kv_scales in (None, "token") else [(1.0, 1.0)] * len(model.attention_layers))


def _stored_sizes(checkpoint: Checkpoint, *, is_native: bool) -> dict[str, int]:
    """Return the bytes of each weight that the engine has packed, by name. FP4 takes the bytes of int8 where it is not native."""
    shapes = tensor_shapes(checkpoint.config)
    codes = {name: 0 if is_native else math.prod(shapes[name]) // 2 for name in checkpoint.names_of_kind("e2m1")}
    return {name: checkpoint.nbytes_of(name) + codes.get(name, 0) for name in checkpoint.quantized_names}


def _rounded_sizes(model: ModelConfig, quantize: str | None) -> dict[str, int]:
    """Return the same of weights that are rounded."""
    if quantize is None:
        return {}
    shapes, schemes = tensor_shapes(model), rounding_schemes(model, Quantization.parse(quantize))
    return {name: rounded_nbytes((shapes[name][0], shapes[name][1]), scheme, model.dtype) for name, scheme in schemes.items()}


def _static_kv(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return the dtype of K and V that has static scales in a checkpoint, and what shares one; None if there are none."""
    scales = checkpoint.kv_scales()
    if checkpoint.kv_dtype is None or not scales:
        return None
    return checkpoint.kv_dtype, "tensor" if all(isinstance(scale, float) for pair in scales for scale in pair) else "head"


def _kernels_nbytes(model: ModelConfig, *, segmented: bool) -> int:
    """Return the bytes of compiled kernels of all layers with two profiles. Attention cuts an engine into segments, nothing else does."""
    scans = [_KERNELS_PER_SCAN[mixer.kind] for mixer in model.recurrent_layers if mixer.kind in _KERNELS_PER_SCAN]
    kernels = model.num_layers * _KERNELS_PER_LAYER + sum(scans)
    if not model.attention_layers:
        return kernels
    if not segmented:
        return _KERNELS + kernels
    return kernels + (len(model.attention_layers) + len(scans)) * (_KERNELS_PER_SEGMENT - _KERNELS_PER_LAYER)


def _activations_nbytes(model: ModelConfig, dtype: str, options: BuildOptions) -> int:
    """Return the bytes of the widest point of a layer, for the largest enqueue, and of the logits."""
    tokens = options.max_batch_size * options.max_prefill_length
    mixers = max(map(_mixer_width, model.layers))
    mlps = max((3 * layer.mlp.intermediate_size for layer in model.layers if layer.mlp is not None), default=0)  # gate, up, their product
    widest = 2 * model.hidden_size + max(mixers, mlps)  # the residual, and its norm
    capped = max((mixer.num_heads for mixer in model.attention_layers if mixer.softcap is not None), default=0)
    before_and_after_softmax = 2 * capped * options.max_sequence_length * itemsize("float32")
    scores = before_and_after_softmax if options.attention == "mask" else 0
    scores = max(scores, *(_scan_nbytes(mixer, options.max_prefill_length) for mixer in model.recurrent_layers), 0)
    rows = options.max_batch_size * options.logits_per_slot
    logits = rows * model.vocab_size * (itemsize(dtype) + itemsize("float32"))
    return tokens * (widest * itemsize(dtype) + scores) + logits


def _mixer_width(layer: LayerConfig) -> int:
    """Return the numbers of each token at the widest point of a mixer."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionConfig):
        return (2 * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
    if mixer is None:
        return 0
    return 5 * mixer.channels  # the three parts, and input and output of the convolution


def _scan_nbytes(mixer: RecurrentConfig, width: int) -> int:
    """Return the bytes of each token for what tokens of an enqueue of ``width`` are to each other, in a scan without kernels of ours."""
    if isinstance(mixer, Mamba2Config):
        return 3 * mixer.num_heads * min(width, CHUNK_TOKENS) * itemsize("float32")
    return 4 * mixer.num_value_heads * width * itemsize("float32") if isinstance(mixer, GatedDeltaNetConfig) else 0


def _host_peak_nbytes(model: ModelConfig, weights: int, embedding: int, *, segmented: bool) -> int:
    """Return most memory of the host during the build of ``weights`` bytes, of which ``embedding`` are beside the plan."""
    copies = _COPIES_IN_SEGMENTS[0] * embedding + _COPIES_IN_SEGMENTS[1] * (weights - embedding) if segmented else _COPIES * weights
    return round(_HOST + model.num_layers * _HOST_PER_LAYER + copies)


def _converted_nbytes(model: ModelConfig, dtype: str, dense: int, packed: Iterable[str]) -> int:
    """Return what is held beside weights in another dtype: pages of dense ones, and float32 values of one that is packed."""
    shapes = tensor_shapes(model)
    largest = max((math.prod(shapes[name]) for name in packed), default=0)
    return dense // itemsize(dtype) * itemsize(model.dtype) + largest * itemsize("float32")
