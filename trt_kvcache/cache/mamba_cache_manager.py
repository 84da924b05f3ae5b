"""``MambaCacheManager`` (named by seed 003): the recurrent and conv states of Mamba layers."""

from typing import Any

from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.cache.recurrent_states import RecurrentStates
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import MAX_DIMENSION


class MambaCacheManager(RecurrentCache):
    """Recurrent states ``[B, heads, head_dim, state]`` and conv states ``[B, conv_dim, conv_kernel]`` per layer. Not thread-safe.

    ``MambaCacheManager`` of TensorRT Edge-LLM. States are zero at the start, and for slots that start anew.

    Parameters
    ----------
    lengths
        Lengths shared with another manager, of any ``max_sequence_length``; without, it makes its own, which count to the
        largest int32, as states have no limit of their own.
    """

    def __init__(self, config: MambaCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if not isinstance(config, MambaCacheConfig):
            raise ConfigError(f"MambaCacheManager: expected a MambaCacheConfig, got {type(config).__name__}.")
        self._config = config
        longest = MAX_DIMENSION if lengths is None else lengths.max_sequence_length
        super().__init__(config.max_batch_size, longest, memory=memory, lengths=lengths)

    def _allocate_contents(self, stream: Any) -> None:
        self._allocate_states(self._config, stream)

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
        """Bytes of states as allocated, padding and both buffers of ``ping_pong`` included; lengths and infos are not in it."""
        return self._config.nbytes

    @property
    def states(self) -> RecurrentStates:
        """What is behind the operations. Not attached to lengths by itself."""
        assert self._states is not None  # there is at least one layer
        return self._states

    clear = RecurrentCache.clear_mamba_states
