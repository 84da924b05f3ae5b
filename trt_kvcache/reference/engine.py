"""``ReferenceEngine``: a checkpoint run in NumPy behind the :class:`~trt_kvcache.engine.protocol.Engine` protocol."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.rope import rope_table
from trt_kvcache.engine.decoder_engine import DecoderEngine, StepTensors
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.errors import PlaceError
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.reference.attention import Attention, CombinedAttention, LayerAttention, SeparateAttention, angles_at
from trt_kvcache.reference.model import decoder_step
from trt_kvcache.reference.weights import DecoderWeights, load_weights


class ReferenceEngine(DecoderEngine):
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

    memory: HostMemory

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
        super().__init__(
            checkpoint.config,
            kv=kv,
            max_prefill_length=max_prefill_length,
            attention=attention,
            max_logits_per_slot=max_logits_per_slot,
            names=names,
            memory=memory,
        )
        self._masked = attention == "mask"
        self._rope = rope_table(checkpoint.config.rope, checkpoint.config.head_dim, kv.max_sequence_length)
        self._weights: DecoderWeights | None = load_weights(checkpoint, kv.dtype, progress)
        self._combined = self._combined_inputs() if attention == "plugin" else None

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
        self._check_open()
        assert self._weights is not None
        self.memory.check_stream(stream)
        step = self._step_tensors()
        input_ids, last, start, logits = map(self.memory.array, (step.input_ids, step.last, step.start, step.logits))
        attentions = self._attentions(step, stream)
        self._check_values(input_ids, last, start)
        with np.errstate(over="ignore", invalid="ignore"):
            logits[...] = decoder_step(self._config, self._weights, attentions, input_ids, last).reshape(logits.shape)

    def close(self) -> None:
        """Release the weights and the bound tensors. Idempotent."""
        self._weights = self._combined = None
        super().close()

    def _attentions(self, step: StepTensors, stream: Any) -> list[LayerAttention]:
        """Return the attention of each layer over the bound caches."""
        if self._combined is not None:
            cos_sin, workspace = self._combined
            return [CombinedAttention(cos_sin, cache, step.start, workspace, stream) for (cache,) in step.caches]
        start = self.memory.array(step.start)
        angles = angles_at(self._rope, start, step.input_ids.shape[1])
        sides = [[self.memory.array(side) for side in cache] for cache in step.caches]
        return [SeparateAttention(angles, k, v, start, masked=self._masked) for k, v in sides]

    def _combined_inputs(self) -> tuple[DeviceTensor, AttentionWorkspace]:
        """Return the RoPE table and the workspace for :class:`CombinedAttention`: the same in every step."""
        model, stream = self._config, self.memory.create_stream()
        sizes = {"num_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        workspace = AttentionWorkspace(self.memory, **sizes, stream=stream)
        return self.memory.to_device(np.stack(self._rope, axis=1), stream=stream), workspace
