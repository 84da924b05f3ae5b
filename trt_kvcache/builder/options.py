"""``BuildOptions``: the options of a build. The one place where they are listed and explained, and checked by themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from trt_kvcache._util.checks import int_in_range, one_of, option_names
from trt_kvcache._util.keyword_options import show_as_keywords
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.adapters.lora_adapter import adapter_folder
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_in_full
from trt_kvcache.engine.attention_variants import ATTENTION_SETTINGS, AUTO
from trt_kvcache.engine.decoder_profiles import check_logits_per_slot, logits_per_slot
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model import ModelConfig
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.registry import BUILT_IN_OPERATIONS, OPERATIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The highest ``builder_optimization_level``.
MAX_OPTIMIZATION_LEVEL = 5

#: Default sizes. The lengths are upper limits: the default is the length of the model, if that is smaller.
DEFAULT_MAX_BATCH_SIZE = 1
DEFAULT_MAX_SEQUENCE_LENGTH = 2048
DEFAULT_MAX_PREFILL_LENGTH = 512

#: Values of ``plugin_layers``: one plan with plugin layers, or a plan for each segment between two attention layers.
PLUGIN_LAYERS = ONE_PLAN, SEGMENTS = "one-plan", "segments"

#: Value of ``draft_head`` for the multi-token prediction head in a model folder.
MTP = "mtp"

#: Names of these options in other projects.
OTHER_NAMES = {
    "batch_size": "max_batch_size",
    "kv_cache_dtype": "kv_dtype",
    "max_length": "max_sequence_length",
    "max_model_len": "max_sequence_length",
    "max_num_seqs": "max_batch_size",
    "max_seq_len": "max_sequence_length",
    "n_ctx": "max_sequence_length",
    "quantization": "quantize",
    "torch_dtype": "dtype",
}


class BuildKeywords(TypedDict, total=False):
    """Fields of :class:`BuildOptions`, for the type checker: keyword arguments of ``build_engine`` and ``estimate_build``."""

    max_batch_size: int
    max_sequence_length: int | None
    max_prefill_length: int | None
    max_logits_per_slot: int | Literal["all"]
    dtype: str | None
    attention: str
    plugin_layers: str
    plugin_library: str | os.PathLike[str] | None
    v_outputs: bool | None
    packed_kernels: bool
    operations: Mapping[str, str] | None
    flavour: str
    device: int
    embed_weights: bool
    compute_capabilities: Sequence[str] | None
    builder_optimization_level: int | None
    timing_cache: str | os.PathLike[str] | None
    quantize: str | None
    adapter: str | os.PathLike[str] | None
    adapters_rank: int | None
    adapters_modules: Sequence[str] | None
    max_embeddings: int
    draft_tree: int | None
    draft_head: str | os.PathLike[str] | None
    kv_dtype: str | None
    kv_scales: str | None


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of one build, as a caller gives them.

    Parameters
    ----------
    max_batch_size : int
        Slots, B.
    max_sequence_length : int, optional
        Tokens that a slot can hold, S. If left out the model's ``max_position_embeddings``, at most 2048 if it has attention.
    max_prefill_length : int, optional
        Most new tokens per slot in one enqueue; at most S. Longer prompts are prefilled in chunks. If left out S, at most 512.
    max_logits_per_slot : int or "all"
        Most new tokens per slot whose logits one enqueue returns, for ``score`` and ``verify``; ``"all"`` for ``max_prefill_length``.
        Activations and buffers take ``max_batch_size * max_logits_per_slot * vocab * 4`` bytes each.
    dtype : str, optional
        Dtype of computation, and of the cache unless ``kv_dtype`` is given: ``"float16"``, ``"bfloat16"`` or ``"float32"``. If left out
        the checkpoint's.
    attention : {"auto", "native", "mask", "plugin"}
        See :mod:`trt_kvcache.engine.attention_variants`. ``"auto"`` chooses by TensorRT, GPU and model: see ``docs/engines.md``. If its
        first choice does not build, it warns and builds the next one.
    plugin_layers : {"one-plan", "segments"}
        With plugin attention: one plan with plugin layers; or, for TensorRT for RTX only, one plan for each segment, between which this
        package launches the attention.
    plugin_library : path, optional
        With plugin attention in one plan, a plugin library in C++ whose plugin is used in place of the one in Python, and that the engine
        carries: see ``docs/plugin-library.md``. It stays loaded, and serves this process, until the process ends.
    v_outputs : bool, optional
        With plugin layers in full TensorRT, whether the V that goes into each of them is an output of the engine too, which nobody reads.
        If left out, True for TensorRT 10.13 and 10.14, which may corrupt it otherwise: see ``docs/jetson.md``.
    packed_kernels : bool
        With plugin attention in one plan: True for products with the packed matrices of attention, MLPs and head by kernels of this
        package, as plugin layers, in place of TensorRT's own. They keep FP4, and ``Q4_K``, ``Q5_K`` and ``Q6_K`` of GGUF,
        packed too: see ``docs/quantization.md``.
    operations : mapping of str to str, optional
        With plugin attention, names of registered operations in place of those of this package, such as ``{"attention": "windowed"}``:
        see ``docs/operations.md``. ``"attention"``, ``"embedding"``, ``"experts"`` and
        ``"packed_linear"`` can be replaced.
    flavour : str
        ``"tensorrt"``, ``"tensorrt_rtx"`` or ``"auto"``: see ``trt_kvcache.trt.module.load``.
    device : int
        Index of the CUDA device: ``"auto"`` attention depends on what ``doctor`` found on it, and full TensorRT builds for it.
    embed_weights : bool
        True to copy the checkpoint into the engine folder, so that the reference engine and ``compare`` work without the original
        checkpoint.
    compute_capabilities : sequence of str, optional
        GPUs to build for, such as ``("8.6", "12.0")``; for TensorRT for RTX only. If left out, all GPUs that it supports and that have the
        type of quantized weights.
    builder_optimization_level : int, optional
        Effort of TensorRT's search for fast kernels, from 0 (shortest build) to 5. If left out TensorRT's default, 3.
    timing_cache : path, optional
        For full TensorRT only: a file with measurements of kernels, from which a build starts and to which it adds, so that the next one
        is shorter. It need not exist.
    quantize : str, optional
        Round weights to the nearest multiples of a scale, such as ``"int8"``, ``"int4"``, ``"int4:128"`` or ``"int4,head=int8"``: see
        ``docs/quantization.md``. For a checkpoint that is not quantized.
    adapter : path, optional
        A folder of PEFT with a LoRA adapter, which is merged into the weights before ``quantize`` rounds them: see ``docs/adapters.md``.
    adapters_rank : int, optional
        Make inputs for LoRA adapters, which a session exchanges without a build, and of which each slot has its own: most ranks of all
        adapters of a session together, rounded up to a multiple of 8. Not with ``adapter``, nor in segments: see ``docs/adapters.md``.
    adapters_modules : sequence of str, optional
        With ``adapters_rank``, the linear layers that adapters may change, by the ends of their names, such as ``("q_proj", "v_proj")``.
        If left out, all of attention, recurrent mixers and MLPs.
    max_embeddings : int
        Make an input for rows that prompts of a session may have in place of rows of the embedding, such as the features of an image: most
        different rows of a session, for ``InferenceSession.add_embeddings``. 0 for none: see ``docs/models.md``.
    draft_tree : int, optional
        Make an input for trees of draft tokens, with which ``verify`` takes ``parents``: most tokens of a tree, from 2 to 64, of which one
        enqueue returns all logits (``max_logits_per_slot`` is at least this). With plugin attention in one plan, and not with a plugin
        library or a registered attention: see ``docs/sessions.md``.
    draft_head : "mtp" or path, optional
        Build the engine of a draft head too, for ``draft=`` of a session, and have the engine of the model return the hidden states that
        the head reads: ``"mtp"`` for the multi-token prediction head in the model folder, or the folder of an EAGLE-3 head. Not in
        segments. ``max_logits_per_slot`` is 17 then, if left out: see ``docs/sessions.md``.
    kv_dtype : {"fp8", "float8_e4m3fn", "int8"}, optional
        Quantize K and V, with plugin attention. If left out they are in ``dtype``.
    kv_scales : {"tensor", "head", "token"}, optional
        As for :class:`~trt_kvcache.session.session_options.SessionOptions`.

    Raises
    ------
    ConfigError
        A value is out of range, or two values do not fit each other.

    Examples
    --------
    >>> from trt_kvcache.builder.options import BuildOptions
    >>> BuildOptions(max_batch_size=4, dtype="bf16").dtype
    'bfloat16'
    >>> BuildOptions(max_batch_size=0)
    Traceback (most recent call last):
        ...
    trt_kvcache.errors.ConfigError: max_batch_size: expected at least 1, got 0.
    """

    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_sequence_length: int | None = None
    max_prefill_length: int | None = None
    max_logits_per_slot: int | Literal["all"] = 1
    dtype: str | None = None
    attention: str = AUTO
    plugin_layers: str = ONE_PLAN
    plugin_library: str | os.PathLike[str] | None = None
    v_outputs: bool | None = None
    packed_kernels: bool = False
    operations: Mapping[str, str] | None = None
    flavour: str = "auto"
    device: int = 0
    embed_weights: bool = False
    compute_capabilities: Sequence[str] | None = None
    builder_optimization_level: int | None = None
    timing_cache: str | os.PathLike[str] | None = None
    quantize: str | None = None
    adapter: str | os.PathLike[str] | None = None
    adapters_rank: int | None = None
    adapters_modules: Sequence[str] | None = None
    max_embeddings: int = 0
    draft_tree: int | None = None
    draft_head: str | os.PathLike[str] | None = None
    kv_dtype: str | None = None
    kv_scales: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_sequence_length", "max_prefill_length"):
            self._normalize(name, partial(int_in_range, name, low=1, error=ConfigError))
        self._check_lengths()
        self._normalize("dtype", dtype_in_full)
        if self.dtype is not None:
            one_of("dtype", self.dtype, MODEL_DTYPES)
        one_of("attention", self.attention, ATTENTION_SETTINGS)
        one_of("plugin_layers", self.plugin_layers, PLUGIN_LAYERS)
        self._normalize("plugin_library", Path)
        self._check_plugin_library()
        if not isinstance(self.v_outputs, bool | None):
            raise ConfigError(f"v_outputs: expected True or False, got {short_repr(self.v_outputs)}.")
        if not isinstance(self.packed_kernels, bool):
            raise ConfigError(f"packed_kernels: expected True or False, got {short_repr(self.packed_kernels)}.")
        if self.packed_kernels and self.plugin_layers != ONE_PLAN:
            raise ConfigError(f"packed_kernels: expected plugin_layers={ONE_PLAN} with it, got {self.plugin_layers}.")
        self._normalize("operations", _as_operations)
        one_of("flavour", self.flavour, FLAVOURS)
        int_in_range("device", self.device, 0, error=ConfigError)
        self._normalize(
            "builder_optimization_level",
            partial(int_in_range, "builder_optimization_level", low=0, high=MAX_OPTIMIZATION_LEVEL, error=ConfigError),
        )
        self._normalize("compute_capabilities", _as_capabilities)
        self._normalize("timing_cache", Path)
        self._normalize("quantize", lambda text: str(Quantization.parse(text)))
        self._normalize("adapter", adapter_folder)
        self._normalize("adapters_rank", partial(int_in_range, "adapters_rank", low=1, high=MAX_DIMENSION - 7, error=ConfigError))
        self._normalize("adapters_modules", _as_modules)
        self._normalize("draft_head", _as_draft_head)
        self._check_adapters()
        object.__setattr__(self, "max_embeddings", int_in_range("max_embeddings", self.max_embeddings, 0, MAX_DIMENSION, error=ConfigError))
        self._normalize("draft_tree", partial(int_in_range, "draft_tree", low=2, high=MAX_TREE_TOKENS, error=ConfigError))
        self._check_draft_tree()

    def _normalize(self, name: str, convert: Callable[[Any], Any]) -> None:
        """Replace a value that was given by the converted one."""
        if getattr(self, name) is not None:
            object.__setattr__(self, name, convert(getattr(self, name)))

    def _check_lengths(self) -> None:
        length, width = self.max_sequence_length, self.max_prefill_length
        if length is not None and width is not None and width > length:
            raise ConfigError(
                f"max_prefill_length: expected at most max_sequence_length={length}, got {width}. "
                "Longer prompts are prefilled in chunks of this length."
            )
        if width is None:
            check_logits_per_slot(self.max_logits_per_slot)
        else:
            logits_per_slot(self.max_logits_per_slot, max_prefill_length=width)

    def _check_plugin_library(self) -> None:
        if self.plugin_library is None:
            return
        if self.plugin_layers != ONE_PLAN:
            raise ConfigError(
                f"plugin_library: expected with plugin_layers={ONE_PLAN}, got {self.plugin_layers}: segments have no plugin layers."
            )
        if self.packed_kernels:
            raise ConfigError("plugin_library: expected no packed_kernels with it, got both: these run in Python. Leave one out.")
        if self.operations:
            raise ConfigError(
                f"plugin_library: expected no operations with it, got {', '.join(self.operations)}: they run in Python. Leave one out."
            )

    def _check_adapters(self) -> None:
        if self.adapters_rank is None and self.adapters_modules is not None:
            raise ConfigError(f"adapters_modules: expected adapters_rank with it, got {', '.join(self.adapters_modules)} alone.")
        if self.adapters_rank is not None and self.adapter is not None:
            raise ConfigError(f"adapters_rank: expected none with adapter, which is merged, got {self.adapters_rank}.")

    def _check_draft_tree(self) -> None:
        if self.draft_tree is None:
            return
        if self.plugin_library is not None:
            raise ConfigError(f"draft_tree: expected no plugin_library with it, whose plugin takes chains only, got {self.plugin_library}.")
        replaced = (self.operations or {}).get(AttentionOp.name)
        if replaced is not None:
            raise ConfigError(f"draft_tree: expected no operation in place of {AttentionOp.name}, got {replaced}.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> BuildOptions:
        """Return the options that a caller gave by name.

        Parameters
        ----------
        options : mapping of str to object
            Fields.

        Returns
        -------
        BuildOptions
            With the defaults of the others.

        Raises
        ------
        ConfigError
            There is no such option, or a value is not one of its values.
        """
        option_names("build", options, [field.name for field in fields(BuildOptions)], OTHER_NAMES)
        return BuildOptions(**options)


def default_sequence_length(model: ModelConfig) -> int:
    """Return S for a caller that gave none."""
    limit = model.max_position_embeddings
    return min(limit, DEFAULT_MAX_SEQUENCE_LENGTH) if model.attention_layers else limit


def takes_build_options(function: _Function) -> _Function:
    """Show the fields of :class:`BuildOptions` in signature and docstring of a function that takes them as ``**options``."""
    return show_as_keywords(BuildOptions, function)


def _as_operations(given: Mapping[str, str]) -> dict[str, str]:
    """Return the names of registered operations by the names of the operations that they replace."""
    for replaced, name in given.items():
        one_of("operations", replaced, BUILT_IN_OPERATIONS)
        one_of(f"operations[{replaced!r}]", name, OPERATIONS)
    return dict(given)


def _as_modules(given: Sequence[str]) -> tuple[str, ...]:
    """Return the ends of names of modules as a tuple; a string is one. The model says later which it has."""
    modules = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not modules or not all(isinstance(one, str) for one in modules):
        raise ConfigError(f'adapters_modules: expected a sequence such as ("q_proj", "v_proj"), got {given!r}.')
    return modules


def _as_draft_head(given: str | os.PathLike[str]) -> str:
    """Return "mtp" or a path as a text. The build says later whether there is a head."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(f"draft_head: expected {MTP} or the folder of an EAGLE-3 head, got {given!r}.")
    return str(os.fspath(given))


def _as_capabilities(given: Sequence[str]) -> tuple[str, ...]:
    """Return compute capabilities as a tuple; a string is one. TensorRT says later which it knows."""
    capabilities = (given,) if isinstance(given, str) else tuple(given)
    if not capabilities or not all(isinstance(one, str) for one in capabilities):
        raise ConfigError(f'compute_capabilities: expected a sequence such as ("8.6", "12.0"), got {given!r}.')
    if len(set(capabilities)) != len(capabilities):
        raise ConfigError(f"compute_capabilities: expected each one once, got {', '.join(capabilities)}.")
    return capabilities
