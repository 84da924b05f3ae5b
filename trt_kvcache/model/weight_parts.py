"""Locations of the weights of a decoder: rows of tensors, by role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig, Mixer
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig

#: Weights that no engine rounds or packs, as that would change the choice of experts.
EXACT_ROLES = frozenset({"router.weight", "router.bias", "router_scale", "choice_bias", "expert_scale"})
#: Norms of the branches of a routed MLP.
_BRANCH_NORMS = ("experts_norm", "experts_output_norm", "shared_norm", "shared_output_norm")
#: Weights whose rows are elements of q or k.
_ROTATED = ("q", "k", "q_norm", "k_norm")


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """A weight: some rows of a stored tensor."""

    tensor: str  # its name in transformers
    shape: tuple[int, ...]  # of the weight; projections are [out, in]
    rows: tuple[slice, ...]  # in order; several if the tensor is stored head by head
    tensor_rows: int  # of the whole tensor
    # Rows of a head, and those of them that RoPE rotates in adjacent pairs: they are read in the order in which it pairs two halves.
    interleaved: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """True if the tensor holds nothing else, in this order."""
        return self.rows == (slice(0, self.tensor_rows),) and self.interleaved is None

    @property
    def index(self) -> slice | list[int]:
        """Index of an array of the tensor: contiguous rows give a view of it."""
        if len(self.rows) == 1 and self.interleaved is None:
            return self.rows[0]
        stored = [row for rows in self.rows for row in range(rows.start, rows.stop)]
        if self.interleaved is None:
            return stored
        height, rotated = self.interleaved
        head = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, height)]
        return [stored[first + row] for first in range(0, len(stored), height) for row in head]

    @property
    def selections(self) -> tuple[slice | list[int], ...]:
        """Selections of rows that make up the weight: contiguous ones, or all of them in their order."""
        return self.rows if self.interleaved is None else (self.index,)


def layer_tensors(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of one layer. The cost is independent of the heads, whose number a damaged config sets."""
    shapes, stored = _stored(config, index)
    return {
        _tensor_name(config, index, key): (sum(shapes[role][0] for role in roles), *shapes[roles[0]][1:]) for key, roles in stored.items()
    }


def layer_parts(config: ModelConfig, index: int) -> dict[str, WeightPart]:
    """Return the locations of a layer's weights by role: the names of ``LLAMA_NAMES`` and of recurrent mixers, with their suffix.

    Raises ConfigError if the family has no name for a weight that the layer needs.
    """
    family, layer = FAMILIES[config.family], config.layers[index]
    shapes, stored = _stored(config, index)
    parts: dict[str, WeightPart] = {}
    for key, roles in stored.items():
        heads = _heads(layer, roles[0]) if key[0] in family.head_by_head else 1
        sections = [_sections(layer, role) or (shapes[role][0],) for role in roles]
        tensor, total = _tensor_name(config, index, key), sum(shapes[role][0] for role in roles)
        for role, rows in zip(roles, _rows(sections, heads), strict=True):
            interleaved = _interleaved(layer.mixer, role) if family.interleaved_rope else None
            parts[role] = WeightPart(tensor=tensor, shape=shapes[role], rows=rows, tensor_rows=total, interleaved=interleaved)
    return {role: parts[role] for role in shapes}


def stacked_experts(config: ModelConfig, index: int, stacked: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the weights in a tensor of all experts of a layer, by name: for each expert, in the order of their rows.

    ``stacked``: a name in the family's ``stacked``. Empty for a layer without these experts. Names of parts of a weight have their suffix.
    """
    stack, (shapes, stored) = FAMILIES[config.family].stacked[stacked], _stored(config, index)
    names = {role: _tensor_name(config, index, key) for key, roles in stored.items() for role in roles}
    mlp = config.layers[index].mlp
    experts = range(mlp.router.num_experts) if isinstance(mlp, RoutedMlpConfig) else ()
    roles = [[f"{role}.{expert}{stack.suffix}" for role in stack.roles] for expert in experts]
    return [{names[role] + stack.part: shapes[role] for role in of_expert} for of_expert in roles]


def _stored(config: ModelConfig, index: int) -> tuple[dict[str, tuple[int, ...]], dict[tuple[str, str], list[str]]]:
    """Return the shapes of one layer's weights by role, and the roles that share a tensor, by its name in the family and its suffix."""
    family = FAMILIES[config.family]
    shapes = _layer_shapes(config.layers[index], config.hidden_size)
    stored: dict[tuple[str, str], list[str]] = {}
    for role in shapes:
        weight, expert, suffix = split_role(role)
        if weight not in family.names:
            raise ConfigError(f"layers[{index}]: a {config.family} model has no weight {weight}.")
        stored.setdefault((family.names[weight].format(expert=expert), suffix), []).append(role)
    return shapes, stored


def split_role(role: str) -> tuple[str, str, str]:
    """Return the parts of a role such as ``expert_up.3.weight``: name, number of the expert or nothing, suffix or nothing."""
    name, _, rest = role.partition(".")
    expert, _, kind = rest.rpartition(".")
    return name, expert, f".{kind}" if kind else ""


def _tensor_name(config: ModelConfig, index: int, key: tuple[str, str]) -> str:
    return f"{FAMILIES[config.family].layers}.{index}.{key[0]}{key[1]}"


def _rows(weights: list[tuple[int, ...]], heads: int) -> list[tuple[slice, ...]]:
    """Return the rows of each weight in a tensor that holds one part of every section for each head in turn."""
    step, offset = sum(map(sum, weights)) // heads, 0
    found = []
    for sections in weights:
        rows: list[slice] = []
        for size in (section // heads for section in sections):
            for first in range(offset, offset + heads * step, step):
                if rows and rows[-1].stop == first:
                    rows[-1] = slice(rows[-1].start, first + size)
                else:
                    rows.append(slice(first, first + size))
            offset += size
        found.append(tuple(rows))
    return found


def _heads(layer: LayerConfig, role: str) -> int:
    """Return the number of heads that such a tensor is divided by. ``role``: of one of its weights."""
    if isinstance(layer.recurrence, GatedDeltaNetConfig) and role.startswith("delta_"):
        return layer.recurrence.num_key_heads
    return layer.mixer.num_heads if isinstance(layer.mixer, AttentionConfig) else 1


def _sections(layer: LayerConfig, role: str) -> tuple[int, ...] | None:
    """Return the rows of the per-head sections of a weight; None for a weight of one section."""
    mixer = layer.recurrence
    if isinstance(mixer, GatedDeltaNetConfig) and role == "delta_qkv.weight":
        return mixer.key_width, mixer.key_width, mixer.value_width
    return None


def unread_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of tensors of K and V in layers that read those of another layer: files may have them, and nothing reads them."""
    family = FAMILIES[config.family]
    readers = (index for index, mixer in zip(config.attention_indices, config.attention_layers, strict=True) if not mixer.stores_kv)
    return tuple(
        f"{family.layers}.{index}.{family.names[role]}." for index in readers for role in ("k", "v", "k_norm") if role in family.names
    )


def exact_tensors(config: ModelConfig) -> frozenset[str]:
    """Return the names of the tensors of :data:`EXACT_ROLES`."""
    return _tensors_of(config, lambda role: role in EXACT_ROLES)


def expert_tensors(config: ModelConfig) -> frozenset[str]:
    """Return the names of the tensors of single experts, of which a token needs some."""
    return _tensors_of(config, lambda role: bool(split_role(role)[1]))


def _tensors_of(config: ModelConfig, wanted: Callable[[str], bool]) -> frozenset[str]:
    """Return the names of tensors of routed MLPs, by role."""
    routed = (index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, RoutedMlpConfig))
    return frozenset(
        _tensor_name(config, index, key) for index in routed for key, roles in _stored(config, index)[1].items() if any(map(wanted, roles))
    )


def _interleaved(mixer: Mixer | None, role: str) -> tuple[int, int] | None:
    """Return the rows of a head and the rotated ones of a weight of q or k; None for other weights, and without RoPE."""
    if not isinstance(mixer, AttentionConfig) or mixer.rope is None or role.partition(".")[0] not in _ROTATED:
        return None
    return mixer.head_dim, mixer.rotary_dim


def has_interleaved_rope(config: ModelConfig) -> bool:
    """Return True if weights of q and k are stored for RoPE of adjacent pairs."""
    return FAMILIES[config.family].interleaved_rope and any(mixer.rope is not None for mixer in config.attention_layers)


def has_fused_tensors(config: ModelConfig) -> bool:
    """Return True if a tensor holds more than one weight."""
    names = FAMILIES[config.family].names
    for layer in set(config.layers):
        roles = (split_role(role) for role in _layer_shapes(layer, 1))
        stored = [names.get(weight, weight + expert).format(expert=expert) for weight, expert, suffix in roles if suffix == ".weight"]
        if len(set(stored)) < len(stored):
            return True
    return False


def _layer_shapes(layer: LayerConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, in storage order."""
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= _norm_shapes("input_norm", layer.input_norm, hidden)
    if isinstance(layer.mixer, AttentionConfig):
        shapes |= _attention_shapes(layer.mixer, hidden)
    if isinstance(layer.recurrence, ShortConvConfig):
        shapes |= _short_conv_shapes(layer.recurrence, hidden)
    elif isinstance(layer.recurrence, Mamba2Config):
        shapes |= _mamba2_shapes(layer.recurrence, hidden)
    elif isinstance(layer.recurrence, GatedDeltaNetConfig):
        shapes |= _gated_delta_net_shapes(layer.recurrence, hidden)
    if isinstance(layer.mlp, RoutedMlpConfig):
        shapes |= _routed_mlp_shapes(layer.mlp, hidden)
    elif layer.mlp is not None:
        shapes |= _mlp_shapes(layer.mlp, hidden)
    for name in ("mixer_output_norm", "mlp_norm", "mlp_output_norm"):
        shapes |= _norm_shapes(name, getattr(layer, name), hidden)
    if layer.per_layer_input is not None:
        size = layer.per_layer_input.size
        shapes |= _projection("per_layer_gate", size, hidden, bias=False) | _projection("per_layer_projection", hidden, size, bias=False)
        shapes |= _norm_shapes("per_layer_norm", layer.per_layer_input.output_norm, hidden)
    return {**shapes, "output_scale": (1,)} if layer.output_scale else shapes


def _mlp_shapes(mlp: MlpConfig, hidden: int, role: str = "{}") -> dict[str, tuple[int, ...]]:
    """Return the shapes of an MLP. ``role``: the name of a projection in it, with a place for ``gate``, ``up`` or ``down``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("gate", "up") if mlp.gated else ("up",):
        shapes |= _projection(role.format(name), mlp.intermediate_size, hidden, bias=mlp.bias)
    return shapes | _projection(role.format("down"), hidden, mlp.intermediate_size, bias=mlp.bias)


def _routed_mlp_shapes(mlp: RoutedMlpConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a router, of each expert in turn with the projections around them, and of a shared expert."""
    experts = mlp.router.num_experts
    shapes = _projection("router", experts, hidden, bias=mlp.router.bias)
    if mlp.router.norm_epsilon is not None:
        shapes["router_scale"] = (hidden,)
    if mlp.router.choice_bias:
        shapes["choice_bias"] = (experts,)
    if mlp.router.expert_scale:
        shapes["expert_scale"] = (experts,)
    for name in _BRANCH_NORMS:
        shapes |= _norm_shapes(name, mlp.branch_norm, hidden)
    width = hidden if mlp.latent_size is None else mlp.latent_size
    if mlp.latent_size is not None:
        shapes |= _projection("latent_in", width, hidden, bias=mlp.latent_bias)
    for expert in range(experts):
        shapes |= _mlp_shapes(mlp.expert, width, f"expert_{{}}.{expert}")
    if mlp.latent_size is not None:
        shapes |= _projection("latent_out", hidden, width, bias=mlp.latent_bias)
    if mlp.shared is not None:
        shapes |= _mlp_shapes(mlp.shared, hidden, "shared_{}")
    return shapes | _projection("shared_expert_gate", 1, hidden, bias=False) if mlp.shared_gate else shapes


def _norm_shapes(name: str, norm: NormConfig | None, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a norm: none without one."""
    if norm is None:
        return {}
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if norm.bias else {})}


def _attention_shapes(mixer: AttentionConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    q_width, kv_width = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    width = hidden if mixer.input_size is None else mixer.input_size
    shapes = _projection("q", q_width, width, bias=mixer.qkv_bias)
    if mixer.output_gate:
        shapes |= _projection("output_gate", q_width, width, bias=mixer.qkv_bias)
    kv = ("k",) if mixer.values_are_keys else ("k", "v")
    for name in kv if mixer.stores_kv else ():
        shapes |= _projection(name, kv_width, width, bias=mixer.qkv_bias)
    shapes |= _projection("o", hidden, q_width, bias=mixer.o_bias)
    if mixer.sinks:
        shapes["sinks"] = (mixer.num_heads,)
    if mixer.qk_norm is not None:
        widths = {"q_norm": q_width, **({"k_norm": kv_width} if mixer.stores_kv else {})}
        for name, width in widths.items():
            shapes |= _norm_shapes(name, mixer.qk_norm.norm, width if mixer.qk_norm.over == "full" else mixer.head_dim)
    return shapes


def _short_conv_shapes(mixer: ShortConvConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _projection("conv_in", 3 * mixer.channels, hidden, bias=mixer.bias)
    shapes |= _convolution(mixer.channels, mixer.kernel, bias=mixer.bias)
    return shapes | _projection("conv_out", hidden, mixer.channels, bias=mixer.bias)


def _mamba2_shapes(mixer: Mamba2Config, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _projection("mamba_in", mixer.inner + mixer.channels + mixer.num_heads, hidden, bias=mixer.bias)
    shapes |= _convolution(mixer.channels, mixer.kernel, bias=mixer.conv_bias)
    shapes |= dict.fromkeys(("a_log", "d", "dt_bias"), (mixer.num_heads,))
    shapes |= _norm_shapes("mamba_norm", mixer.norm, mixer.inner)
    return shapes | _projection("mamba_out", hidden, mixer.inner, bias=mixer.has_out_bias)


def _gated_delta_net_shapes(mixer: GatedDeltaNetConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    widths = {"delta_qkv": mixer.channels, "delta_z": mixer.value_width, "delta_b": mixer.num_value_heads, "delta_a": mixer.num_value_heads}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (width, hidden) for name, width in widths.items()}
    shapes |= _convolution(mixer.channels, mixer.kernel, bias=False)
    shapes |= dict.fromkeys(("dt_bias", "a_log"), (mixer.num_value_heads,))
    shapes["delta_norm.weight"] = (mixer.value_head_dim,)
    return shapes | _projection("delta_out", hidden, mixer.value_width, bias=False)


def _convolution(channels: int, kernel: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a depthwise convolution, as PyTorch's ``Conv1d`` has them."""
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (channels, 1, kernel)}
    return {**shapes, "conv.bias": (channels,)} if bias else shapes


def _projection(name: str, out_width: int, in_width: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out_width, in_width)}
    return {**shapes, f"{name}.bias": (out_width,)} if bias else shapes
