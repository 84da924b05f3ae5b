"""``MambaCacheManager`` (named by seed 003): the recurrent and conv states of Mamba layers."""

from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Memory


class MambaCacheManager(RecurrentCache):
    """Recurrent states ``[B, heads, head_dim, state]`` and conv states ``[B, conv_dim, conv_kernel]`` per layer. Not thread-safe.

    States are zero at the start, and again for slots that are reset to length 0, cleared, or newly active.

    Parameters
    ----------
    config : MambaCacheConfig
        The layers, sizes and dtypes.
    memory : Memory
        Where it is allocated: ``HostMemory`` or ``CudaMemory``. The constructor waits for that.
    lengths : Lengths, optional
        Lengths that are shared with another manager, of any ``max_sequence_length``. Without, it makes its own, with that of ``config``.

    Raises
    ------
    ConfigError, PlaceError
        ``config`` is of another class, or ``lengths`` have another batch size or are in another memory.
    CapacityError
        An allocation failed. Those made before were released.

    Notes
    -----
    ``MambaCacheManager`` of TensorRT Edge-LLM, which seed 003 names. What all managers can do is described at
    :class:`~trt_kvcache.cache.slot_cache.SlotCache`.

    Examples
    --------
    >>> from trt_kvcache import HostMemory, MambaCacheConfig, MambaCacheManager
    >>> config = MambaCacheConfig(num_layers=1, max_batch_size=4, num_heads=8, head_dim=16, state_size=32, conv_dim=64, conv_kernel=4)
    >>> with MambaCacheManager(config, memory=HostMemory()) as cache:
    ...     cache.get_recurrent_state(0), cache.get_conv_state(0).shape
    (DeviceTensor((4, 8, 16, 32), float32, cpu), (4, 64, 4))
    """

    def __init__(self, config: MambaCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if not isinstance(config, MambaCacheConfig):
            raise ConfigError(f"MambaCacheManager: expected a MambaCacheConfig, got {type(config).__name__}.")
        max_sequence_length = config.max_sequence_length if lengths is None else lengths.max_sequence_length
        super().__init__(config.max_batch_size, max_sequence_length, memory=memory, lengths=lengths)
        self._config = config
        with self._allocating() as stream:
            self._set_states(config, stream)

    @property
    def config(self) -> MambaCacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def num_layers(self) -> int:
        """Recurrent layers."""
        return self._config.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of states as allocated, padding and both buffers of ``ping_pong`` included; lengths and infos are not counted."""
        return self._config.nbytes

    clear = RecurrentCache.clear_mamba_states
