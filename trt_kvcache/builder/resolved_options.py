"""``ResolvedOptions``: the options of a build with the model's defaults filled in, and their checks against model and TensorRT.

TensorRT accepts options that cannot work (a prefill that is longer than the cache is only a warning, a write beyond the cache not even
that), and its messages do not name the option at fault. So everything that is known to fail is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from trt_kvcache.builder.attention_choice import (
    HEAD_DIM_MAX,
    TURING,
    AttentionBuild,
    AttentionChoice,
    BuildTarget,
    choose_attention,
    next_choice,
)
from trt_kvcache.builder.options import DEFAULT_MAX_PREFILL_LENGTH, ONE_PLAN, SEGMENTS, BuildOptions, default_sequence_length
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.engine.adapter_inputs import AdapterInputs, most_slots, padded_rank
from trt_kvcache.engine.attention_variants import AUTO, AttentionName
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH, decoder_profiles, logits_per_slot
from trt_kvcache.engine.embedding_rows import embedding_tensors
from trt_kvcache.engine.hidden_tensors import hidden_tensors
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine.step_ancestors import tree_inputs
from trt_kvcache.engine.step_rows import HiddenLayers
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.kernels.attention_tiles import HEAD_DIMS
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.features import check_features
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.versions import check_plugins

#: Head dims that TensorRT has attention kernels for: multiples of the step, from the smallest to ``HEAD_DIM_MAX``.
HEAD_DIM_STEP, HEAD_DIM_MIN = 8, 16

#: Options of a build that its draft head does not have. ``v_outputs`` are those of the model.
_NOT_OF_HEADS = ("draft_head", "adapter", "adapters_rank", "adapters_modules", "kv_dtype", "kv_scales", "v_outputs")

#: Releases of full TensorRT that may corrupt the V that goes into a plugin layer: from the first, before the second.
CORRUPT_V = ((10, 13), (10, 15))

#: Names of :data:`~trt_kvcache.model.features.FEATURES` that the networks of this package compute.
COMPUTED_FEATURES: frozenset[str] = frozenset(
    {
        "activation",
        "branch_norms",
        "clamped_swiglu",
        "embedding_multiplier",
        "expert_scale",
        "experts",
        "final_softcap",
        "full_qk_norm",
        "fused_tensors",
        "gate_after_norm",
        "gated_delta_net",
        "interleaved_rope",
        "latent_experts",
        "layer_norm",
        "logits_divisor",
        "mamba2",
        "merged_input",
        "no_mixer",
        "no_mlp",
        "no_rope",
        "no_scan_norm",
        "norm_after_rope",
        "norm_offset",
        "norm_places",
        "norm_rounding",
        "output_gate",
        "output_scale",
        "parallel",
        "parallel_mixers",
        "partial_rotary",
        "per_layer_embeddings",
        "projection_multipliers",
        "query_scaling",
        "relu2",
        "residual_multiplier",
        "router_norm",
        "scale",
        "several_ropes",
        "several_shapes",
        "shared_expert",
        "shared_kv",
        "short_conv",
        "sinks",
        "softcap",
        "ungated_mlp",
        "window",
        "v_norm",
        "values_are_keys",
    }
)


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(BuildOptions):
    """Build options with the defaults of a model in place of everything that was left out: see :meth:`of_model`."""

    max_sequence_length: int
    max_prefill_length: int
    max_logits_per_slot: int
    dtype: str
    attention: AttentionName
    compute_capabilities: tuple[str, ...] | None
    timing_cache: Path | None
    plugin_library: Path | None
    v_outputs: bool
    choice: AttentionChoice  # of ``attention``
    adapter_inputs: AdapterInputs | None  # of ``adapters_rank`` and ``adapters_modules``
    hidden_layers: HiddenLayers | None = None  # hidden states that the engine returns: those that ``draft_head`` reads

    @classmethod
    def of_model(cls, options: BuildOptions, model: ModelConfig, target: BuildTarget | None = None) -> ResolvedOptions:
        """Fill in the defaults of a model. Without a target the TensorRT is not known."""
        if options.draft_tree is not None and model.recurrent_layers:
            raise ConfigError(f"draft_tree: expected a model without recurrent states, got {model.family}.")
        length = options.max_sequence_length or default_sequence_length(model)
        width = options.max_prefill_length or min(length, DEFAULT_MAX_PREFILL_LENGTH)
        target = target or BuildTarget.of_flavour(options.flavour)
        capabilities = None if options.compute_capabilities is None else tuple(options.compute_capabilities)
        choice = choose_attention(
            options.attention,
            AttentionBuild(
                model=model,
                target=replace(target, compute_capabilities=capabilities or target.compute_capabilities),
                dtype=options.dtype or model.dtype,
                kv_dtype=options.kv_dtype,
                max_sequence_length=length,
                operations=frozenset(options.operations or ()),
                has_plugin_library=options.plugin_library is not None,
                takes_trees=options.draft_tree is not None,
                packed_kernels=options.packed_kernels,
            ),
        )
        if options.plugin_library is not None and choice.variant != "plugin":
            raise ConfigError(f"plugin_library: expected plugin attention with it, got {choice.variant}.")
        if options.plugin_library is not None and not model.attention_layers:
            raise ConfigError(
                f"plugin_library: expected a model with attention layers, got {model.family}, whose engine has no plugin layers."
            )
        if options.packed_kernels and choice.variant != "plugin":
            raise ConfigError(f"packed_kernels: expected plugin attention with it, got {choice.variant}.")
        if options.operations and choice.variant != "plugin":
            raise ConfigError(f"operations: expected none with {choice.variant} attention, got {', '.join(options.operations)}.")
        if options.adapters_rank is not None and choice.variant == "plugin" and options.plugin_layers == SEGMENTS:
            raise ConfigError(f"adapters_rank: expected plugin_layers={ONE_PLAN} with it, got {SEGMENTS}.")
        if options.draft_head is not None and choice.variant == "plugin" and options.plugin_layers == SEGMENTS:
            raise ConfigError(f"draft_head: expected plugin_layers={ONE_PLAN} with it, got {SEGMENTS}.")
        for what, has in (
            ("experts", any(isinstance(layer.mlp, RoutedMlpConfig) for layer in model.layers)),
            ("attention sinks", any(mixer.sinks for mixer in model.attention_layers)),
        ):
            if has and options.plugin_layers == SEGMENTS:
                raise ConfigError(f"plugin_layers: expected {ONE_PLAN} for a model with {what} ({model.family}), got {SEGMENTS}.")
            if has and options.plugin_library is not None:
                raise ConfigError(
                    f"plugin_library: expected a model without {what}, got {model.family}: their plugin layers run in Python. Leave it out."
                )
        _check_draft_tree(options, choice.variant, width)
        replaced = (options.operations or {}).get(EmbeddingOp.name)
        if replaced is not None and model.per_layer_embedding is not None:
            raise ConfigError(
                f"operations: expected none in place of {EmbeddingOp.name} for a model with per-layer embeddings, which are of token ids, "
                f"got {replaced}."
            )
        _check_embeddings(options, model, replaced)
        chosen = {
            "max_sequence_length": length,
            "max_prefill_length": width,
            "max_logits_per_slot": _logits(options, width),
            "dtype": options.dtype or model.dtype,
            "attention": choice.variant,
            "v_outputs": _v_outputs(options, model, choice, target),
            "choice": choice,
            "adapter_inputs": None
            if options.adapters_rank is None
            else AdapterInputs.of(model, rank=padded_rank(options.adapters_rank), modules=options.adapters_modules),
        }
        return cls(**{**vars(options), **chosen})

    def of_draft_head(self, head: ModelConfig, target: BuildTarget | None = None) -> ResolvedOptions:
        """Return the options of the build of the draft head, with the sizes of the model as far as the head has positions."""
        length = min(self.max_sequence_length, head.max_position_embeddings)
        own = {
            **{field.name: getattr(self, field.name) for field in fields(BuildOptions)},
            **dict.fromkeys(_NOT_OF_HEADS),
            "max_sequence_length": length,
            "max_prefill_length": min(self.max_prefill_length, length),
            "max_logits_per_slot": 1,
            "max_embeddings": 0,
            "attention": AUTO if self.choice.is_auto else self.attention,
            "packed_kernels": self.packed_kernels and head.eagle3_input is None,  # weights of other heads are not packed
            "embed_weights": self.embed_weights and head.eagle3_input is not None,  # the copy of the model has its MTP head
        }
        resolved = ResolvedOptions.of_model(BuildOptions(**own), head, target)
        return replace(
            resolved,
            v_outputs=self.v_outputs and resolved.attention == "plugin",
            # In a draft of several tokens, an MTP head continues from its output after the norm, an EAGLE-3 head from its output before it.
            hidden_layers="final_norm" if head.eagle3_input is None else (head.num_layers,),
        )

    def next_attention(self) -> ResolvedOptions | None:
        """Return the options of the next variant of ``auto``; None if there is no other."""
        choice = next_choice(self.choice)
        if choice is None:
            return None
        return replace(self, attention=choice.variant, v_outputs=self.v_outputs and choice.variant == "plugin", choice=choice)

    @property
    def in_segments(self) -> bool:
        """True for an engine of a plan for each segment, with operations between them."""
        return self.attention == "plugin" and self.plugin_layers == SEGMENTS

    @property
    def profiles(self) -> tuple[EngineProfile, ...]:
        """The optimisation profiles of the engine."""
        return decoder_profiles(
            max_batch_size=self.max_batch_size,
            max_prefill_length=self.max_prefill_length,
            max_logits_per_slot=self.max_logits_per_slot,
            draft_tree=self.draft_tree,
        )

    def tree_tensors(self, model: ModelConfig) -> tuple[TensorSpec, ...]:
        """Return the inputs for trees of draft tokens; none without ``draft_tree``."""
        return () if self.draft_tree is None else tree_inputs(model, most_slots(self.profiles))

    def adapter_tensors(self, model: ModelConfig) -> tuple[TensorSpec, ...]:
        """Return the inputs for adapters; none without ``adapters_rank``."""
        inputs = self.adapter_inputs
        return () if inputs is None else inputs.tensors(model, slots=most_slots(self.profiles), dtype=self.dtype)

    def hidden_tensors(self, model: ModelConfig) -> tuple[TensorSpec, ...]:
        """Return the tensors of hidden states; none without ``draft_head``."""
        return hidden_tensors(model, self.hidden_layers, self.profiles, self.dtype)

    def embedding_tensors(self, model: ModelConfig) -> tuple[TensorSpec, ...]:
        """Return the input for rows in place of rows of the embedding; none without ``max_embeddings``."""
        return embedding_tensors(model, self.max_embeddings, self.dtype)

    def cache_for(self, model: ModelConfig, quantized: QuantizedKV | None = None) -> DecoderCacheConfig:
        """Return the configuration of the engine's cache, after checking that the model can be built with these options."""
        check_features(model, COMPUTED_FEATURES, "TensorRT's network", way_out='engine="torch" and engine="numpy" do.')
        ours = HEAD_DIMS if self.attention == "plugin" else ()
        for head_dim in sorted({mixer.head_dim for mixer in model.attention_layers}.difference(ours)):
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
        if self.dtype == "bfloat16" and TURING in (self.compute_capabilities or ()):
            raise ConfigError(f"dtype: GPUs of compute capability {TURING} have no bfloat16. Build with dtype float16.")
        return decoder_cache_config(
            model,
            max_batch_size=self.max_batch_size,
            max_sequence_length=self.max_sequence_length,
            dtype=self.dtype,
            attention=self.attention,
            quantized=quantized,
        )

    def check_tensorrt(self, tensorrt: TensorRT) -> None:
        """Check that a TensorRT can build with these options."""
        if self.attention == "plugin" and not self.in_segments:
            try:
                check_plugins(tensorrt)
            except EngineError as error:
                raise ConfigError(f"attention: {error}") from None
        if self.plugin_library is not None and not hasattr(tensorrt.module.IBuilderConfig, "plugins_to_serialize"):
            raise ConfigError(
                f"plugin_library: expected a TensorRT whose engines carry plugin libraries (plugins_to_serialize), got {tensorrt}."
            )
        if self.in_segments and not tensorrt.is_rtx:
            raise ConfigError(f"plugin_layers: expected {ONE_PLAN}, got {SEGMENTS}: these are for TensorRT for RTX, {tensorrt} was chosen.")
        if self.timing_cache is not None and tensorrt.is_rtx:
            raise ConfigError("timing_cache: expected with full TensorRT only; TensorRT for RTX measures no kernels when it builds.")
        check_capabilities(self, tensorrt)


def _logits(options: BuildOptions, width: int) -> int:
    """Return the most tokens per slot whose logits an enqueue returns: those of a tree, and of a draft if there is a head that drafts."""
    found = logits_per_slot(options.max_logits_per_slot, max_prefill_length=width)
    drafted = min(VERIFY_WIDTH, width) if found == 1 and options.draft_head is not None else found
    return max(drafted, options.draft_tree or 1)


def _check_embeddings(options: BuildOptions, model: ModelConfig, replaced: str | None) -> None:
    """Refuse rows in place of rows of the embedding for a model that needs more for them, or with an operation that knows no such ids."""
    if not options.max_embeddings:
        return
    needed = FAMILIES[model.family].images_need
    if model.per_layer_embedding is not None:
        needed = "per-layer embeddings, which are of token ids"
    if needed:
        raise ConfigError(f"max_embeddings: expected 0 for {model.family}, which needs {needed}, got {options.max_embeddings}.")
    most = MAX_DIMENSION // model.hidden_size  # kernels of TensorRT compute offsets in 32 bits
    if options.max_embeddings > most:
        raise ConfigError(f"max_embeddings: expected at most {most}, as a tensor of TensorRT holds, got {options.max_embeddings}.")
    if replaced is not None:
        raise ConfigError(
            f"operations: expected none in place of {EmbeddingOp.name} with max_embeddings, ids past the vocabulary, got {replaced}."
        )


def _check_draft_tree(options: BuildOptions, variant: AttentionName, width: int) -> None:
    """Check that a build can have an input for trees, if the caller wants it."""
    if options.draft_tree is None:
        return
    if variant != "plugin":
        raise ConfigError(f"draft_tree: expected plugin attention with it, got {variant}.")
    if options.plugin_layers == SEGMENTS:
        raise ConfigError(f"draft_tree: expected plugin_layers={ONE_PLAN} with it, got {SEGMENTS}.")
    if options.draft_tree > width:
        raise ConfigError(f"draft_tree: expected at most max_prefill_length={width}, got {options.draft_tree}.")


def _v_outputs(options: BuildOptions, model: ModelConfig, choice: AttentionChoice, target: BuildTarget) -> bool:
    """Return whether the V of plugin layers is an output, after checking that there are such layers if the caller wants it."""
    has_plugin_layers = choice.variant == "plugin" and bool(model.attention_layers) and options.plugin_layers == ONE_PLAN
    is_possible = has_plugin_layers and not target.is_rtx
    if options.v_outputs and not is_possible:
        got = f"{choice.variant} attention" if model.attention_layers else f"{model.family}, which has no attention layers"
        raise ConfigError(f"v_outputs: expected plugin layers of full TensorRT with it, got {got} with {target.tensorrt}.")
    if options.v_outputs is not None:
        return options.v_outputs
    first, end = CORRUPT_V
    return is_possible and target.release is not None and first <= target.release < end


def check_capabilities(options: BuildOptions, tensorrt: TensorRT) -> None:
    """Check that a TensorRT can build for the compute capabilities that were given."""
    if options.compute_capabilities is None:
        return
    if not tensorrt.is_rtx:
        raise ConfigError("compute_capabilities: full TensorRT builds for the GPU it runs on. Build with flavour tensorrt_rtx.")
    known = known_compute_capabilities(tensorrt)
    for one in options.compute_capabilities:
        if one not in known:
            raise ConfigError(f"compute_capabilities: expected some of {', '.join(known)} ({tensorrt}), got {one!r}.")


def known_compute_capabilities(tensorrt: TensorRT) -> dict[str, object]:
    """Return members of ``ComputeCapability`` of TensorRT for RTX by name, such as ``"8.6"``."""
    members = tensorrt.module.ComputeCapability.__members__
    return {f"{name[2:-1]}.{name[-1]}": member for name, member in members.items() if name.startswith("SM")}
