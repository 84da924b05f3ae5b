"""Opening a folder: choice of engine, memory, cache and tokenizer."""

import logging
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cache as cached, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache._util.progress import Progress
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.builder.options import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_PREFILL_LENGTH, MTP, default_sequence_length
from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.cache.shared_rows import SharedRows, shared_config
from trt_kvcache.checkpoint import Checkpoint, GenerationDefaults, Tokenizer
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.checkpoint.generation_config import GENERATION_FILE
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.decoder_engine import DecoderEngine
from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH, default_logits_per_slot, logits_per_slot
from trt_kvcache.engine.kv_options import quantized_kv
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine.step_rows import HiddenLayers
from trt_kvcache.engine_folder.folder import CONFIG_FILE, PLAN_FILE, EngineFolder, is_engine_folder
from trt_kvcache.errors import BuildError, ConfigError, CudaError, EngineError
from trt_kvcache.generation.drafter import DraftChoice
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_memory import CudaMemory, find_gpu
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.features import check_features
from trt_kvcache.reference import Attention, ReferenceEngine
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.session.draft_heads import assistant_folder, draft_head_folder, hidden_layers_for, names_head
from trt_kvcache.session.model_location import expanded
from trt_kvcache.session.session_options import DEFAULT_ATTENTION, SessionOptions
from trt_kvcache.trt.module import load as load_tensorrt
from trt_kvcache.trt.segmented_engine import SegmentedEngine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

if TYPE_CHECKING:
    from trt_kvcache.torch_engine import TorchEngine

_LOGGER = logging.getLogger("trt_kvcache.session")

#: Stages of long work, as passed to ``progress``.
CHECKING, LOADING = "check checkpoint", "load weights"


class EngineFallbackWarning(UserWarning):
    """``engine="auto"`` runs PyTorch or the NumPy reference engine, because TensorRT cannot run here."""


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    """The parts of a session: the arguments of ``InferenceSession``."""

    engine: Engine
    cache: Cache
    names: TensorNames
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams
    prompt_cache: PromptCache
    prefill_chunk: int
    identity: Callable[[], ModelIdentity]
    model: ModelConfig
    weights: WeightsSummary | None = None
    draft: DraftChoice | None = None
    on_close: Callable[[], object] | None = None
    folder: EngineFolder | None = None  # of an engine on TensorRT

    def arguments(self) -> dict[str, Any]:
        """Return the fields of a session by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "folder"}

    def close(self) -> None:
        """Close engine and cache, if no session came to own them."""
        self.engine.close()
        self.cache.close()
        if self.on_close is not None:
            self.on_close()


def open_engine_folder(
    path: str | PathLike[str], options: SessionOptions, *, draft_tree: int | None = None, progress: Progress | None = None
) -> SessionParts:
    """Open an engine folder. The caller closes the parts. ``draft_tree``: most tokens of a tree that it proposes, as a draft model."""
    if options.given_build_options:
        given = ", ".join(options.given_build_options)
        raise ConfigError(f"{given}: expected with a Hugging Face folder only; {path} is an engine folder, built with its own.")
    if assistant_folder(options.draft) is not None:
        raise ConfigError(
            f"draft: expected a model folder for an assistant, got the engine folder {path}. InferenceSession.from_model opens one."
        )
    place = expanded(path)
    if not is_engine_folder(place) and (place / CONFIG_FILE).is_file():
        raise EngineError(
            f"{path}: expected an engine folder, but it has no {PLAN_FILE}. `trt-kvcache build` makes one; "
            "InferenceSession.from_model and trt_kvcache.load open a model folder."
        )
    folder = EngineFolder.open(place)
    config = folder.config
    if config.model.hidden_inputs_width:
        raise ConfigError(f"{path}: expected the engine folder of a model, got that of a draft head. Name it as draft=.")
    _check_per_layer_table(config.model, options)
    if options.adapters and config.checkpoint.adapter:
        names = ", ".join(options.adapters)
        raise ConfigError(f"adapters: expected none with {path}, which was built with a merged adapter, got {names}.")
    adapters = _adapters(config.model, options)
    tree = draft_tree or options.draft_tree or 0
    if options.engine == "tensorrt" and tree > (config.draft_tree or 0):
        got = "one of chains only" if config.draft_tree is None else f"one of trees of {config.draft_tree}"
        raise ConfigError(f"draft_tree: {path}: expected an engine for trees of {tree} tokens, got {got}. Build it with draft_tree={tree}.")
    built_for = config.tensorrt_flavour if options.flavour == "auto" else options.flavour
    if tree <= (config.draft_tree or 0) and _tries_tensorrt(options, built_for, config.model):
        try:
            return _tensorrt_parts(folder, _cuda_memory(options), options, adapters)
        except (EngineError, CudaError) as error:
            _fall_back(options, error, config.model)
    with folder.open_checkpoint(_bytes_progress(progress, CHECKING)) as checkpoint:
        running = _checkpoint_engine(
            checkpoint,
            options,
            kv=config.cache,
            dtype=config.dtype,
            max_prefill_length=config.max_prefill_length,
            max_logits_per_slot=max(
                config.max_logits_per_slot, _default_logits(config.model, config.cache, config.max_prefill_length, options)
            ),
            attention=cast(Attention, config.attention_variant),
            names=config.names,
            hidden_layers=hidden_layers_for(options.draft, config.model),
            adapters=adapters,
            max_embeddings=max(options.max_embeddings, config.max_embeddings),
            progress=_bytes_progress(progress, LOADING),
        )
        weights = checkpoint.weights
    return _parts(running, config.cache, config.names, folder.path, config.model, lambda: config.checkpoint.fingerprint, options, weights)


def open_model(
    path: str | PathLike[str], options: SessionOptions, *, draft_tree: int | None = None, progress: Progress | None = None
) -> SessionParts:
    """Open a Hugging Face folder, without an engine folder. The caller closes the parts. ``draft_tree``: see :func:`open_engine_folder`."""
    place = expanded(path)
    if is_engine_folder(place):
        raise ConfigError(f"{path}: expected a model folder, got an engine folder. InferenceSession.open and trt_kvcache.load open it.")
    with Checkpoint.open(place, quantize=options.quantize, adapter=options.adapter) as checkpoint:
        model = checkpoint.config
        _check_per_layer_table(model, options)
        hidden_layers = hidden_layers_for(options.draft, model)
        named = options.attention
        attention: Attention = "plugin" if options.kv_dtype else DEFAULT_ATTENTION if named is None or named == "auto" else named
        quantized = quantized_kv(checkpoint, options.kv_dtype, options.kv_scales)
        cache = _cache_config(model, options, attention, quantized)
        width = options.max_prefill_length or min(cache.max_sequence_length, DEFAULT_MAX_PREFILL_LENGTH)
        logits = logits_per_slot(options.max_logits_per_slot or 1, max_prefill_length=width)
        adapters = _adapters(model, options)
        tree, is_assistant = draft_tree or options.draft_tree, assistant_folder(options.draft) is not None
        if is_assistant and options.engine == "tensorrt":
            raise ConfigError(f"draft: expected no assistant with engine='tensorrt', got {options.draft}. NumPy and PyTorch run it.")
        leaves_out = is_assistant or (tree is not None and options.engine == "auto")
        if not leaves_out and _tries_tensorrt(options, options.flavour, model):
            try:
                memory = _cuda_memory(options)  # first: without a GPU, nothing is built
                built = options
                if options.draft is not None and options.max_logits_per_slot is None:
                    built = replace(options, max_logits_per_slot=min(VERIFY_WIDTH, width))
                has_head = hidden_layers is not None
                return _built_parts(checkpoint.path, memory, built, adapters, tree and min(tree, width), progress, has_head=has_head)
            except (BuildError, ConfigError, EngineError, CudaError) as error:
                _fall_back(options, error, model)
        running = _checkpoint_engine(
            checkpoint,
            options,
            kv=cache,
            dtype=options.dtype or model.dtype,
            max_prefill_length=width,
            max_logits_per_slot=_default_logits(model, cache, width, options) if options.max_logits_per_slot is None else logits,
            attention=attention,
            hidden_layers=hidden_layers,
            adapters=adapters,
            max_embeddings=options.max_embeddings,
            progress=_bytes_progress(progress, LOADING),
        )
        fingerprint = partial(_fingerprint, checkpoint.path, options)
        return _parts(running, cache, DEFAULT_NAMES, checkpoint.path, model, fingerprint, options, checkpoint.weights)


def why_no_tensorrt(flavour: str, device: int = 0) -> str | None:
    """Return the reason that TensorRT cannot run engines here, or None. Imports TensorRT if there is a GPU."""
    reason = find_gpu(device)
    if reason is None:
        try:
            load_tensorrt(flavour)
        except EngineError as error:
            reason = str(error)
    return reason


def why_no_torch() -> str | None:
    """Return the reason that PyTorch cannot be used, or None. Imports it."""
    try:
        _torch_engine()
    except (ModuleNotFoundError, EngineError) as error:
        return str(error)
    return None


def _torch_engine() -> "type[TorchEngine]":
    """Return the class of the PyTorch engine; importing it imports PyTorch."""
    try:
        from trt_kvcache.torch_engine import TorchEngine
    except ModuleNotFoundError:
        raise  # names the extra
    except (ImportError, OSError) as error:
        raise EngineError(f"PyTorch: expected a library that can be imported, got {type(error).__name__}: {error}") from error
    return TorchEngine


def _why_not_on_torch(model: ModelConfig) -> str | None:
    """Return why PyTorch cannot run a model, or None if it can."""
    reason = why_no_torch()
    if reason is None:
        from trt_kvcache.torch_engine.engine import COMPUTED_FEATURES

        try:
            check_features(model, COMPUTED_FEATURES, "the PyTorch engine")
        except ConfigError as error:
            reason = str(error)
    return reason


def _tries_tensorrt(options: SessionOptions, flavour: str, model: ModelConfig) -> bool:
    """Tell whether to open an engine on TensorRT. If ``auto`` finds that it cannot run here, warn with the reason."""
    if options.per_layer_table == "host":
        return False
    if options.engine != "auto":
        _LOGGER.info("engine: %s, as asked for", options.engine)
        return options.engine == "tensorrt"
    reason = why_no_tensorrt(flavour, options.device)
    if reason is None:
        _LOGGER.info("engine: tensorrt, as device %d can run it", options.device)
    else:
        _warn_of_fallback(reason, model)
    return reason is None


def _fall_back(options: SessionOptions, error: Exception, model: ModelConfig) -> None:
    """Warn that another engine runs because TensorRT failed; raise the error instead if TensorRT was requested."""
    if options.engine == "tensorrt":
        raise error
    _warn_of_fallback(str(error), model)


def _warn_of_fallback(reason: str, model: ModelConfig) -> None:
    no_torch = _why_not_on_torch(model)
    if no_torch is None:
        _LOGGER.info("engine: torch, because %s", reason)
        warn_caller(f"running the PyTorch engine: {reason}", EngineFallbackWarning)
    else:
        _LOGGER.info("engine: numpy, because %s; and %s", reason, no_torch)
        warn_caller(f"running the NumPy reference engine: {reason.removesuffix('.')}; {no_torch}", EngineFallbackWarning)


def _checkpoint_engine(checkpoint: Checkpoint, options: SessionOptions, **arguments: Any) -> Engine:
    """Open the engine that runs a checkpoint without TensorRT: PyTorch, or NumPy if it was requested or PyTorch cannot run the model."""
    if options.engine == "numpy" or (options.engine == "auto" and _why_not_on_torch(checkpoint.config) is not None):
        return ReferenceEngine(checkpoint, memory=HostMemory(), **arguments)
    return _torch_engine().open(checkpoint, memory=_torch_memory(options), has_host_table=options.per_layer_table == "host", **arguments)


def _check_per_layer_table(model: ModelConfig, options: SessionOptions) -> None:
    """Refuse to place a table that a model does not have."""
    if options.per_layer_table == "host" and model.per_layer_embedding is None:
        raise ConfigError(f"per_layer_table: expected device for a model without per-layer embeddings, got host for {model.family}.")


def open_draft_head(checkpoint: Checkpoint, parts: SessionParts, options: SessionOptions, *, hidden_layers: HiddenLayers) -> SessionParts:
    """Open a draft head of the model of a session, in an engine of the same class. The caller closes checkpoint and parts."""
    engine, model = parts.engine, checkpoint.config
    assert isinstance(engine, DecoderEngine)  # no other engine opens with a head
    kv = decoder_cache_config(
        model,
        max_batch_size=parts.cache.max_batch_size,
        max_sequence_length=min(parts.cache.lengths.max_sequence_length, model.max_position_embeddings),
        dtype=options.dtype or parts.model.dtype,
        attention=DEFAULT_ATTENTION,
    )
    width = min(kv.max_sequence_length, max(profile.max_width for profile in engine.profiles))
    with ExitStack() as undo:
        head = engine.open_draft_head(
            checkpoint,
            kv=kv,
            max_prefill_length=width,
            max_logits_per_slot=min(options.draft_tree or 1, width),
            hidden_layers=hidden_layers,
        )
        undo.callback(head.close)
        cache = make_cache(kv, memory=head.memory)
        undo.pop_all()
    return replace(parts, engine=head, cache=cache, names=DEFAULT_NAMES, model=model, on_close=None)


def open_built_head(folder: EngineFolder, parts: SessionParts, options: SessionOptions) -> SessionParts:
    """Open the TensorRT engine of a draft head in the memory of a session. The caller closes the parts."""
    of_head = SessionOptions(engine="tensorrt", flavour=options.flavour, device=options.device, cuda_graphs=options.cuda_graphs)
    return _tensorrt_parts(folder, cast(CudaMemory, parts.engine.memory), of_head, None)


def open_assistant(checkpoint: Checkpoint, parts: SessionParts) -> SessionParts:
    """Open an assistant of the model of a session over K and V of its cache, in an engine of the same class. The caller closes both."""
    engine, model = parts.engine, checkpoint.config
    assert isinstance(engine, DecoderEngine)  # no other engine opens with hidden states
    assert model.assistant_input is not None
    layers = model.assistant_input.kv_places(parts.model.kv_layers)
    kv = shared_config(parts.cache, layers)
    with ExitStack() as undo:
        assistant = engine.open_draft_head(checkpoint, kv=kv, max_prefill_length=1, hidden_layers="final_norm")
        undo.callback(assistant.close)
        cache = SharedRows(parts.cache, layers)
        undo.pop_all()
    return replace(parts, engine=assistant, cache=cache, names=DEFAULT_NAMES, model=model, on_close=None)


def _torch_memory(options: SessionOptions) -> Memory:
    """Return the memory of the GPU if PyTorch and cuda-python can use it, else host memory."""
    from trt_kvcache.torch_engine.device import gpu_failure

    reason = find_gpu(options.device) or gpu_failure(options.device)
    if reason is None:
        return _cuda_memory(options)
    _LOGGER.info("torch runs on the CPU: %s", reason)
    return HostMemory()


def _cache_config(model: ModelConfig, options: SessionOptions, attention: Attention, quantized: QuantizedKV | None) -> DecoderCacheConfig:
    """Return the cache for a model: the one configuration from which engine and allocation are made."""
    length = options.max_sequence_length or default_sequence_length(model)
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"max_sequence_length: expected at most {model.max_position_embeddings}, the positions that the model was made for "
            f"(max_position_embeddings), got {length}."
        )
    return decoder_cache_config(
        model,
        max_batch_size=options.max_batch_size or DEFAULT_MAX_BATCH_SIZE,
        max_sequence_length=length,
        dtype=options.dtype or model.dtype,
        attention=attention,
        quantized=quantized,
    )


def _default_logits(model: ModelConfig, cache: DecoderCacheConfig, width: int, options: SessionOptions) -> int:
    fitting = default_logits_per_slot(model, max_batch_size=cache.max_batch_size, max_prefill_length=width)
    return fitting if options.draft is None else max(fitting, min(max(VERIFY_WIDTH, options.draft_tree or 0), width))


def _cuda_memory(options: SessionOptions) -> CudaMemory:
    return CudaMemory(options.device, keep_bytes=options.prompt_cache_bytes)


def _adapters(model: ModelConfig, options: SessionOptions) -> AdapterSet | None:
    return AdapterSet.open(model, options.adapters) if options.adapters else None


def _tensorrt_parts(folder: EngineFolder, memory: CudaMemory, options: SessionOptions, adapters: AdapterSet | None) -> SessionParts:
    """Open the engine of a folder on TensorRT."""
    config = folder.config
    if options.max_embeddings > config.max_embeddings:
        raise EngineError(
            f"max_embeddings: expected at most {config.max_embeddings}, for which {folder.path} was built, got {options.max_embeddings}. "
            "Build it with max_embeddings."
        )
    running: Engine
    if config.segments is None:
        running = TensorRTEngine.open(folder, memory=memory, flavour=options.flavour, cuda_graphs=options.cuda_graphs, adapters=adapters)
        if config.draft_head and not names_head(options.draft):
            running.hidden_states = None  # of no use without the head: those of each sequence would be kept
    elif adapters is None:
        running = SegmentedEngine.open(folder, memory=memory, flavour=options.flavour, cuda_graphs=options.cuda_graphs)
    else:
        raise ConfigError(f"adapters: expected none with {folder.path}, an engine in segments, got {', '.join(adapters.names)}.")
    parts = _parts(running, config.cache, config.names, folder.path, config.model, lambda: config.checkpoint.fingerprint, options)
    return replace(parts, folder=folder)


def _built_parts(
    path: Path,
    memory: CudaMemory,
    options: SessionOptions,
    adapters: AdapterSet | None,
    draft_tree: int | None,
    progress: Progress | None,
    *,
    has_head: bool,
) -> SessionParts:
    """Build an engine into a temporary folder that is removed with the session."""
    place = tempfile.TemporaryDirectory(prefix="trt_kvcache-")
    keywords = options.build_keywords
    if draft_tree is not None:
        keywords["draft_tree"] = draft_tree
    if adapters is not None:
        keywords["adapters_rank"], keywords["adapters_modules"] = sum(adapters.ranks.values()), adapters.modules
    if has_head:
        keywords["draft_head"] = draft_head_folder(options.draft) or MTP
    try:
        report = build_engine(path, Path(place.name) / "engine", progress=progress, **keywords)
        parts = _tensorrt_parts(EngineFolder.open(report.path), memory, options, adapters)
    except BaseException:
        place.cleanup()
        raise
    return replace(parts, on_close=place.cleanup)


def _fingerprint(path: Path, options: SessionOptions) -> str:
    """Read all weights, once: only snapshots need it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the weights: shown when the session was opened
        with Checkpoint.open(path, quantize=options.quantize, adapter=options.adapter) as checkpoint:
            return checkpoint.fingerprint()


def _parts(
    engine: Engine,
    config: DecoderCacheConfig,
    names: TensorNames,
    folder: Path,
    model: ModelConfig,
    fingerprint: Callable[[], str],
    options: SessionOptions,
    weights: WeightsSummary | None = None,
) -> SessionParts:
    """Read the files other than the weights and allocate the cache in the engine's memory. If that fails, both are closed."""
    with ExitStack() as undo:
        undo.callback(engine.close)
        tokenizer = Tokenizer.open(folder)
        defaults = GenerationDefaults.open(folder)
        sampling = _sampling(defaults, folder, with_text=tokenizer is not None)
        cache = make_cache(config, memory=engine.memory)
        undo.callback(cache.close)
        parts = SessionParts(
            engine=engine,
            cache=cache,
            names=names,
            tokenizer=tokenizer,
            eos_token_ids=defaults.eos_token_ids or model.eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ()),
            defaults=sampling,
            prompt_cache=PromptCache(cache, max_bytes=options.prompt_cache_bytes),
            prefill_chunk=options.prefill_chunk,
            identity=cached(lambda: ModelIdentity(fingerprint=fingerprint(), rope=model.rope_at_length(config.max_sequence_length))),
            model=model,
            weights=weights,
        )
        undo.pop_all()
    _LOGGER.info(
        "opened %s: %s, %d slots of %d tokens in %s, %d MiB of K and V%s%s",
        folder,
        type(engine).__name__,
        config.max_batch_size,
        config.max_sequence_length,
        config.dtype,
        cache.nbytes >> 20,
        "" if config.mamba is None else " and states",
        "" if weights is None else f", {weights.nbytes >> 20} MiB of weights in {weights.format}",
    )
    return parts


def _sampling(defaults: GenerationDefaults, folder: Path, *, with_text: bool) -> SamplingParams:
    """Return the defaults in ``generation_config.json``: greedy unless it says ``do_sample``. Warn of what is not supported."""
    stop = defaults.stop_strings if with_text else ()
    if defaults.ignored:
        text = f"{folder / GENERATION_FILE}: ignored, as it is not supported: {', '.join(defaults.ignored)}. Other tokens may come out."
        warn_caller(text, UserWarning)
    greedy = SamplingParams(repetition_penalty=defaults.repetition_penalty, stop=stop)  # as in transformers: no part of sampling
    if not defaults.do_sample:
        return greedy
    return replace(greedy, temperature=defaults.temperature, top_k=defaults.top_k, top_p=defaults.top_p, min_p=defaults.min_p)


def _bytes_progress(progress: Progress | None, stage: str) -> Callable[[int, int], object] | None:
    return None if progress is None else lambda done, total: progress(stage, done / total)
