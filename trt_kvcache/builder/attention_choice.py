"""``choose_attention``: the variant of attention of a build, by rules with reasons.

The first rule that applies lists the variants in the order in which ``auto`` tries them. A variant with an obstacle is left out.
``docs/attention_table.py`` writes the rules into docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from trt_kvcache.engine.attention_variants import (
    ATTENTION_VARIANTS,
    AUTO,
    AttentionName,
    attention_variant,
    why_not_native,
)
from trt_kvcache.engine_folder.decoder_segments import attention_op_attributes, rope_kind
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, MAX_GROUP
from trt_kvcache.kernels.linear_kernels import INPUT_GRANULE
from trt_kvcache.kernels.router_kernels import MAX_EXPERTS
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.expert_attributes import why_not_in_kernels
from trt_kvcache.ops.experts_op import ExpertsOp

#: Compute capability without bfloat16, and without the attention kernels of this package.
TURING = "7.5"

#: The widest heads of TensorRT's own attention.
HEAD_DIM_MAX = 256

_ONLY_PLUGIN_TAKES_TREES = "no other variant takes trees of draft tokens"

#: Tokens of a slot beyond which the decode kernel of TensorRT for RTX, which reads all rows of the cache, is worth a line.
LONG_CACHE = 4096

#: Releases of full TensorRT whose attention is wrong, or does not build, with key lengths: from the first, before the second.
UNSAFE_NATIVE = ((11, 0), (11, 3))

_UNSAFE_WORDS = (
    "with key lengths, its builder fails in FP16, and in BF16 attention reads stale rows of the cache on some GPUs "
    "(NVIDIA/TensorRT-Model-Connect, issue 955)"
)


@dataclass(frozen=True, kw_only=True)
class BuildTarget:
    """The TensorRT of a build, and the GPUs of its engine."""

    tensorrt: str  # for messages
    is_rtx: bool
    release: tuple[int, ...] | None = None  # (major, minor); None if it is not known
    compute_capabilities: tuple[str, ...] | None = None  # None if they are not known, or all
    doctor_passed: bool = False  # on the GPU of this machine, with its driver and this TensorRT, and the engine is for that GPU too

    @classmethod
    def of_flavour(cls, flavour: str) -> BuildTarget:
        """Return the target of an estimate where TensorRT is not installed."""
        is_rtx = flavour != "tensorrt"
        return cls(tensorrt="TensorRT for RTX" if is_rtx else "full TensorRT", is_rtx=is_rtx)


@dataclass(frozen=True, kw_only=True)
class AttentionBuild:
    """A build as far as the choice depends on it."""

    model: ModelConfig
    target: BuildTarget
    dtype: str
    kv_dtype: str | None
    max_sequence_length: int
    operations: frozenset[str] = frozenset()  # that the caller replaces
    has_plugin_library: bool = False
    takes_trees: bool = False
    packed_kernels: bool = False

    @property
    def routed_mlps(self) -> tuple[RoutedMlpConfig, ...]:
        """The MLPs with experts."""
        return tuple(layer.mlp for layer in self.model.layers if isinstance(layer.mlp, RoutedMlpConfig))


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The variant of attention of a build, with the reason."""

    variant: AttentionName
    reason: str
    others: tuple[AttentionName, ...]  # that may be tried if it does not build, in order
    is_auto: bool  # False if the caller named the variant


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A line of the table of choices."""

    tensorrt: str  # for the table
    condition: str  # for the table
    order: tuple[AttentionName, ...]
    reason: str
    applies: Callable[[AttentionBuild], bool]


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """A line of the table of obstacles. ``find`` returns the reason that a build cannot have the variant, or None."""

    variant: AttentionName
    condition: str  # for the table
    find: Callable[[AttentionBuild], str | None]


def _too_old(name: AttentionName) -> Obstacle:
    variant = attention_variant(name)

    def find(build: AttentionBuild) -> str | None:
        target, first = build.target, variant.first_rtx if build.target.is_rtx else variant.first_tensorrt
        if target.release is None or target.release >= first:
            return None
        return f"{target.tensorrt} has no {variant.needs} ({'.'.join(map(str, first))} has)"

    words = f"TensorRT for RTX before {variant.first_rtx_release}, full TensorRT before {variant.first_release}: no {variant.needs}"
    return Obstacle(variant=name, condition=words, find=find)


def native_defect(target: BuildTarget) -> str | None:
    """Return why native attention is not built with a release of TensorRT that has its layers, or None."""
    first, end = UNSAFE_NATIVE
    is_unsafe = not target.is_rtx and target.release is not None and first <= target.release < end
    return f"{target.tensorrt}: {_UNSAFE_WORDS}" if is_unsafe else None


def _rotates_other_keys(build: AttentionBuild) -> str | None:
    """Return the first layer that would rotate the keys of another one in another way: it appends them to the cache again."""
    layers = build.model.layers
    for index, mixer in zip(build.model.attention_indices, build.model.attention_layers, strict=True):
        source = mixer.kv_source_layer
        if source is not None and rope_kind(mixer.after_norms) != rope_kind(layers[source].attention.after_norms):
            return (
                f"layers[{index}].mixer.kv_source_layer = {source}, whose RoPE is another, and each plugin layer rotates the keys it reads"
            )
    return None


def _not_in_kernels(build: AttentionBuild) -> str | None:
    """Return why the attention kernels of this package, unless the caller replaces them, cannot run a model."""
    if AttentionOp.name in build.operations:
        return None
    if TURING in (build.target.compute_capabilities or ()):
        return f"compute_capabilities: expected 8.0 or more for plugin attention, got {TURING}"
    for mixer in build.model.attention_layers:
        for what, value, known in (("dtype", build.dtype, (*ELEMENT_TYPES,)), ("head_dim", mixer.head_dim, HEAD_DIMS)):
            if value not in known:
                return f"{what}: expected one of {', '.join(map(str, known))} for plugin attention, got {value}"
        if mixer.group > MAX_GROUP:
            return f"num_attention_heads: expected at most {MAX_GROUP} for each K/V head for plugin attention, got {mixer.group}"
        attributes = attention_op_attributes(mixer, max_sequence_length=build.max_sequence_length)
        try:
            AttentionOp(**attributes).kernel_attributes()  # type: ignore[arg-type]  # each of its type
        except ConfigError as error:
            return str(error).removesuffix(".")
    return None


def _experts_not_in_kernels(build: AttentionBuild) -> str | None:
    """Return why the kernels of this package, unless the caller replaces them, cannot compute the experts of a model."""
    if ExpertsOp.name in build.operations:
        return None
    if build.routed_mlps and TURING in (build.target.compute_capabilities or ()):
        return f"compute_capabilities: expected 8.0 or more for experts, got {TURING}"
    found = (why_not_in_kernels(mlp, build.model.hidden_size, build.dtype) for mlp in dict.fromkeys(build.routed_mlps))
    return next((why for why in found if why is not None), None)


def _has_experts(variant: AttentionName) -> Obstacle:
    def find(build: AttentionBuild) -> str | None:
        return f"experts: only plugin layers compute them, {variant} attention has none" if build.routed_mlps else None

    return Obstacle(variant=variant, condition="experts, which are plugin layers", find=find)


def _has_sinks(variant: AttentionName) -> Obstacle:
    def find(build: AttentionBuild) -> str | None:
        found = any(mixer.sinks for mixer in build.model.attention_layers)
        return f"attention sinks: expected plugin attention, got {variant}" if found else None

    return Obstacle(variant=variant, condition="attention sinks, which only kernels of this package have", find=find)


def _too_wide(variant: AttentionName) -> Obstacle:
    def find(build: AttentionBuild) -> str | None:
        wide = {mixer.head_dim for mixer in build.model.attention_layers if mixer.head_dim > HEAD_DIM_MAX}
        return f"head_dim: expected at most {HEAD_DIM_MAX} for {variant} attention, got {max(wide)}" if wide & {*HEAD_DIMS} else None

    ours = " and ".join(str(head_dim) for head_dim in HEAD_DIMS if head_dim > HEAD_DIM_MAX)
    return Obstacle(variant=variant, condition=f"a head dim of {ours}, for which only this package has kernels", find=find)


_KERNEL_LIMITS = (
    f"head dims other than {', '.join(map(str, HEAD_DIMS))}; more than {MAX_GROUP} query heads for a K/V head; float32; "
    f"compute capability {TURING}; partial RoPE of a number of elements that is no multiple of 4"
)

_EXPERT_LIMITS = (
    f"experts in float32; on compute capability {TURING}; more than {MAX_EXPERTS} of them; with sizes that are no multiples of "
    f"{INPUT_GRANULE}"
)

OBSTACLES = (
    _too_old("plugin"),
    Obstacle(variant="plugin", condition="layers that read K and V of a layer with another RoPE", find=_rotates_other_keys),
    Obstacle(variant="plugin", condition=_KERNEL_LIMITS, find=_not_in_kernels),
    Obstacle(variant="plugin", condition=_EXPERT_LIMITS, find=_experts_not_in_kernels),
    _too_old("native"),
    Obstacle(variant="native", condition=f"full TensorRT 11.0 to 11.2: {_UNSAFE_WORDS}", find=lambda build: native_defect(build.target)),
    Obstacle(
        variant="native",
        condition="sliding windows smaller than `max_sequence_length`, soft-capped scores",
        find=lambda build: why_not_native(build.model, build.max_sequence_length),
    ),
    _too_wide("native"),
    _has_experts("native"),
    _has_sinks("native"),
    _too_old("mask"),
    _too_wide("mask"),
    _has_experts("mask"),
    _has_sinks("mask"),
)

#: The first that applies. ``native`` is in no order of full TensorRT with attention: it is taken there only if it is named.
RULES = (
    Rule(
        tensorrt="both",
        condition="K and V in 8 bits (`--kv-dtype`)",
        order=("plugin",),
        reason="no other variant supports 8-bit K and V",
        applies=lambda build: build.kv_dtype is not None,
    ),
    Rule(
        tensorrt="both",
        condition="operations of the caller (`operations`)",
        order=("plugin",),
        reason="no other variant has plugin layers",
        applies=lambda build: bool(build.operations),
    ),
    Rule(
        tensorrt="both",
        condition="kernels of this package for packed weights (`--packed-kernels`)",
        order=("plugin",),
        reason="no other variant has plugin layers",
        applies=lambda build: build.packed_kernels,
    ),
    Rule(
        tensorrt="both",
        condition="a plugin library (`--plugin-library`)",
        order=("plugin",),
        reason="no other variant has plugin layers",
        applies=lambda build: build.has_plugin_library,
    ),
    Rule(
        tensorrt="both",
        condition="experts",
        order=("plugin",),
        reason="experts are plugin layers, and no other variant has plugin layers",
        applies=lambda build: bool(build.routed_mlps),
    ),
    Rule(
        tensorrt="both",
        condition="trees of draft tokens (`--draft-tree`)",
        order=("plugin",),
        reason=_ONLY_PLUGIN_TAKES_TREES,
        applies=lambda build: build.takes_trees,
    ),
    Rule(
        tensorrt="both",
        condition="a model without attention layers",
        order=("native", "mask", "plugin"),
        reason="the model has no attention layers",
        applies=lambda build: not build.model.attention_layers,
    ),
    Rule(
        tensorrt="for RTX",
        condition="`trt-kvcache doctor` has passed on the GPU of this machine, with its driver and this TensorRT, and the engine is for "
        "that GPU",
        order=("plugin", "native", "mask"),
        reason="doctor has passed on this GPU with this driver and TensorRT",
        applies=lambda build: build.target.is_rtx and build.target.doctor_passed,
    ),
    Rule(
        tensorrt="for RTX",
        condition="otherwise",
        order=("native", "mask", "plugin"),
        reason="doctor has not passed on this machine, so plugin attention is not the first choice",
        applies=lambda build: build.target.is_rtx,
    ),
    Rule(
        tensorrt="full",
        condition="otherwise",
        order=("plugin", "mask"),
        reason="its kernels read live rows only, and every full TensorRT from 10.3 on supports it",
        applies=lambda build: not build.target.is_rtx,
    ),
)


def why_not(variant: AttentionName, build: AttentionBuild) -> str | None:
    """Return the first obstacle of a variant in a build, or None."""
    return next((why for one in OBSTACLES if one.variant == variant and (why := one.find(build)) is not None), None)


def choose_attention(named: str, build: AttentionBuild) -> AttentionChoice:
    """Return the variant that was named, or the one of the rules for ``auto``. Raises ConfigError if the build cannot have it."""
    if named != AUTO:
        return _named(attention_variant(named).name, build)
    rule = next(rule for rule in RULES if rule.applies(build))
    obstacles = {variant: why_not(variant, build) for variant in rule.order}
    possible = tuple(variant for variant, why in obstacles.items() if why is None)
    refused = "; ".join(f"{variant}: {why}" for variant, why in obstacles.items() if why is not None)
    chosen_by = (
        f"kv_dtype={build.kv_dtype}" if build.kv_dtype is not None else "draft_tree" if rule.reason == _ONLY_PLUGIN_TAKES_TREES else None
    )
    if not possible and chosen_by is not None:
        raise ConfigError(f"{obstacles['plugin']}. {chosen_by} chose plugin attention: {rule.reason}.")
    if not possible:
        way_out = ' engine="torch" and engine="numpy" run it.' if build.routed_mlps else ""
        raise ConfigError(
            f"attention: expected a variant that {build.target.tensorrt} can build for this model, got none: {refused}.{way_out}"
        )
    variant = possible[0]
    first = rule.order[0]
    reason = rule.reason if variant == first else f"{first} is not possible ({obstacles[first]})"
    return AttentionChoice(variant=variant, reason=reason + _slow_decode(variant, build), others=possible[1:], is_auto=True)


def next_choice(choice: AttentionChoice) -> AttentionChoice | None:
    """Return the choice after the build of this one has failed; None if the caller named it, or there is no other."""
    if not choice.is_auto or not choice.others:
        return None
    return replace(choice, variant=choice.others[0], others=choice.others[1:], reason=f"{choice.variant} could not be built")


def _named(variant: AttentionName, build: AttentionBuild) -> AttentionChoice:
    """Return the choice of a caller, after checking that the build can have it."""
    others = (
        ()
        if build.kv_dtype or build.has_plugin_library or build.takes_trees
        else tuple(one for one in ATTENTION_VARIANTS if one != variant and why_not(one, build) is None)
    )
    obstacle = why_not(variant, build)
    if obstacle is not None:
        expected = " or ".join(others) or "another TensorRT or model"
        raise ConfigError(f"attention: expected {expected}, got {variant}: {obstacle}.")
    return AttentionChoice(variant=variant, reason="it was named" + _slow_decode(variant, build), others=others, is_auto=False)


def _slow_decode(variant: AttentionName, build: AttentionBuild) -> str:
    """Return a sentence on the rows that TensorRT's decode kernel reads; empty for short caches."""
    length = build.max_sequence_length
    if variant == "plugin" or not build.target.is_rtx or not build.model.attention_layers or length <= LONG_CACHE:
        return ""
    advice = "--attention plugin reads live rows only" if why_not("plugin", build) is None else "a smaller --max-sequence-length is faster"
    return f". Each decode step reads all {length} rows of a slot, however short its text: {advice}"
