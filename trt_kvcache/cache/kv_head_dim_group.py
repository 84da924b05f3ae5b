"""``KVHeadDimGroup``: the attention layers that one kernel launch processes together."""

from dataclasses import dataclass

from trt_kvcache.kernels import KVLayerInfos
from trt_kvcache.memory.tensor import DeviceTensor


@dataclass(frozen=True)
class KVHeadDimGroup:
    """The attention layers of one head dim, which one launch of a K/V kernel serves together.

    Parameters
    ----------
    layer_infos : KVLayerInfos
        Addresses and strides of the layers, on the device and on the host. They belong to the cache and close with it.
    attn_layer_indices : tuple of int
        The attention layers of the group, in the order of the infos.

    Notes
    -----
    ``KVHeadDimGroupView`` of TensorRT Edge-LLM.

    Examples
    --------
    >>> from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig
    >>> heads = [KVLayerConfig(num_kv_heads=2, head_dim=64), KVLayerConfig(num_kv_heads=1, head_dim=128)]
    >>> config = KVCacheConfig(layers=[*heads, heads[0]], max_batch_size=4, max_sequence_length=256)
    >>> with KVCacheManager(config, memory=HostMemory()) as cache:
    ...     [(group.head_dim, group.attn_layer_indices) for group in cache.kv_head_dim_groups]
    [(64, (0, 2)), (128, (1,))]
    """

    layer_infos: KVLayerInfos
    attn_layer_indices: tuple[int, ...]

    @property
    def device_layer_infos(self) -> DeviceTensor:
        """The array of layer infos in the cache's memory. Raises :class:`~trt_kvcache.errors.ClosedError` once the cache is closed."""
        return self.layer_infos.device_layer_infos

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return self.layer_infos.num_layers

    @property
    def head_dim(self) -> int:
        """Elements of a K or V row, D, the same in all layers of the group."""
        return self.layer_infos.head_dim

    @property
    def max_kv_heads(self) -> int:
        """The largest number of key-value heads of a layer of the group."""
        return self.layer_infos.max_kv_heads
