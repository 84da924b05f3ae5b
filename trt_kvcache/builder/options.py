"""What ``build_engine`` is asked for, checked before a file or a network is made.

TensorRT accepts much that cannot work (a prefill longer than the cache is a warning, a write beyond it nothing at all), and
for the rest its messages name none of these options. So everything that is known here is refused here.
"""

from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS
from trt_kvcache.engine.decoder_tensors import cache_config
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, MAX_GROUP
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import check_plugins

#: Head dims for which TensorRT has attention kernels: multiples of the step.
HEAD_DIM_STEP, HEAD_DIM_MIN, HEAD_DIM_MAX = 8, 16, 256

_TURING = "7.5"


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of one build.

    Parameters
    ----------
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens a slot can hold, S.
    max_prefill_length : int
        Most new tokens per slot in one enqueue; at most S.
    dtype : str or None
        What the engine computes in, and its cache holds; None takes the checkpoint's.
    attention : str
        ``"native"``, ``"mask"`` or ``"plugin"``: our own over the combined cache, by plugin layers where TensorRT has them, else
        between segments of the engine.
    flavour : str
        ``"auto"``, ``"tensorrt"`` or ``"tensorrt_rtx"``.
    compute_capabilities : tuple of str, or None
        GPUs to build for, such as ``("8.6", "12.0")``. None: all that TensorRT for RTX knows. Full TensorRT builds for the
        GPU it runs on.

    Raises
    ------
    ConfigError
        A value is out of range, or two disagree.
    """

    max_batch_size: int
    max_sequence_length: int
    max_prefill_length: int
    dtype: str | None = None
    attention: str = "native"
    flavour: str = "auto"
    compute_capabilities: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_sequence_length", "max_prefill_length"):
            object.__setattr__(self, name, int_in_range(name, getattr(self, name), 1, error=ConfigError))
        if self.max_prefill_length > self.max_sequence_length:
            raise ConfigError(
                f"max_prefill_length: expected at most max_sequence_length={self.max_sequence_length}, got {self.max_prefill_length}. "
                "Longer prompts are prefilled in chunks of this length."
            )
        if self.dtype is not None:
            one_of("dtype", self.dtype, MODEL_DTYPES)
        one_of("attention", self.attention, ATTENTION_VARIANTS)
        one_of("flavour", self.flavour, FLAVOURS)
        if self.compute_capabilities is not None:
            self._check_compute_capabilities()

    def _check_compute_capabilities(self) -> None:
        given = self.compute_capabilities
        if isinstance(given, str) or not given or not all(isinstance(one, str) for one in given):
            raise ConfigError(f'compute_capabilities: expected a sequence such as ("8.6", "12.0"), got {given!r}.')
        object.__setattr__(self, "compute_capabilities", tuple(given))
        if len(set(given)) != len(given):
            raise ConfigError(f"compute_capabilities: expected each one once, got {', '.join(given)}.")
        if self.attention == "plugin" and _TURING in given:
            raise ConfigError(f"compute_capabilities: expected 8.0 or more for plugin attention, got {_TURING}. Build with native or mask.")

    def cache_for(self, model: ModelConfig) -> KVCacheConfig:
        """Return the cache of the engine, after checking that ``model`` can be built with these options.

        Raises
        ------
        ConfigError
            TensorRT has no attention for the head dim, S is beyond the model's positions, or the dtype cannot be had.
        """
        head_dim = model.head_dim
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
        dtype = self.dtype or model.dtype
        if dtype == "bfloat16" and _TURING in (self.compute_capabilities or ()):
            raise ConfigError(f"dtype: GPUs of compute capability {_TURING} have no bfloat16. Build with dtype float16.")
        sizes = {"max_batch_size": self.max_batch_size, "max_sequence_length": self.max_sequence_length}
        return cache_config(model, **sizes, dtype=dtype, attention=self.attention)

    def check_kernels(self, model: ModelConfig) -> None:
        """Check that our attention kernels serve ``model``, where it is to run on them. Raises :class:`ConfigError`."""
        if self.attention != "plugin":
            return
        dtype, group = self.dtype or model.dtype, model.num_attention_heads // model.num_kv_heads
        for what, value, known in (("dtype", dtype, (*ELEMENT_TYPES,)), ("head_dim", model.head_dim, HEAD_DIMS)):
            if value not in known:
                raise ConfigError(f"{what}: expected one of {', '.join(map(str, known))} for plugin attention, got {value}.")
        if group > MAX_GROUP:
            raise ConfigError(f"num_attention_heads: expected at most {MAX_GROUP} for each K/V head for plugin attention, got {group}.")

    def check_tensorrt(self, tensorrt: TensorRT) -> None:
        """Check that this TensorRT can do what is asked for. Raises :class:`ConfigError`."""
        if self.attention != "plugin" and not tensorrt.has_kv_update:
            raise ConfigError(
                f"attention: expected plugin, got {self.attention}: TensorRT {tensorrt.version} has no KVCacheUpdate (10.15 has)."
            )
        if self.attention == "native" and not tensorrt.has_native_attention:
            raise ConfigError(
                f"attention: expected mask, got native: TensorRT {tensorrt.version} has no causal attention over a cache (10.16 has)."
            )
        if self.attention == "plugin" and not tensorrt.is_rtx:
            try:
                check_plugins(tensorrt)
            except EngineError as error:
                raise ConfigError(f"attention: {error}") from None
        if self.compute_capabilities is None:
            return
        if not tensorrt.is_rtx:
            raise ConfigError("compute_capabilities: full TensorRT builds for the GPU it runs on. Build with flavour tensorrt_rtx.")
        known = known_compute_capabilities(tensorrt)
        for one in self.compute_capabilities:
            if one not in known:
                raise ConfigError(f"compute_capabilities: expected some of {', '.join(known)} ({tensorrt}), got {one!r}.")


def known_compute_capabilities(tensorrt: TensorRT) -> dict[str, object]:
    """Return the GPUs that TensorRT for RTX can be told to build for: ``"8.6"`` to ``ComputeCapability.SM86``, and so on."""
    members = tensorrt.module.ComputeCapability.__members__
    return {f"{name[2:-1]}.{name[-1]}": member for name, member in members.items() if name.startswith("SM")}
