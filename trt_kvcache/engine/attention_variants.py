"""The variants of attention that an engine can be built with, and which one each layer got."""

from dataclasses import dataclass

from trt_kvcache.cache.layout import KVLayout

#: TensorRT's own causal mask with key lengths, an explicit mask, or our plugin over the combined cache.
ATTENTION_VARIANTS = ("native", "mask", "plugin")


def cache_layout(attention: str) -> KVLayout:
    """Return the layout that an attention variant works on: K and V of a slot together for the plugin, apart for the others."""
    return KVLayout.COMBINED if attention == "plugin" else KVLayout.SEPARATE


@dataclass(frozen=True, kw_only=True)
class AttentionLayerConfig:
    """How the attention of one layer is built.

    Parameters
    ----------
    layer : int
    variant : str
        ``"native"`` (causal from the lower right, with key lengths), ``"mask"`` (explicit mask) or ``"plugin"`` (our own).
    decomposable : bool
        Whether TensorRT may use plain layers instead of a fused kernel.
    reason : str
        Why; empty where it is fused.
    """

    layer: int
    variant: str
    decomposable: bool
    reason: str = ""
