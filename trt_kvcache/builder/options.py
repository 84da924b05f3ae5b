"""``BuildOptions``: the options of a build, checked before a file is written or a network is made.

TensorRT accepts options that cannot work (a prefill that is longer than the cache is only a warning, a write beyond the cache not even
that), and its messages do not name the option at fault. So everything that is known to fail is refused here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_in_full
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, attention_variant, why_not_native
from trt_kvcache.engine.decoder_tensors import decoder_cache_config, decoder_profiles, logits_per_slot
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.decoder_segments import attention_op_attributes
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, MAX_GROUP
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.features import check_features
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import check_plugins

#: Head dimensions that TensorRT has attention kernels for: multiples of the step.
HEAD_DIM_STEP, HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 16, 256

#: The highest ``builder_optimization_level``.
MAX_OPTIMIZATION_LEVEL = 5

#: Sizes of engines for which none are given: upper bounds of the lengths, which are taken from the model.
DEFAULT_MAX_BATCH_SIZE = 1
DEFAULT_MAX_SEQUENCE_LENGTH = 2048
DEFAULT_MAX_PREFILL_LENGTH = 512


def default_sequence_length(model: ModelConfig) -> int:
    """Return how many tokens a slot can hold where nothing is said."""
    limit = model.max_position_embeddings
    return min(limit, DEFAULT_MAX_SEQUENCE_LENGTH) if model.attention_layers else limit


_TURING = "7.5"

#: Names of :data:`~trt_kvcache.model.features.FEATURES` that the networks of this package compute.
COMPUTED_FEATURES: frozenset[str] = frozenset(
    {
        "activation",
        "embedding_multiplier",
        "final_softcap",
        "full_qk_norm",
        "fused_tensors",
        "gated_delta_net",
        "logits_divisor",
        "mamba2",
        "no_mixer",
        "no_mlp",
        "no_rope",
        "norm_offset",
        "norm_places",
        "norm_rounding",
        "output_gate",
        "partial_rotary",
        "query_scaling",
        "relu2",
        "residual_multiplier",
        "scale",
        "several_ropes",
        "several_shapes",
        "short_conv",
        "softcap",
        "ungated_mlp",
        "window",
    }
)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of one build.

    Parameters
    ----------
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    max_prefill_length : int
        Most new tokens per slot in one enqueue; at most S.
    max_logits_per_slot : int or "all"
        Most new tokens per slot whose logits one enqueue returns; ``"all"`` for ``max_prefill_length``. Activations and buffers take
        ``max_batch_size * max_logits_per_slot * vocab * 4`` bytes each.
    dtype : str, optional
        What the engine computes in, and its cache holds; that of the checkpoint if left out.
    attention : str
        ``"native"``, ``"mask"`` or ``"plugin"``: see :mod:`trt_kvcache.engine.attention_variants`. The latter is built as plugin layers
        where TensorRT has them, else between the segments of the engine.
    flavour : str
        ``"auto"``, ``"tensorrt"`` or ``"tensorrt_rtx"``.
    compute_capabilities : tuple of str, optional
        GPUs to build for, such as ``("8.6", "12.0")``; all that TensorRT for RTX knows if left out. Full TensorRT builds for the GPU that
        it runs on.
    builder_optimization_level : int, optional
        How hard TensorRT searches for fast kernels, from 0 to 5; TensorRT's default if left out.
    timing_cache : path, optional
        File with measurements of kernels, for full TensorRT.

    Raises
    ------
    ConfigError
        A value is out of range, or two values do not fit each other.

    Examples
    --------
    >>> from trt_kvcache.checkpoint import Checkpoint
    >>> options = BuildOptions(max_batch_size=4, max_sequence_length=256, max_prefill_length=64, attention="plugin")
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     options.cache_for(checkpoint.config).layout.value
    'combined'
    """

    max_batch_size: int
    max_sequence_length: int
    max_prefill_length: int
    max_logits_per_slot: int | Literal["all"] = 1
    dtype: str | None = None
    attention: str = "native"
    flavour: str = "auto"
    compute_capabilities: tuple[str, ...] | None = None
    builder_optimization_level: int | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_sequence_length", "max_prefill_length"):
            object.__setattr__(self, name, int_in_range(name, getattr(self, name), 1, error=ConfigError))
        if self.max_prefill_length > self.max_sequence_length:
            raise ConfigError(
                f"max_prefill_length: expected at most max_sequence_length={self.max_sequence_length}, got {self.max_prefill_length}. "
                "Longer prompts are prefilled in chunks of this length."
            )
        _ = self.logits_per_slot  # is checked
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_in_full(self.dtype))
            one_of("dtype", self.dtype, MODEL_DTYPES)
        one_of("attention", self.attention, ATTENTION_VARIANTS)
        one_of("flavour", self.flavour, FLAVOURS)
        level = self.builder_optimization_level
        if level is not None:
            level = int_in_range("builder_optimization_level", level, 0, MAX_OPTIMIZATION_LEVEL, error=ConfigError)
            object.__setattr__(self, "builder_optimization_level", level)
        if self.compute_capabilities is not None:
            self._check_compute_capabilities()

    def _check_compute_capabilities(self) -> None:
        """Check what is known without TensorRT. Raises ConfigError."""
        given = self.compute_capabilities
        if isinstance(given, str) or not given or not all(isinstance(one, str) for one in given):
            raise ConfigError(f'compute_capabilities: expected a sequence such as ("8.6", "12.0"), got {given!r}.')
        object.__setattr__(self, "compute_capabilities", tuple(given))
        if len(set(given)) != len(given):
            raise ConfigError(f"compute_capabilities: expected each one once, got {', '.join(given)}.")
        if self.attention == "plugin" and _TURING in given:
            raise ConfigError(f"compute_capabilities: expected 8.0 or more for plugin attention, got {_TURING}. Build with native or mask.")

    @property
    def logits_per_slot(self) -> int:
        """Most new tokens per slot whose logits one enqueue returns, as a number."""
        return logits_per_slot(self.max_logits_per_slot, max_prefill_length=self.max_prefill_length)

    @property
    def profiles(self) -> tuple[EngineProfile, ...]:
        """The optimisation profiles: see ``trt_kvcache.engine.decoder_tensors.decoder_profiles``."""
        return decoder_profiles(
            max_batch_size=self.max_batch_size,
            max_prefill_length=self.max_prefill_length,
            max_logits_per_slot=self.logits_per_slot,
        )

    def cache_for(self, model: ModelConfig, quantized: QuantizedKV | None = None) -> DecoderCacheConfig:
        """Return the configuration of the engine's cache, after checking that the model can be built with these options.

        Parameters
        ----------
        model : ModelConfig
            Configuration of the model.
        quantized : QuantizedKV, optional
            How K and V are quantized.

        Returns
        -------
        KVCacheConfig or HybridCacheConfig
            With the sizes of these options, their dtype (by default that of the model), and the layout that their attention works on.

        Raises
        ------
        ConfigError
            The network does not compute something that the model needs, TensorRT has no attention kernels for a head dimension, S exceeds
            the positions of the model, native attention has no window or soft cap, or a GPU does not have the dtype.
        """
        check_features(model, COMPUTED_FEATURES, "TensorRT's network")
        for head_dim in sorted({mixer.head_dim for mixer in model.attention_layers}):
            if head_dim % HEAD_DIM_STEP or not HEAD_DIM_MIN <= head_dim <= HEAD_DIM_MAX:
                raise ConfigError(
                    f"head_dim: expected a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, the model has {head_dim}. "
                    "TensorRT has no attention kernels for others; the reference engine runs it."
                )
        if self.max_sequence_length > model.max_position_embeddings:
            raise ConfigError(
                f"max_sequence_length: expected at most {model.max_position_embeddings}, the positions that the model was made for "
                f"(max_position_embeddings), got {self.max_sequence_length}."
            )
        obstacle = why_not_native(model, self.max_sequence_length) if self.attention == "native" else None
        if obstacle is not None:
            raise ConfigError(f"attention: expected mask or plugin, got native: {obstacle}. Build with --attention mask or plugin.")
        dtype = self.dtype or model.dtype
        if dtype == "bfloat16" and _TURING in (self.compute_capabilities or ()):
            raise ConfigError(f"dtype: GPUs of compute capability {_TURING} have no bfloat16. Build with dtype float16.")
        slots, length = self.max_batch_size, self.max_sequence_length
        return decoder_cache_config(
            model, max_batch_size=slots, max_sequence_length=length, dtype=dtype, attention=self.attention, quantized=quantized
        )

    def check_kernels(self, model: ModelConfig) -> None:
        """Check that the attention kernels of this package support a model; nothing is checked for other variants of attention.

        Parameters
        ----------
        model : ModelConfig
            Configuration of the model.

        Raises
        ------
        ConfigError
            The kernels do not support its dtype, head dimension, number of query heads per K/V head, or another number of its attention.
        """
        if self.attention != "plugin":
            return
        for mixer in model.attention_layers:
            for what, value, known in (("dtype", self.dtype or model.dtype, (*ELEMENT_TYPES,)), ("head_dim", mixer.head_dim, HEAD_DIMS)):
                if value not in known:
                    raise ConfigError(f"{what}: expected one of {', '.join(map(str, known))} for plugin attention, got {value}.")
            if mixer.group > MAX_GROUP:
                raise ConfigError(
                    f"num_attention_heads: expected at most {MAX_GROUP} for each K/V head for plugin attention, got {mixer.group}."
                )
            attributes = attention_op_attributes(mixer, max_sequence_length=self.max_sequence_length)
            AttentionOp(**attributes).kernel_attributes()  # type: ignore[arg-type]  # each of its type

    def check_tensorrt(self, tensorrt: TensorRT) -> None:
        """Check that a TensorRT can build with these options.

        Parameters
        ----------
        tensorrt : TensorRT
            The imported TensorRT.

        Raises
        ------
        ConfigError
            It is too old for the variant of attention, or does not know a compute capability.
        """
        for name, served in (("mask", "plugin"), ("native", "mask")):  # native needs what mask needs, and more
            variant = attention_variant(name)
            if self.attention in ("native", name) and not tensorrt.supports(variant):
                first = variant.first_rtx_release if tensorrt.is_rtx else variant.first_release
                raise ConfigError(f"attention: expected {served}, got {self.attention}: {tensorrt} has no {variant.needs} ({first} has).")
        if self.attention == "plugin" and not tensorrt.is_rtx:
            try:
                check_plugins(tensorrt)
            except EngineError as error:
                raise ConfigError(f"attention: {error}") from None
        if self.timing_cache is not None and tensorrt.is_rtx:
            raise ConfigError("timing_cache: expected with full TensorRT only; TensorRT for RTX measures no kernels when it builds.")
        if self.compute_capabilities is None:
            return
        if not tensorrt.is_rtx:
            raise ConfigError("compute_capabilities: full TensorRT builds for the GPU it runs on. Build with flavour tensorrt_rtx.")
        known = known_compute_capabilities(tensorrt)
        for one in self.compute_capabilities:
            if one not in known:
                raise ConfigError(f"compute_capabilities: expected some of {', '.join(known)} ({tensorrt}), got {one!r}.")


def known_compute_capabilities(tensorrt: TensorRT) -> dict[str, object]:
    """Return the GPUs that TensorRT for RTX can build for."""
    members = tensorrt.module.ComputeCapability.__members__
    return {f"{name[2:-1]}.{name[-1]}": member for name, member in members.items() if name.startswith("SM")}
