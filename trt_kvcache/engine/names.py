"""``TensorNames``: the names of engine tensors, defined once for the builder and the runtime.

The defaults are the names of TensorRT Edge-LLM, so that the same code drives engines that were built there and here. The names of states
are our own.
"""

from dataclasses import dataclass, fields

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Names of the inputs and outputs of an engine.

    Names with ``{i}`` are per layer; ``i`` counts attention layers from 0, or layers with states. B is the number of slots, s the number
    of new tokens per slot, H the number of K/V heads, S the tokens that a slot can hold, D the head dimension.

    Parameters
    ----------
    input_ids : str
        Input, int32 or int64 ``[B, s]``: the new tokens of each slot, right-padded.
    kvcache_start_index : str
        Input, int32 ``[B]``: tokens already in the cache, per slot.
    last_token_ids : str
        Input, int32 or int64 ``[B, 1]``: index, among the ``s`` new tokens, of the token whose logits are wanted.
    logits : str
        Output, float32, float16 or bfloat16 ``[B, vocab]`` (or ``[B, 1, vocab]``).
    k_cache, v_cache : str
        Inputs ``[B, H, S, D]``: the caches before the step.
    present_k_cache, present_v_cache : str
        Outputs of the same shape, at the same address as their inputs.
    kv_cache : str
        Input ``[B, 2, H, S, D]`` with K and V in one tensor, instead of the four above: for plugin attention.
    present_kv_cache : str
        Output of the same shape, at the same address.
    kv_scales : str
        Input, float32, of quantized K and V: ``[2, H]``, or ``[B, 2, H, S']`` with scales by token, S' the next multiple of 4 from S on.
    present_kv_scales : str
        Output of scales by token, of the same shape, at the same address.
    new_lengths : str
        Input, int32 ``[B]``, of engines with states: new tokens of each slot, without padding; 0 for a slot whose states stay.
    recurrent_state, conv_state : str
        Inputs ``[B, heads, head_dim, state_size]`` and ``[B, channels, kernel]``: states before the step.
    present_recurrent_state, present_conv_state : str
        Outputs of the same shape: states after it.

    Raises
    ------
    ConfigError
        A name is empty or used twice, or the name of a cache lacks ``{i}``.

    Examples
    --------
    An engine that calls its token ids ``tokens``:

    >>> names = TensorNames(input_ids="tokens")
    >>> names.cache_pairs(0)
    (('k_cache_0', 'present_k_cache_0'), ('v_cache_0', 'present_v_cache_0'))
    """

    input_ids: str = "input_ids"
    kvcache_start_index: str = "kvcache_start_index"
    last_token_ids: str = "last_token_ids"
    logits: str = "logits"
    k_cache: str = "k_cache_{i}"
    v_cache: str = "v_cache_{i}"
    present_k_cache: str = "present_k_cache_{i}"
    present_v_cache: str = "present_v_cache_{i}"
    kv_cache: str = "past_key_values_{i}"
    present_kv_cache: str = "present_key_values_{i}"
    kv_scales: str = "kv_scales_{i}"
    present_kv_scales: str = "present_kv_scales_{i}"
    new_lengths: str = "new_lengths"
    recurrent_state: str = "recurrent_state_{i}"
    conv_state: str = "conv_state_{i}"
    present_recurrent_state: str = "present_recurrent_state_{i}"
    present_conv_state: str = "present_conv_state_{i}"

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"TensorNames.{field.name}: expected a non-empty string, got {value!r}.")
            if "{i}" in str(field.default) and ("{i}" not in value or set("{}") & set(value.replace("{i}", ""))):
                raise ConfigError(f"TensorNames.{field.name}: expected a name with {{i}} for the layer index, got {value!r}.")
            other = owners.setdefault(value, field.name)
            if other != field.name:
                raise ConfigError(f"TensorNames: {other} and {field.name} are both {value!r}. Each tensor needs a different name.")

    def cache_pairs(self, layer: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the names of a layer's cache with separate K and V.

        Parameters
        ----------
        layer : int
            Index of the attention layer.

        Returns
        -------
        tuple of tuples of str
            ``((k input, k output), (v input, v output))``.
        """
        return (
            (self.k_cache.format(i=layer), self.present_k_cache.format(i=layer)),
            (self.v_cache.format(i=layer), self.present_v_cache.format(i=layer)),
        )

    def combined_pair(self, layer: int) -> tuple[str, str]:
        """Return the names of a layer's cache with K and V in one tensor.

        Parameters
        ----------
        layer : int
            Index of the attention layer.

        Returns
        -------
        tuple of str
            ``(input, output)``.
        """
        return self.kv_cache.format(i=layer), self.present_kv_cache.format(i=layer)

    def layer_pairs(self, layer: int, *, combined: bool) -> tuple[tuple[str, str], ...]:
        """Return the names of a layer's cache.

        Parameters
        ----------
        layer : int
            Index of the attention layer.
        combined : bool
            True if K and V are one tensor.

        Returns
        -------
        tuple of tuples of str
            ``(input, output)`` of each tensor: :meth:`combined_pair` alone, or :meth:`cache_pairs`.
        """
        return (self.combined_pair(layer),) if combined else self.cache_pairs(layer)

    def scales_pair(self, layer: int) -> tuple[str, str]:
        """Return the names of a layer's scales of K and V.

        Parameters
        ----------
        layer : int
            Index of the attention layer.

        Returns
        -------
        tuple of str
            ``(input, output)``; static scales are an input only.
        """
        return self.kv_scales.format(i=layer), self.present_kv_scales.format(i=layer)

    def state_pair(self, kind: StateKind, layer: int) -> tuple[str, str]:
        """Return the names of a state.

        Parameters
        ----------
        kind : StateKind
            Recurrent state or conv state.
        layer : int
            Index of the layer among those with states.

        Returns
        -------
        tuple of str
            ``(input, output)``.
        """
        past, present = {
            StateKind.RECURRENT: (self.recurrent_state, self.present_recurrent_state),
            StateKind.CONV: (self.conv_state, self.present_conv_state),
        }[kind]
        return past.format(i=layer), present.format(i=layer)


#: The names of TensorRT Edge-LLM, and our names of states.
DEFAULT_NAMES = TensorNames()
