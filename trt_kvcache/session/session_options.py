"""``SessionOptions``: how a session is opened. The one place where these options are listed, explained and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

from trt_kvcache._util.checks import int_in_range, one_of, option_names
from trt_kvcache._util.keyword_options import show_as_keywords
from trt_kvcache.builder.options import OTHER_NAMES as OTHER_BUILD_NAMES, PLUGIN_LAYERS, BuildKeywords
from trt_kvcache.checkpoint.adapters.adapter_set import adapter_folders
from trt_kvcache.checkpoint.adapters.lora_adapter import adapter_folder
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_in_full
from trt_kvcache.engine.attention_variants import ATTENTION_SETTINGS, AUTO, AttentionName, AttentionSetting
from trt_kvcache.engine.decoder_profiles import check_logits_per_slot
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.shapes import MAX_DIMENSION

_Function = TypeVar("_Function", bound=Callable[..., Any])

EngineChoice = Literal["auto", "numpy", "tensorrt", "torch", "reference"]
FlavourChoice = Literal["auto", "tensorrt", "tensorrt_rtx"]
DTypeChoice = Literal["float16", "bfloat16", "float32", "fp16", "half", "bf16", "fp32", "float"]
PluginLayersChoice = Literal["one-plan", "segments"]
KVDTypeChoice = Literal["fp8", "float8_e4m3fn", "int8"]
PerLayerTableChoice = Literal["device", "host"]
KVScalesChoice = Literal["tensor", "head", "token"]

#: Engines by the names that messages list, and other names of them.
ENGINES = ("auto", "numpy", "tensorrt", "torch")
ENGINE_ALIASES = {"reference": "numpy"}

#: Names of some options in other projects.
OTHER_NAMES = {**OTHER_BUILD_NAMES, "backend": "engine", "device_id": "device", "prompt_cache": "prompt_cache_bytes"}

#: Prompt tokens of a step with requests that decode. 256 take an H100 1.6 times as long as one token of an 8B model in 16 bits.
DEFAULT_PREFILL_CHUNK = 256

#: Attention of the NumPy and the PyTorch engine where no variant is named.
DEFAULT_ATTENTION: AttentionName = "native"


class OpenOptions(TypedDict, total=False):
    """Keyword arguments of ``InferenceSession.open``: fields of :class:`SessionOptions`."""

    engine: EngineChoice
    flavour: FlavourChoice
    device: int
    prompt_cache_bytes: int
    cuda_graphs: bool
    draft: str | None
    draft_tree: int | None
    prefill_chunk: int
    max_embeddings: int
    per_layer_table: PerLayerTableChoice
    adapters: Mapping[str, str] | None


class ModelOptions(OpenOptions, total=False):
    """Keyword arguments of ``InferenceSession.from_model``: the fields of :class:`SessionOptions`."""

    max_batch_size: int | None
    max_sequence_length: int | None
    max_prefill_length: int | None
    max_logits_per_slot: int | Literal["all"] | None
    dtype: DTypeChoice | None
    attention: AttentionSetting | None
    plugin_layers: PluginLayersChoice | None
    quantize: str | None
    adapter: str | None
    kv_dtype: KVDTypeChoice | None
    kv_scales: KVScalesChoice | None


#: Value of ``draft`` for prompt lookup.
NGRAM = "ngram"

#: Options that an engine folder has fixed at its build.
BUILD_OPTIONS = (
    *("max_batch_size", "max_sequence_length", "max_prefill_length", "max_logits_per_slot"),
    *("dtype", "attention", "plugin_layers", "quantize", "adapter", "kv_dtype", "kv_scales"),
)


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of a session, which is opened from an engine folder or from a Hugging Face folder.

    Parameters
    ----------
    engine : {"auto", "numpy", "tensorrt", "torch"}
        ``"auto"`` uses TensorRT if it is installed, a supported GPU is present, and it can run the model; otherwise it warns with the
        reason and falls back to PyTorch, or to the NumPy reference engine if PyTorch is not installed. ``"tensorrt"`` never falls back:
        it raises. ``"torch"`` runs on the GPU if PyTorch can use it, else on the CPU. ``"numpy"`` is the reference engine;
        ``"reference"`` is another name of it.
    flavour : {"auto", "tensorrt", "tensorrt_rtx"}
        Product: full TensorRT or TensorRT for RTX. ``"auto"`` is the product that built the engine folder; for a Hugging Face folder full
        TensorRT if it works on this machine, else TensorRT for RTX.
    device : int
        Index of the CUDA device, which an engine is also built for. Ignored by the reference engine.
    prompt_cache_bytes : int
        Limit in bytes for copies of earlier prompts, in the cache's memory: see
        :class:`~trt_kvcache.sequences.prompt_cache.PromptCache`. 0 keeps none.
    cuda_graphs : bool
        True to run decode steps, verify steps and frequent prefills of TensorRT engines as CUDA graphs, as the PyTorch engine always does.
    draft : "ngram", "mtp" or path, optional
        Default of speculative decoding, for requests without ``draft``: see ``InferenceSession.generate``. ``"ngram"`` is prompt lookup.
        ``"mtp"`` is the multi-token prediction head in a model folder. A path, or an id of the Hugging Face Hub, is a small model with the
        same tokenizer, which generates drafts: an engine folder, or a model folder, opened with ``engine`` and ``dtype`` of this session.
        Or it is the folder of an EAGLE-3 head, or of a Gemma 4 assistant for a model folder; assistants are not for TensorRT, which
        ``"auto"`` then leaves out. For ``"mtp"`` and an EAGLE-3 head, a TensorRT engine folder must have been built with ``draft_head``.
        The engine of the large model must return the logits of several tokens per slot, as an engine does that is opened from a model
        folder. Off if left out.
    draft_tree : int, optional
        Most tokens of a draft that is a tree, from 2 to 64, with the token before it. A tree proposes several tokens for a position, so
        more tokens are accepted in a step that verifies more of them. For ``draft`` with the path of a small model or of an EAGLE-3 head.
        Not for a model with recurrent states. TensorRT engines, also of the small model, must have been built with ``draft_tree``;
        ``"auto"`` leaves out others, and builds none. Drafts are chains if left out.
    prefill_chunk : int
        Chunked prefill: most prompt tokens that a ``step`` runs together with requests that decode, so that these do not wait for a long
        prompt. A smaller number makes the time between tokens more even, a larger one the first token of a long prompt earlier. Without
        requests that decode, a step runs up to ``max_prefill_length`` tokens of every prompt.
    max_embeddings : int
        Different rows that prompts of the session may have in place of rows of the embedding, for ``InferenceSession.add_embeddings``.
        They take ``max_embeddings * hidden_size`` elements of memory. TensorRT runs an engine folder that was built with ``max_embeddings``
        of at least this number, and has room for all of these; ``"auto"`` leaves TensorRT out for another one.
    per_layer_table : {"device", "host"}
        Place of the table of a model with per-layer embeddings (Gemma 4 E2B and E4B). ``"host"`` is pinned host memory, of which the
        PyTorch engine on a GPU reads the rows of a step's tokens: see ``docs/models.md``. Not with TensorRT, which ``"auto"`` then leaves
        out. On a CPU both are the same.
    adapters : mapping of str to path, optional
        Folders of PEFT with LoRA adapters by name, of which each request chooses one, or none: ``InferenceSession.generate(adapter=)``.
        Their updates run next to the products with the weights, which may be quantized: see ``docs/adapters.md``. Not with ``adapter``. A
        TensorRT engine folder must have been built with ``adapters_rank``. ``load`` also takes ids of the Hugging Face Hub.
    max_batch_size : int, optional
        Slots of the cache, B; 1 if left out. This and the options below are for a Hugging Face folder only: an engine folder has them
        from its build.
    max_sequence_length : int, optional
        Tokens that a slot can hold, S. If left out the model's ``max_position_embeddings``, at most 2048 if it has attention.
    max_prefill_length : int, optional
        Most new tokens of a slot in one enqueue; longer prompts are run in chunks. If left out S, at most 512.
    max_logits_per_slot : int or "all", optional
        Most new tokens of a slot whose logits one enqueue returns, for ``score``, ``verify`` and drafts; ``"all"`` for
        ``max_prefill_length``. If left out, 1 for TensorRT, with ``draft`` 17. If left out for NumPy and PyTorch, up to 64, also with an
        engine folder that was built for fewer. The logits take ``max_batch_size * max_logits_per_slot * vocab * 4`` bytes.
    dtype : {"float16", "bfloat16", "float32"}, optional
        Dtype of weights, K and V; the checkpoint's if left out. ``"fp16"``, ``"half"``, ``"bf16"`` and ``"fp32"`` are short names.
    attention : {"auto", "native", "mask", "plugin"}, optional
        TensorRT's causal attention with key lengths, the same with an explicit mask, or this package's plugin. If left out ``"auto"``:
        the build chooses by TensorRT, GPU and model (see ``docs/engines.md``); the NumPy and the PyTorch engine take ``"native"``, or
        ``"plugin"`` with ``kv_dtype``.
    plugin_layers : {"one-plan", "segments"}, optional
        How a TensorRT engine with plugin attention is built, as for :class:`~trt_kvcache.builder.options.BuildOptions`; ``"one-plan"`` if
        left out. Other engines ignore it.
    quantize : str, optional
        Round weights to the nearest multiples of a scale: ``"int8"``, ``"int4"`` (groups of 32) or ``"int4:128"``. Append
        ``",embedding=..."`` and ``",head=..."`` to round embedding and head too. See ``docs/quantization.md``.
    adapter : path, optional
        A folder of PEFT with a LoRA adapter, which is merged into the weights when they are read, and before they are rounded with
        ``quantize``: see ``docs/adapters.md``. For a model in 16 or 32 bits. ``load`` also takes an id of the Hugging Face Hub.
    kv_dtype : {"fp8", "float8_e4m3fn", "int8"}, optional
        Dtype of quantized K and V, with plugin attention. The first two are the same. If left out, K and V have ``dtype``.
    kv_scales : {"tensor", "head", "token"}, optional
        Scales of quantized K and V. ``"token"`` computes a scale for each token and head; the others are static, from a checkpoint that has
        them. If left out, the static scales of the checkpoint for this ``kv_dtype``, or
        ``"token"`` if the checkpoint has none.

    Raises
    ------
    ConfigError
        A value is not one of those listed, or a size is not a positive integer; or ``kv_scales`` is given without ``kv_dtype``, or
        ``kv_dtype`` with attention that does not support it.
    RangeError
        ``device`` or ``prompt_cache_bytes`` is negative or no integer, or ``prefill_chunk`` is no integer >= 1.

    Examples
    --------
    >>> from trt_kvcache.session.session_options import SessionOptions
    >>> SessionOptions(engine="numpy", max_batch_size=2).max_batch_size
    2
    >>> SessionOptions(engine="onnx")
    Traceback (most recent call last):
        ...
    trt_kvcache.errors.ConfigError: engine: expected one of auto, numpy, tensorrt, torch, got 'onnx'.
    """

    engine: EngineChoice = "auto"
    flavour: FlavourChoice = "auto"
    device: int = 0
    prompt_cache_bytes: int = 0
    cuda_graphs: bool = True
    draft: str | None = None
    draft_tree: int | None = None
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    max_embeddings: int = 0
    per_layer_table: PerLayerTableChoice = "device"
    adapters: Mapping[str, str] | None = None
    max_batch_size: int | None = None
    max_sequence_length: int | None = None
    max_prefill_length: int | None = None
    max_logits_per_slot: int | Literal["all"] | None = None
    dtype: DTypeChoice | None = None
    attention: AttentionSetting | None = None
    plugin_layers: PluginLayersChoice | None = None
    quantize: str | None = None
    adapter: str | None = None
    kv_dtype: KVDTypeChoice | None = None
    kv_scales: KVScalesChoice | None = None

    def __post_init__(self) -> None:
        if isinstance(self.engine, str):
            object.__setattr__(self, "engine", ENGINE_ALIASES.get(self.engine, self.engine))
        one_of("engine", self.engine, ENGINES)
        one_of("flavour", self.flavour, FLAVOURS)
        int_in_range("device", self.device, 0)
        if self.draft is not None:
            object.__setattr__(self, "draft", _path_text("draft", self.draft))
        if self.draft_tree is not None:
            int_in_range("draft_tree", self.draft_tree, 2, MAX_TREE_TOKENS, error=ConfigError)
            if self.draft in (None, NGRAM):
                raise ConfigError(f"draft_tree: expected draft with the folder of a small model or a head, got draft={self.draft!r}.")
        int_in_range("prompt_cache_bytes", self.prompt_cache_bytes, 0)
        int_in_range("prefill_chunk", self.prefill_chunk, 1)
        int_in_range("max_embeddings", self.max_embeddings, 0, MAX_DIMENSION, error=ConfigError)
        one_of("per_layer_table", self.per_layer_table, get_args(PerLayerTableChoice))
        if self.per_layer_table == "host" and self.engine == "tensorrt":
            raise ConfigError("per_layer_table: expected device with engine='tensorrt', which has the table in its plan, got host.")
        for name in ("max_batch_size", "max_sequence_length", "max_prefill_length"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int_in_range(name, getattr(self, name), 1, error=ConfigError))
        if self.max_logits_per_slot is not None:
            check_logits_per_slot(self.max_logits_per_slot)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_in_full(self.dtype))
            one_of("dtype", self.dtype, MODEL_DTYPES)
        if self.attention is not None:
            one_of("attention", self.attention, ATTENTION_SETTINGS)
        if self.plugin_layers is not None:
            one_of("plugin_layers", self.plugin_layers, PLUGIN_LAYERS)
        if self.kv_dtype is not None:
            one_of("kv_dtype", self.kv_dtype, get_args(KVDTypeChoice))
            if self.attention not in (None, AUTO, "plugin"):
                raise ConfigError(f"attention: expected plugin for K and V in {self.kv_dtype}, got {self.attention}.")
        if self.kv_scales is not None:
            one_of("kv_scales", self.kv_scales, get_args(KVScalesChoice))
            if self.kv_dtype is None:
                raise ConfigError(f"kv_scales: expected kv_dtype with it, fp8 or int8, got {self.kv_scales} alone.")
        if self.quantize is not None:
            object.__setattr__(self, "quantize", str(Quantization.parse(self.quantize)))
        if self.adapter is not None:
            object.__setattr__(self, "adapter", adapter_folder(self.adapter))
        if self.adapters is not None:
            object.__setattr__(self, "adapters", adapter_folders(self.adapters))
            if self.adapters and self.adapter is not None:
                raise ConfigError(f"adapters: expected none with adapter, which is merged, got {', '.join(self.adapters)}.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SessionOptions:
        """Return the options that a caller gave by name.

        Parameters
        ----------
        options : mapping of str to object
            Fields.

        Raises
        ------
        ConfigError, RangeError
            There is no such option, or a value is not one of its values.
        """
        option_names("session", options, [field.name for field in fields(cls)], OTHER_NAMES)
        return cls(**options)

    @property
    def given_build_options(self) -> tuple[str, ...]:
        """Names of the options that were given although an engine folder has fixed them."""
        return tuple(name for name in BUILD_OPTIONS if getattr(self, name) is not None)

    @property
    def build_keywords(self) -> BuildKeywords:
        """Options of the build of an engine; what was not given is left to the defaults of the build, which are those of a session."""
        given = {name: getattr(self, name) for name in self.given_build_options}
        rows = {"max_embeddings": self.max_embeddings} if self.max_embeddings else {}
        return cast(BuildKeywords, {"flavour": self.flavour, "device": self.device, **rows, **given})


def takes_session_options(function: _Function) -> _Function:
    """Show the fields of :class:`SessionOptions` in signature and docstring of a function that takes them as ``**options``."""
    return show_as_keywords(SessionOptions, function)


def _path_text(name: str, value: Any) -> str:
    """Return a path as a text."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{name}: expected ngram, mtp or the folder of a model, got {value!r}.")
    return str(os.fspath(value))
