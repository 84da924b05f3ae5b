"""Features of models beyond Llama, by name, so that an engine can refuse what it does not compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig
from trt_kvcache.model.mlp_config import ClampedSwiGLU, MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.recurrent_config import Mamba2Config, RecurrentConfig
from trt_kvcache.model.weight_parts import has_fused_tensors, has_interleaved_rope

#: All features with a description.
FEATURES = {
    "short_conv": "short convolutions",
    "mamba2": "Mamba-2",
    "gated_delta_net": "Gated DeltaNet",
    "parallel_mixers": "attention and a recurrent mixer in one layer",
    "no_scan_norm": "Mamba-2 without a norm",
    "gate_after_norm": "Mamba-2 with the gate after the norm",
    "experts": "mixture of experts (MoE)",
    "shared_expert": "a shared expert",
    "latent_experts": "experts of another width",
    "router_norm": "normalised input of the router",
    "expert_scale": "learned scales of experts",
    "branch_norms": "norms of experts and shared expert",
    "no_mlp": "layers without an MLP",
    "no_mixer": "MLP-only layers",
    "window": "sliding window",
    "softcap": "attention logit softcapping",
    "scale": "custom attention scale",
    "query_scaling": "position-scaled queries",
    "output_gate": "gated attention",
    "v_norm": "RMSNorm of v",
    "values_are_keys": "keys as values",
    "shared_kv": "shared K/V",
    "sinks": "attention sinks",
    "no_rope": "layers without RoPE (NoPE)",
    "partial_rotary": "partial RoPE",
    "interleaved_rope": "interleaved RoPE",
    "several_ropes": "per-layer RoPE",
    "full_qk_norm": "QK-norm over all heads",
    "norm_after_rope": "QK-norm after RoPE",
    "several_shapes": "layers of different sizes",
    "norm_offset": "RMSNorm with 1 + weight",
    "norm_rounding": "RMSNorm weight in float32",
    "layer_norm": "LayerNorm",
    "norm_places": "post-norm",
    "parallel": "parallel attention and MLP",
    "activation": "GELU",
    "relu2": "squared ReLU",
    "clamped_swiglu": "clamped SwiGLU",
    "ungated_mlp": "MLP without a gate",
    "residual_multiplier": "scaled residuals",
    "projection_multipliers": "scaled projections",
    "per_layer_embeddings": "per-layer embeddings",
    "output_scale": "learned layer scales",
    "embedding_multiplier": "scaled embeddings",
    "final_softcap": "final logit softcapping",
    "logits_divisor": "scaled logits",
    "fused_tensors": "fused weight tensors",
    "merged_input": "hidden states as an input (MTP or EAGLE-3 head, assistant)",
}


#: Activations of MLPs that count as features.
_ACTIVATIONS = {"gelu_tanh": "activation", "relu2": "relu2"}


def features(model: ModelConfig) -> dict[str, str]:
    """Return the features that a model needs, by name, each with the first layer or part that needs it."""
    found: dict[str, str] = {}
    for name, place in _places(model):
        found.setdefault(name, place)
    return found


def first_missing(model: ModelConfig, computed: Collection[str]) -> str | None:
    """Return a feature that a model needs and that is not in ``computed``; None if there is none."""
    return next((name for name in features(model) if name not in computed), None)


def check_features(model: ModelConfig, computed: Collection[str], engine: str, *, way_out: str = 'engine="numpy" does.') -> None:
    """Raise ConfigError if a model needs a feature that is not in ``computed``. ``engine``: its name in the message."""
    for name, place in features(model).items():
        if name not in computed:
            raise ConfigError(f"{place}: {engine} does not support {FEATURES[name]} yet ({model.family}). {way_out}")


def _places(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield from _attention_places(model)
    first_sizes = next((sizes for sizes in map(_sizes, model.layers) if sizes), ())
    for index, layer in enumerate(model.layers):
        if layer.mixer is None:
            yield "no_mixer", f"layers[{index}].mixer = None"
        if layer.parallel_mixer is not None:
            yield "parallel_mixers", f"layers[{index}].parallel_mixer.kind = {layer.parallel_mixer.kind}"
        if layer.recurrence is not None:
            name = "mixer" if layer.parallel_mixer is None else "parallel_mixer"
            yield from _recurrence_places(layer.recurrence, f"layers[{index}].{name}")
        if _sizes(layer) not in ((), first_sizes):
            yield "several_shapes", f"layers[{index}] = {_sizes(layer)}"
        if _has_norms_elsewhere(layer):
            yield "norm_places", f"layers[{index}] norms"
        if layer.parallel:
            yield "parallel", f"layers[{index}].parallel = True"
        yield from _mlp_places(layer.mlp, f"layers[{index}].mlp")
        for name in ("residual_multiplier", "parallel_mixer_multiplier", "mlp_residual_multiplier"):
            if getattr(layer, name) not in (1, None):
                yield "residual_multiplier", f"layers[{index}].{name} = {getattr(layer, name)}"
        if layer.per_layer_input is not None:
            yield "per_layer_embeddings", f"layers[{index}].per_layer_input.size = {layer.per_layer_input.size}"
        if layer.output_scale:
            yield "output_scale", f"layers[{index}].output_scale = True"
    for place, norm in _norms(model):
        if norm.weight_offset:
            yield "norm_offset", f"{place}.weight_offset = {norm.weight_offset}"
        if norm.centered:
            yield "layer_norm", f"{place}.centered = True"
        elif not norm.rounds_before_weight:
            yield "norm_rounding", f"{place}.rounds_before_weight = False"
    if model.embedding_multiplier != 1:
        yield "embedding_multiplier", f"embedding_multiplier = {model.embedding_multiplier}"
    if model.final_softcap is not None:
        yield "final_softcap", f"final_softcap = {model.final_softcap}"
    if model.logits_divisor != 1:
        yield "logits_divisor", f"logits_divisor = {model.logits_divisor}"
    if model.merge_norm is not None:
        yield "merged_input", "merge_norm"
    if model.eagle3_input is not None:
        yield "merged_input", "eagle3_input"
    if model.assistant_input is not None:
        yield "merged_input", "assistant_input"
    if has_interleaved_rope(model):
        yield "interleaved_rope", "rows of q and k"
    if has_fused_tensors(model):
        yield "fused_tensors", "names of weights"


def _mlp_places(mlp: MlpConfig | RoutedMlpConfig | None, place: str) -> Iterator[tuple[str, str]]:
    if mlp is None:
        yield "no_mlp", f"{place} = None"
    elif isinstance(mlp, RoutedMlpConfig):
        yield "experts", f"{place}.router.num_experts = {mlp.router.num_experts}"
        if mlp.latent_size is not None:
            yield "latent_experts", f"{place}.latent_size = {mlp.latent_size}"
        if mlp.router.norm_epsilon is not None:
            yield "router_norm", f"{place}.router.norm_epsilon = {mlp.router.norm_epsilon}"
        if mlp.router.expert_scale:
            yield "expert_scale", f"{place}.router.expert_scale = True"
        if mlp.branch_norm is not None:
            yield "branch_norms", f"{place}.branch_norm"
        yield from _mlp_places(mlp.expert, f"{place}.expert")
        if mlp.shared is not None:
            yield "shared_expert", f"{place}.shared"
            yield from _mlp_places(mlp.shared, f"{place}.shared")
    else:
        if isinstance(mlp.activation, ClampedSwiGLU):
            yield "clamped_swiglu", f"{place}.activation = {mlp.activation}"
        elif mlp.activation in _ACTIVATIONS:
            yield _ACTIVATIONS[mlp.activation], f"{place}.activation = {mlp.activation}"
        if not mlp.gated:
            yield "ungated_mlp", f"{place}.gated = False"
        if mlp.gate_multiplier != 1:
            yield "projection_multipliers", f"{place}.gate_multiplier = {mlp.gate_multiplier}"


def _recurrence_places(mixer: RecurrentConfig, place: str) -> Iterator[tuple[str, str]]:
    yield mixer.kind, f"{place} = {mixer}"
    if not isinstance(mixer, Mamba2Config):
        return
    if mixer.norm is None:
        yield "no_scan_norm", f"{place}.norm = None"
    if not mixer.gate_first:
        yield "gate_after_norm", f"{place}.gate_first = False"
    if mixer.input_multiplier != 1:
        yield "projection_multipliers", f"{place}.input_multiplier = {mixer.input_multiplier}"
    if mixer.projection_multipliers:
        yield "projection_multipliers", f"{place}.projection_multipliers = {mixer.projection_multipliers}"


def _attention_places(model: ModelConfig) -> Iterator[tuple[str, str]]:
    first_rope = next((mixer.rope for mixer in model.attention_layers if mixer.rope is not None), None)
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig):
            continue
        for name in ("window", "softcap", "scale", "query_scaling"):
            value = getattr(mixer, name)
            if value is not None:
                yield name, f"layers[{index}].mixer.{name} = {value}"
        if mixer.output_gate:
            yield "output_gate", f"layers[{index}].mixer.output_gate = True"
        if mixer.input_multiplier != 1:
            yield "projection_multipliers", f"layers[{index}].mixer.input_multiplier = {mixer.input_multiplier}"
        if mixer.v_norm_epsilon is not None:
            yield "v_norm", f"layers[{index}].mixer.v_norm_epsilon = {mixer.v_norm_epsilon}"
        if mixer.values_are_keys:
            yield "values_are_keys", f"layers[{index}].mixer.values_are_keys = True"
        if mixer.kv_source_layer is not None:
            yield "shared_kv", f"layers[{index}].mixer.kv_source_layer = {mixer.kv_source_layer}"
        if mixer.sinks:
            yield "sinks", f"layers[{index}].mixer.sinks = True"
        if mixer.rope is None:
            yield "no_rope", f"layers[{index}].mixer.rope = None"
        elif mixer.rotary_dim != mixer.head_dim:
            yield "partial_rotary", f"layers[{index}].mixer.rope.partial_rotary_factor = {mixer.rope.partial_rotary_factor}"
        if mixer.rope not in (None, first_rope):
            yield "several_ropes", f"layers[{index}].mixer.rope"
        if mixer.qk_norm is not None and mixer.qk_norm.over == "full":
            yield "full_qk_norm", f"layers[{index}].mixer.qk_norm.over = full"
        if mixer.rotates_before_norm:
            yield "norm_after_rope", f"layers[{index}].mixer.qk_norm.after_rope = True"


def _norms(model: ModelConfig) -> Iterator[tuple[str, NormConfig]]:
    """Return all norms with their locations."""
    for index, layer in enumerate(model.layers):
        for name in ("input_norm", "mixer_output_norm", "mlp_norm", "mlp_output_norm"):
            norm = getattr(layer, name)
            if norm is not None:
                yield f"layers[{index}].{name}", norm
        if isinstance(layer.mlp, RoutedMlpConfig) and layer.mlp.branch_norm is not None:
            yield f"layers[{index}].mlp.branch_norm", layer.mlp.branch_norm
        if layer.per_layer_input is not None:
            yield f"layers[{index}].per_layer_input.output_norm", layer.per_layer_input.output_norm
        if isinstance(layer.mixer, AttentionConfig) and layer.mixer.qk_norm is not None:
            yield f"layers[{index}].mixer.qk_norm.norm", layer.mixer.qk_norm.norm
    if model.per_layer_embedding is not None:
        yield "per_layer_embedding.norm", model.per_layer_embedding.norm
    yield "final_norm", model.final_norm


def _has_norms_elsewhere(layer: LayerConfig) -> bool:
    """Return True for a layer with a post-norm, or without the pre-norm of one of its parts."""
    before_parts = [(layer.mixer, layer.input_norm), (layer.mlp, layer.input_norm if layer.parallel else layer.mlp_norm)]
    lacks_one = any(part is not None and norm is None for part, norm in before_parts)
    return lacks_one or layer.mixer_output_norm is not None or layer.mlp_output_norm is not None


def _sizes(layer: LayerConfig) -> tuple[int | bool, ...]:
    """Return the sizes that determine the weight shapes of attention and MLP; nothing for other parts."""
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, AttentionConfig) or mlp is None:
        return ()
    presence = (mixer.qkv_bias, mixer.o_bias, mixer.qk_norm is not None, mixer.output_gate, mixer.sinks, mixer.values_are_keys)
    return (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, *_mlp_sizes(mlp), *presence, mixer.stores_kv)


def _mlp_sizes(mlp: MlpConfig | RoutedMlpConfig) -> tuple[int | bool, ...]:
    if isinstance(mlp, MlpConfig):
        return (mlp.intermediate_size, mlp.bias, mlp.gated)
    router, shared = mlp.router, () if mlp.shared is None else _mlp_sizes(mlp.shared)
    presence = (router.bias, router.choice_bias, router.norm_epsilon is not None, router.expert_scale, mlp.branch_norm is not None)
    own = (router.num_experts, *presence, mlp.shared_gate, mlp.latent_size or 0, mlp.latent_bias)
    return (*own, *_mlp_sizes(mlp.expert), *shared)
