"""The variants of attention that an engine can be built with: required TensorRT version and cache layout of each.

======== ========================= ===== ======== ==================================================================
variant  full TensorRT             RTX   layout   tensors of a layer's cache
======== ========================= ===== ======== ==================================================================
native   11.0: attention_v2        1.5   SEPARATE ``k_cache``, ``v_cache`` in, ``present_k_cache``, ``present_v_cache`` out
mask     10.15: KVCacheUpdate      1.4   SEPARATE the same
plugin   10.3: aliased plugin I/O  1.4   COMBINED ``kv_cache`` in, ``present_kv_cache`` out
======== ========================= ===== ======== ==================================================================

A build refuses native with full TensorRT 11.0 to 11.2, because of a defect: see :mod:`trt_kvcache.builder.attention_choice`.

In TensorRT for RTX the plugin variant is one plan with plugin layers (built with 1.7 only), or segments. TensorRT's attention layer has no
window and no soft cap: see :func:`why_not_native`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.model import AttentionConfig, ModelConfig

AttentionName = Literal["native", "mask", "plugin"]
AttentionSetting = Literal["auto", "native", "mask", "plugin"]

#: The names of the variants.
ATTENTION_VARIANTS: tuple[AttentionName, ...] = get_args(AttentionName)

#: Values of the option ``attention``. ``auto`` chooses a variant: see :mod:`trt_kvcache.builder.attention_choice`.
ATTENTION_SETTINGS: tuple[AttentionSetting, ...] = get_args(AttentionSetting)
AUTO: AttentionSetting = "auto"


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """One variant of attention: the table above."""

    name: AttentionName
    layout: KVLayout  # of the cache
    first_tensorrt: tuple[int, int]  # (major, minor) of the first release of full TensorRT that has what it needs
    first_rtx: tuple[int, int]  # the same for TensorRT for RTX
    needs: str  # for messages

    @property
    def first_release(self) -> str:
        """The first release of full TensorRT as text, such as ``"10.15"``."""
        return ".".join(map(str, self.first_tensorrt))

    @property
    def first_rtx_release(self) -> str:
        """The first release of TensorRT for RTX as text, such as ``"1.5"``."""
        return ".".join(map(str, self.first_rtx))


_NATIVE = AttentionVariant(
    name="native", layout=KVLayout.SEPARATE, first_tensorrt=(11, 0), first_rtx=(1, 5), needs="causal attention over a cache"
)  # INetworkDefinition.add_attention_v2, CausalMaskKind.LOWER_RIGHT, IAttention.key_value_lengths
_MASK = AttentionVariant(
    name="mask", layout=KVLayout.SEPARATE, first_tensorrt=(10, 15), first_rtx=(1, 4), needs="KVCacheUpdate"
)  # INetworkDefinition.add_kv_cache_update
_PLUGIN = AttentionVariant(
    name="plugin", layout=KVLayout.COMBINED, first_tensorrt=(10, 3), first_rtx=(1, 4), needs="plugins with aliased outputs"
)  # IPluginV3OneBuildV2.get_aliased_input

_VARIANTS = {variant.name: variant for variant in (_NATIVE, _MASK, _PLUGIN)}


def attention_variant(name: str) -> AttentionVariant:
    """Return a variant by its name."""
    return _VARIANTS[name]  # type: ignore[index]  # other names are refused by this very look-up


def cache_layout(name: str) -> KVLayout:
    """Return the layout of the cache of a variant of attention: ``COMBINED`` for plugin, else ``SEPARATE``."""
    return attention_variant(name).layout


def window_in_cache(mixer: AttentionConfig, max_sequence_length: int) -> int | None:
    """Return the sliding window of an attention layer; None if no sequence of the cache is longer."""
    return mixer.window if mixer.window is not None and mixer.window < max_sequence_length else None


def why_not_native(model: ModelConfig, max_sequence_length: int) -> str | None:
    """Return why TensorRT's attention needs an explicit mask: the first sliding window smaller than S, or soft cap, of the model."""
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig):
            continue
        window = window_in_cache(mixer, max_sequence_length)
        if window is not None:
            return f"layers[{index}].mixer.window = {window}, and TensorRT's attention layer has no window"
        if mixer.softcap is not None:
            return f"layers[{index}].mixer.softcap = {mixer.softcap}, and TensorRT's attention layer has no soft cap"
    return None


def tensorrt_attention(model: ModelConfig, max_sequence_length: int) -> AttentionName:
    """Return the variant with TensorRT's attention layer that computes a model: native, or mask for windows and soft caps."""
    return "native" if why_not_native(model, max_sequence_length) is None else "mask"


@dataclass(frozen=True, kw_only=True)
class AttentionLayerConfig:
    """Attention of one layer in a build."""

    layer: int  # index
    variant: str  # one of ATTENTION_VARIANTS
    decomposable: bool  # TensorRT may use plain layers in place of a fused kernel (IAttention.decomposable)
    reason: str = ""  # empty where the kernel is fused
