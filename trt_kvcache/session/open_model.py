"""What a session is made of when it is opened from a folder: which engine runs, in which memory, with which tokenizer."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache as cached
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.builder.build_engine import Progress, build_engine
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_cache_manager import KVCacheManager
from trt_kvcache.checkpoint import Checkpoint, GenerationDefaults, ModelConfig, Tokenizer
from trt_kvcache.checkpoint.generation import GENERATION_FILE
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.decoder_tensors import cache_config
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BuildError, ConfigError, CudaError, EngineError
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.memory.cuda_memory import CudaMemory, find_gpu
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.reference import Attention, ReferenceEngine
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.trt.module import load as load_tensorrt
from trt_kvcache.trt.segmented_engine import SegmentedEngine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

EngineChoice = Literal["auto", "reference", "tensorrt"]

#: What ``from_model`` takes where no length is given.
DEFAULT_MAX_SEQUENCE_LENGTH = 2048
DEFAULT_MAX_PREFILL_LENGTH = 512

CHECKING, LOADING = "check checkpoint", "load weights"


class EngineFallbackWarning(UserWarning):
    """``engine="auto"`` runs the NumPy reference engine, because TensorRT cannot run here."""


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    """Everything that a session is made of. The fields are the arguments of ``InferenceSession``."""

    engine: Engine
    cache: KVCacheManager
    names: TensorNames
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams
    identity: Callable[[], ModelIdentity]
    on_close: Callable[[], object] | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def close(self) -> None:
        """Close engine and cache, where no session came to own them."""
        self.engine.close()
        self.cache.close()
        if self.on_close is not None:
            self.on_close()


def open_engine_folder(
    path: str | Path,
    *,
    engine: EngineChoice,
    flavour: str,
    device: int,
    keep_bytes: int = 0,
    cuda_graphs: bool = True,
    progress: Progress | None,
) -> SessionParts:
    """Open an engine folder: see ``InferenceSession.open``. ``keep_bytes`` is for the :class:`CudaMemory` of the cache."""
    _check_choice(engine, flavour)
    folder = EngineFolder.open(path)
    config = folder.config

    def opened() -> SessionParts:
        return _tensorrt_parts(folder, CudaMemory(device, keep_bytes=keep_bytes), flavour, cuda_graphs)

    built_for = config.tensorrt_flavour if flavour == "auto" else flavour
    parts = _on_tensorrt(opened, (EngineError, CudaError), engine, built_for, device)
    if parts is not None:
        return parts
    with folder.open_checkpoint(_bytes_progress(progress, CHECKING)) as checkpoint:
        running = ReferenceEngine(
            checkpoint,
            kv=config.cache,
            max_prefill_length=config.max_prefill_length,
            attention=_variant(config.attention_variant),
            names=config.names,
            memory=HostMemory(),
            progress=_bytes_progress(progress, LOADING),
        )
    return _parts(running, config.cache, config.names, folder.path, config.model, lambda: config.checkpoint.fingerprint)


def open_model(
    path: str | Path,
    *,
    engine: EngineChoice,
    max_batch_size: int,
    max_sequence_length: int | None,
    max_prefill_length: int | None,
    dtype: str | None,
    attention: str,
    flavour: str,
    device: int,
    keep_bytes: int = 0,
    cuda_graphs: bool = True,
    progress: Progress | None,
) -> SessionParts:
    """Open a Hugging Face folder: see ``InferenceSession.from_model``. ``keep_bytes`` as for :func:`open_engine_folder`."""
    _check_choice(engine, flavour)
    if dtype is not None:
        one_of("dtype", dtype, MODEL_DTYPES)
    with Checkpoint.open(path) as checkpoint:
        model = checkpoint.config
        length = _or_default(max_sequence_length, min(model.max_position_embeddings, DEFAULT_MAX_SEQUENCE_LENGTH))
        length = int_in_range("max_sequence_length", length, 1, error=ConfigError)
        width = _or_default(max_prefill_length, min(length, DEFAULT_MAX_PREFILL_LENGTH))
        if length > model.max_position_embeddings:
            raise ConfigError(
                f"max_sequence_length: expected at most {model.max_position_embeddings}, the positions that the model was made for "
                f"(max_position_embeddings), got {length}."
            )
        slots = int_in_range("max_batch_size", max_batch_size, 1, error=ConfigError)
        variant = _variant(attention)
        cache = cache_config(model, max_batch_size=slots, max_sequence_length=length, dtype=dtype or model.dtype, attention=variant)

        def built() -> SessionParts:
            memory = CudaMemory(device, keep_bytes=keep_bytes)  # without a GPU, nothing is built
            options = {"max_prefill_length": width, "attention": variant, "progress": progress}
            return _built_parts(checkpoint.path, cache, memory, flavour=flavour, cuda_graphs=cuda_graphs, **options)

        parts = _on_tensorrt(built, (BuildError, ConfigError, EngineError, CudaError), engine, flavour, device)
        if parts is not None:
            return parts
        running = ReferenceEngine(
            checkpoint,
            kv=cache,
            max_prefill_length=width,
            attention=variant,
            memory=HostMemory(),
            progress=_bytes_progress(progress, LOADING),
        )
        return _parts(running, cache, DEFAULT_NAMES, checkpoint.path, model, partial(_fingerprint, checkpoint.path))


def why_no_tensorrt(flavour: str, device: int = 0) -> str | None:
    """Return why TensorRT cannot run engines here (no GPU, or not installed), or None if it can."""
    reason = find_gpu(device)
    if reason is None:
        try:
            load_tensorrt(flavour)
        except EngineError as error:
            reason = str(error)
    return reason


def _on_tensorrt(
    make: Callable[[], SessionParts], refusals: tuple[type[Exception], ...], engine: str, flavour: str, device: int
) -> SessionParts | None:
    """Return what ``make`` opens, or None where the reference engine is to run: with a warning, unless it was asked for."""
    if engine == "reference":
        return None
    reason = why_no_tensorrt(flavour, device) if engine == "auto" else None
    if reason is None:
        try:
            return make()
        except refusals as error:
            if engine == "tensorrt":
                raise
            reason = str(error)
    text = f"running the NumPy reference engine: {reason}"
    warnings.warn(text, EngineFallbackWarning, stacklevel=4)  # at the line that called ``InferenceSession.open`` or ``from_model``
    return None


def _tensorrt_parts(folder: EngineFolder, memory: CudaMemory, flavour: str, cuda_graphs: bool) -> SessionParts:
    config = folder.config
    running = (
        TensorRTEngine.open(folder, memory=memory, flavour=flavour)
        if config.segments is None
        else SegmentedEngine.open(folder, memory=memory, flavour=flavour, cuda_graphs=cuda_graphs)
    )
    return _parts(running, config.cache, config.names, folder.path, config.model, lambda: config.checkpoint.fingerprint)


def _built_parts(path: Path, cache: KVCacheConfig, memory: CudaMemory, *, flavour: str, cuda_graphs: bool, **options: Any) -> SessionParts:
    """Build an engine into a temporary folder that lives as long as the session."""
    place = tempfile.TemporaryDirectory(prefix="trt_kvcache-")
    try:
        report = build_engine(
            path,
            Path(place.name) / "engine",
            max_batch_size=cache.max_batch_size,
            max_sequence_length=cache.max_sequence_length,
            dtype=cache.dtype,
            flavour=flavour,
            **options,
        )
        parts = _tensorrt_parts(EngineFolder.open(report.path), memory, flavour, cuda_graphs)
    except BaseException:
        place.cleanup()
        raise
    return replace(parts, on_close=place.cleanup)


def _fingerprint(path: Path) -> str:
    """Read all weights, once: only snapshots need it."""
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.fingerprint()


def _parts(
    engine: Engine, cache: KVCacheConfig, names: TensorNames, folder: Path, model: ModelConfig, fingerprint: Callable[[], str]
) -> SessionParts:
    """Read what stands beside the weights and allocate the cache; the engine is closed if that fails."""
    try:
        tokenizer = Tokenizer.open(folder)
        defaults = GenerationDefaults.open(folder)
        sampling = _sampling(defaults, folder)
        return SessionParts(
            engine=engine,
            cache=KVCacheManager(cache, memory=engine.memory),
            names=names,
            tokenizer=tokenizer,
            eos_token_ids=defaults.eos_token_ids or model.eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ()),
            defaults=sampling,
            identity=cached(lambda: ModelIdentity(fingerprint=fingerprint(), rope=model.rope.to_dict())),
        )
    except BaseException:
        engine.close()
        raise


def _sampling(defaults: GenerationDefaults, folder: Path) -> SamplingParams:
    """Return what ``generation_config.json`` asks for, greedy unless it says ``do_sample``; warn of what is not supported."""
    if defaults.ignored:
        text = f"{folder / GENERATION_FILE}: ignored, as it is not supported: {', '.join(defaults.ignored)}. Other tokens may come out."
        warnings.warn(text, UserWarning, stacklevel=5)  # in the reference engine's way, the line that opened the session
    if not defaults.do_sample:
        return SamplingParams()
    return SamplingParams(temperature=defaults.temperature, top_k=defaults.top_k, top_p=defaults.top_p, min_p=defaults.min_p)


def _check_choice(engine: str, flavour: str) -> None:
    one_of("engine", engine, get_args(EngineChoice))
    one_of("flavour", flavour, FLAVOURS)


def _variant(attention: str) -> Attention:
    one_of("attention", attention, get_args(Attention))
    return cast(Attention, attention)


def _bytes_progress(progress: Progress | None, stage: str) -> Callable[[int, int], object] | None:
    return None if progress is None else lambda done, total: progress(stage, done / total)


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value
