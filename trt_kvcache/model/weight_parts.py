"""Where the weights of a decoder are stored: which rows of which tensor, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.recurrent_config import Mamba2Config, ShortConvConfig


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """A weight: so many rows of a stored tensor.

    Parameters
    ----------
    tensor : str
        Name of the tensor, as Hugging Face transformers has it.
    shape : tuple of int
        Of the weight; projections have the shape ``[out, in]``.
    first_row : int
        Where it begins in the tensor.
    is_whole : bool
        Whether the tensor holds nothing else.
    """

    tensor: str
    shape: tuple[int, ...]
    first_row: int = 0
    is_whole: bool = True

    @property
    def rows(self) -> slice:
        """The rows of the tensor."""
        return slice(self.first_row, self.first_row + self.shape[0])


def layer_parts(config: ModelConfig, index: int) -> dict[str, WeightPart]:
    """Return where the weights of one layer are stored.

    Parameters
    ----------
    config : ModelConfig
        The model.
    index : int
        The layer.

    Returns
    -------
    dict of str to WeightPart
        By what they are for: ``"q.weight"``, ``"q.bias"``, ``"input_norm.weight"``, ... with the names of
        :data:`~trt_kvcache.model.families.family.LLAMA_NAMES`, ``mixer_output_norm`` and ``mlp_output_norm``; of layers with states
        ``conv_in``, ``conv`` and ``conv_out``, or ``mamba_in``, ``conv``, ``a_log``, ``d``, ``dt_bias``, ``mamba_norm`` and ``mamba_out``.

    Raises
    ------
    ConfigError
        The family has no name for a weight that the layer needs.
    """
    family = FAMILIES[config.family]
    names = family.names
    shapes = _layer_shapes(config.layers[index], config.hidden_size)
    stored: dict[str, str] = {}
    taken: dict[str, int] = {}
    first_rows: dict[str, int] = {}
    for role, shape in shapes.items():
        weight, dot, kind = role.partition(".")
        if weight not in names:
            raise ConfigError(f"layers[{index}]: a {config.family} model has no weight {weight}.")
        stored[role] = f"{family.layers}.{index}.{names[weight]}{dot}{kind}"
        first_rows[role] = taken.get(stored[role], 0)
        taken[stored[role]] = first_rows[role] + shape[0]
    return {
        role: WeightPart(tensor=stored[role], shape=shape, first_row=first_rows[role], is_whole=taken[stored[role]] == shape[0])
        for role, shape in shapes.items()
    }


def has_fused_tensors(config: ModelConfig) -> bool:
    """Return whether a tensor holds more than one weight.

    Parameters
    ----------
    config : ModelConfig
        The model.
    """
    names = FAMILIES[config.family].names
    for layer in set(config.layers):
        stored = [
            names.get(weight, weight) for weight, _, kind in (role.partition(".") for role in _layer_shapes(layer, 1)) if kind == "weight"
        ]
        if len(set(stored)) < len(stored):
            return True
    return False


def _layer_shapes(layer: LayerConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a layer, in the order in which they are listed."""
    shapes: dict[str, tuple[int, ...]] = {}
    if layer.input_norm is not None:
        shapes["input_norm.weight"] = (hidden,)
    if isinstance(layer.mixer, AttentionConfig):
        shapes |= _attention_shapes(layer.mixer, hidden)
    elif isinstance(layer.mixer, ShortConvConfig):
        shapes |= _short_conv_shapes(layer.mixer, hidden)
    elif isinstance(layer.mixer, Mamba2Config):
        shapes |= _mamba2_shapes(layer.mixer, hidden)
    if layer.mlp is not None:
        inner = layer.mlp.intermediate_size
        for name, sizes in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes |= _projection(name, *sizes, bias=layer.mlp.bias)
    for name in ("mixer_output_norm", "mlp_norm", "mlp_output_norm"):
        if getattr(layer, name) is not None:
            shapes[f"{name}.weight"] = (hidden,)
    return shapes


def _attention_shapes(mixer: AttentionConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    q_width, kv_width = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    shapes = _projection("q", q_width, hidden, bias=mixer.qkv_bias)
    for name in ("k", "v"):
        shapes |= _projection(name, kv_width, hidden, bias=mixer.qkv_bias)
    shapes |= _projection("o", hidden, q_width, bias=mixer.o_bias)
    if mixer.qk_norm is not None:
        is_full = mixer.qk_norm.over == "full"
        shapes["q_norm.weight"] = (q_width if is_full else mixer.head_dim,)
        shapes["k_norm.weight"] = (kv_width if is_full else mixer.head_dim,)
    return shapes


def _short_conv_shapes(mixer: ShortConvConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _projection("conv_in", 3 * mixer.channels, hidden, bias=mixer.bias)
    shapes |= _convolution(mixer.channels, mixer.kernel, bias=mixer.bias)
    return shapes | _projection("conv_out", hidden, mixer.channels, bias=mixer.bias)


def _mamba2_shapes(mixer: Mamba2Config, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _projection("mamba_in", mixer.inner + mixer.channels + mixer.num_heads, hidden, bias=mixer.bias)
    shapes |= _convolution(mixer.channels, mixer.kernel, bias=mixer.conv_bias)
    shapes |= dict.fromkeys(("a_log", "d", "dt_bias"), (mixer.num_heads,))
    shapes["mamba_norm.weight"] = (mixer.inner,)
    return shapes | _projection("mamba_out", hidden, mixer.inner, bias=mixer.bias)


def _convolution(channels: int, kernel: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a convolution of each channel alone, as PyTorch's ``Conv1d`` has them."""
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (channels, 1, kernel)}
    return {**shapes, "conv.bias": (channels,)} if bias else shapes


def _projection(name: str, out_width: int, in_width: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out_width, in_width)}
    return {**shapes, f"{name}.bias": (out_width,)} if bias else shapes
