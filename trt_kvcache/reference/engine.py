"""``ReferenceEngine``: a checkpoint run in NumPy behind the :class:`~trt_kvcache.engine.protocol.Engine` protocol."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.cache.config import KVCacheConfig, KVLayerConfig
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.model_config import ModelConfig
from trt_kvcache.checkpoint.rope import rope_table
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.attention_variants import cache_layout
from trt_kvcache.engine.decoder_tensors import decoder_profiles, decoder_tensors, logits_per_slot, step_shape
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.errors import ClosedError, ConfigError, EngineError, PlaceError, RangeError
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.reference.attention import Attention, CombinedAttention, LayerAttention, SeparateAttention, angles_at
from trt_kvcache.reference.bound_tensors import BoundTensors
from trt_kvcache.reference.model import decoder_step
from trt_kvcache.reference.weights import DecoderWeights, load_weights


class ReferenceEngine(Uncopyable):
    """A decoder in NumPy with the tensors, aliases and profiles of the TensorRT engine of the same model.

    It reads and writes the *bound* cache memory as TensorRT's KVCacheUpdate and attention layers, or our plugin, do: a step of
    width s writes rows ``start .. start + s - 1`` of every slot of the call and nothing else; rows past S are dropped. Weights
    are rounded to the dtype of the cache, and all sums are accumulated in float32.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where the weights come from. It may be closed afterwards.
    kv : KVCacheConfig
        The cache that will be bound; its dtype is the engine's. The dtypes with scales are for storage only and refused.
    max_prefill_length : int
        The most new tokens per slot in one step, ``1 <= max_prefill_length <= S``.
    attention : {"native", "mask", "plugin"}
        ``"native"`` and ``"plugin"`` never read a row past ``start + s``. ``"mask"`` reads all S rows, dead ones with a weight of 0:
        a NaN there reaches the result, as with the explicit-mask variant on a device. ``"plugin"`` is for COMBINED caches, the
        others are for SEPARATE ones.
    max_logits_per_slot : int or "all"
        The most new tokens per slot whose logits one step returns, ``1 <= max_logits_per_slot <= max_prefill_length``: see
        :func:`~trt_kvcache.engine.decoder_tensors.decoder_tensors`. ``"all"`` stands for ``max_prefill_length``.
    names : TensorNames
        Names of inputs and outputs.
    memory : HostMemory
        Memory that bound tensors must be in.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` while weights are read.

    Attributes
    ----------
    tensors : mapping of str to TensorSpec
        Inputs and outputs by name, inputs first.
    profiles : tuple of EngineProfile
        ``prefill`` (up to ``max_prefill_length`` new tokens) and ``decode`` (one), and with more logits than one ``verify``: see
        :func:`~trt_kvcache.engine.decoder_tensors.decoder_profiles`.
    memory : HostMemory
        Memory that bound tensors must be in.

    Raises
    ------
    ConfigError
        The cache does not fit the model, or an argument is out of range.
    PlaceError
        The memory is not host memory.
    CheckpointError
        A weight has no finite value in the dtype.

    Notes
    -----
    Not thread-safe. A step is done when ``enqueue`` returns.

    Examples
    --------
    >>> from trt_kvcache import Checkpoint, HostMemory, KVCacheConfig, KVLayerConfig, ReferenceEngine
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     model = checkpoint.config
    ...     layer = KVLayerConfig(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    ...     kv = KVCacheConfig(layers=[layer] * model.num_layers, max_batch_size=2, max_sequence_length=64)
    ...     engine = ReferenceEngine(checkpoint, kv=kv, max_prefill_length=32, memory=HostMemory())
    >>> [profile.name for profile in engine.profiles]
    ['prefill', 'decode']
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        kv: KVCacheConfig,
        max_prefill_length: int,
        attention: Attention = "native",
        max_logits_per_slot: int | Literal["all"] = 1,
        names: TensorNames = DEFAULT_NAMES,
        memory: HostMemory,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        if not memory.is_host:
            raise PlaceError(f"memory: expected host memory, which NumPy can work in, got {memory.device}.")
        _check_cache(checkpoint.config, kv)
        one_of("attention", attention, get_args(Attention))
        if kv.layout is not cache_layout(attention):
            raise ConfigError(f"kv.layout: expected {cache_layout(attention)} for attention {attention!r}, got {kv.layout}.")
        width = int_in_range("max_prefill_length", max_prefill_length, 1, kv.max_sequence_length, error=ConfigError)
        wanted = logits_per_slot(max_logits_per_slot, max_prefill_length=width)
        self._config = checkpoint.config
        self._kv = kv
        self._attention = attention
        self._names = names
        self.memory = memory
        tensors = decoder_tensors(checkpoint.config, kv, names, max_logits_per_slot=wanted)
        self.tensors = MappingProxyType({spec.name: spec for spec in tensors})
        self.profiles = decoder_profiles(max_batch_size=kv.max_batch_size, max_prefill_length=width, max_logits_per_slot=wanted)
        self._bound = [BoundTensors(self.tensors, profile, names, memory) for profile in self.profiles]
        self._current = self._bound[0]
        self._rope = rope_table(checkpoint.config.rope, checkpoint.config.head_dim, kv.max_sequence_length)
        self._weights: DecoderWeights | None = load_weights(checkpoint, kv.dtype, progress)
        self._combined = self._combined_inputs() if attention == "plugin" else None

    def use_profile(self, index: int) -> None:
        """Choose the profile that ``bind``, ``set_input_shape`` and ``enqueue`` act on.

        Parameters
        ----------
        index : int
            Index into ``profiles``.

        Raises
        ------
        RangeError
            There is no such profile.
        ClosedError
            The engine is closed.
        """
        self._open_weights()
        self._current = self._bound[int_in_range("profile", index, 0, len(self._bound) - 1, error=RangeError)]

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """Bind a tensor of the engine to the address of ``tensor``, which is kept alive.

        Parameters
        ----------
        name : str
            An input or output of the engine.
        tensor : DeviceTensor
            A dense view in the engine's memory, aligned to 256 bytes.

        Raises
        ------
        BindingError
            The name is unknown, or the tensor has another dtype or is in another memory.
        LayoutError
            The view is not dense, or not aligned to 256 bytes.
        ClosedError
            The engine is closed.
        """
        self._open_weights()
        self._current.bind(name, tensor)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input for the next enqueues.

        Parameters
        ----------
        name : str
            An input of the engine.
        shape : sequence of int
            Within the current profile.

        Raises
        ------
        BindingError
            The name is not an input's, or the shape is outside the profile.
        ClosedError
            The engine is closed.
        """
        self._open_weights()
        self._current.set_input_shape(name, shape)

    def enqueue(self, stream: Any) -> None:
        """Run one step: read the bound inputs, write rows of K and V and the logits.

        Parameters
        ----------
        stream : HostStream
            A stream of the engine's memory. The step is done when the call returns.

        Raises
        ------
        EngineError
            A tensor is not bound or has no shape, the shapes disagree, or an input holds a value out of range. Nothing was
            written.
        PlaceError
            The stream is not one of host memory.
        ClosedError
            The engine, or the owner of a bound view, is closed.
        """
        weights = self._open_weights()
        self.memory.check_stream(stream)
        names, bound = self._names, self._current
        slots, width = bound.shape(names.input_ids)
        for name, spec in self.tensors.items():
            if spec.mode is TensorMode.INPUT and bound.shape(name)[0] != slots:
                raise EngineError(f"`{name}`: expected {slots} slots as `{names.input_ids}` has, got shape {bound.shape(name)}.")
        input_ids = bound.array(names.input_ids, (slots, width))
        start = bound.tensor(names.kvcache_start_index, (slots,))
        last = bound.array(names.last_token_ids, bound.shape(names.last_token_ids))
        shape = step_shape(self.tensors[names.logits], names, batch=slots, width=width, logits=last.shape[1])
        logits = bound.array(names.logits, shape)
        attentions = self._attentions(slots, width, start, stream)
        _check_values(names.input_ids, input_ids, self._config.vocab_size - 1)
        _check_values(names.last_token_ids, last, width - 1)
        _check_values(names.kvcache_start_index, self.memory.array(start), self._kv.max_sequence_length)
        with np.errstate(over="ignore", invalid="ignore"):
            logits[...] = decoder_step(self._config, weights, attentions, input_ids, last).reshape(shape)

    def close(self) -> None:
        """Release the weights and the bound tensors. Idempotent."""
        self._weights = self._combined = None
        for bound in self._bound:
            bound.release()

    def _attentions(self, slots: int, width: int, start: DeviceTensor, stream: Any) -> list[LayerAttention]:
        """Return the attention of each layer over the bound caches; each is input and output at one address."""
        combined = self._combined
        caches = [
            [self._in_place(*pair, slots) for pair in self._names.layer_pairs(layer, combined=combined is not None)]
            for layer in range(self._config.num_layers)
        ]
        if combined is not None:
            cos_sin, workspace = combined
            return [CombinedAttention(cos_sin, cache, start, workspace, stream) for (cache,) in caches]
        first, masked = self.memory.array(start), self._attention == "mask"
        angles = angles_at(self._rope, first, width)
        sides = [[self.memory.array(side) for side in cache] for cache in caches]
        return [SeparateAttention(angles, k, v, first, masked=masked) for k, v in sides]

    def _combined_inputs(self) -> tuple[DeviceTensor, AttentionWorkspace]:
        """Return the RoPE table and the workspace for :class:`CombinedAttention`: the same in every step."""
        model, stream = self._config, self.memory.create_stream()
        sizes = {"num_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        workspace = AttentionWorkspace(self.memory, **sizes, stream=stream)
        return self.memory.to_device(np.stack(self._rope, axis=1), stream=stream), workspace

    def _in_place(self, name: str, present: str, slots: int) -> DeviceTensor:
        shape = (slots, *self.tensors[name].shape[1:])
        self._current.tensor(name, shape)
        return self._current.tensor(present, shape)

    def _open_weights(self) -> DecoderWeights:
        if self._weights is None:
            raise ClosedError("this ReferenceEngine is closed.")
        return self._weights


def _check_cache(config: ModelConfig, kv: KVCacheConfig) -> None:
    """Refuse a cache that does not fit the model."""
    if kv.dtype not in MODEL_DTYPES:
        raise ConfigError(f"kv.dtype: expected one of {', '.join(MODEL_DTYPES)}, got {kv.dtype!r}, which is storage only.")
    if kv.num_layers != config.num_layers:
        raise ConfigError(f"kv.layers: expected {config.num_layers} as the model has, got {kv.num_layers}.")
    for index, layer in enumerate(kv.layers):
        expected = KVLayerConfig(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        if layer != expected:
            raise ConfigError(f"kv.layers[{index}]: expected {expected} as the model has, got {layer}.")


def _check_values(name: str, values: npt.NDArray[np.int32], highest: int) -> None:
    """Refuse an input value that a device would read as an address outside its tensor."""
    wrong = np.argwhere((values < 0) | (values > highest))
    if len(wrong):
        index = tuple(int(i) for i in wrong[0])
        raise EngineError(f"`{name}`: expected values from 0 to {highest}, got {values[index]} at {list(index)}.")
