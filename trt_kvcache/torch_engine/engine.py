"""``TorchEngine``: a checkpoint run in PyTorch behind the :class:`~trt_kvcache.engine.protocol.Engine` protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AttentionName
from trt_kvcache.engine.bound_tensors import BoundTensors
from trt_kvcache.engine.decoder_engine import DecoderEngine
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.errors import CapacityError, EngineError, KVCacheError
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, MAX_GROUP, MIN_ARCH, arch_number
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import ModelConfig, rope_table
from trt_kvcache.model.features import check_features
from trt_kvcache.torch_engine.attention import Angles, LiveRowsAttention, MaskedAttention, rope_factors
from trt_kvcache.torch_engine.device import CudaDevice, HostDevice, TorchDevice
from trt_kvcache.torch_engine.kernels import KernelAttention, KernelElementwise
from trt_kvcache.torch_engine.model import Elementwise, TorchAttention, decoder_step
from trt_kvcache.torch_engine.step import TorchStep
from trt_kvcache.torch_engine.weights import LoadTensor, TorchWeights, checkpoint_loader, torch_weights

#: Names of :data:`~trt_kvcache.model.features.FEATURES` that this engine computes.
COMPUTED_FEATURES: frozenset[str] = frozenset({"fused_tensors"})


class TorchEngine(DecoderEngine):
    """A decoder in PyTorch with the tensors, aliases and profiles of the TensorRT engine of the same model.

    It reads and writes the *bound* cache memory: a step of width s writes rows ``start .. start + s - 1`` of every slot of the call and
    nothing else; rows past S are dropped, and rows past ``start + s`` are never used. Weights and activations have the dtype of
    the cache. On a GPU attention is computed by the kernels of this package, where they know the shape, and decode steps run as
    CUDA graphs.

    Parameters
    ----------
    model : ModelConfig
        The model.
    load : callable
        Called once as ``load(name)`` for each name of Hugging Face transformers; returns the ``torch.Tensor``, on the device of
        ``memory`` and in the dtype of the cache.
    kv : KVCacheConfig
        The cache that will be bound; its dtype is the engine's. The dtypes with scales are for storage only and refused.
    max_prefill_length : int
        The most new tokens per slot in one step, ``1 <= max_prefill_length <= S``.
    attention : {"native", "mask", "plugin"}
        ``"plugin"`` is for COMBINED caches, the others are for SEPARATE ones. All compute the same.
    max_logits_per_slot : int or "all"
        The most new tokens per slot whose logits one step returns, ``1 <= max_logits_per_slot <= max_prefill_length``: see
        ``trt_kvcache.engine.decoder_tensors.decoder_tensors``. ``"all"`` stands for ``max_prefill_length``.
    names : TensorNames
        Names of inputs and outputs.
    memory : Memory
        Memory that bound tensors must be in: where torch computes.

    Attributes
    ----------
    tensors : mapping of str to TensorSpec
        Inputs and outputs by name, inputs first.
    profiles : tuple of EngineProfile
        ``prefill`` (up to ``max_prefill_length`` new tokens) and ``decode`` (one), and with more logits than one ``verify``: see
        ``trt_kvcache.engine.decoder_tensors.decoder_profiles``.
    memory : Memory
        Memory that bound tensors must be in.

    Raises
    ------
    ConfigError
        The engine does not compute something that the model needs, the cache does not fit the model, or an argument is out of range.
    EngineError
        The installed torch cannot use the GPU.
    CapacityError
        The GPU has no room for the weights.

    Notes
    -----
    Not thread-safe. On a CPU a step is done when ``enqueue`` returns; on a GPU it is ordered on the stream, and its input values are
    not checked. On a CPU, logits of 16-bit models are rounded to that dtype.

    Examples
    --------
    >>> from trt_kvcache import Checkpoint, HostMemory
    >>> from trt_kvcache.engine.decoder_tensors import cache_config
    >>> from trt_kvcache.torch_engine import TorchEngine
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     kv = cache_config(checkpoint.config, max_batch_size=2, max_sequence_length=64, dtype="float32")
    ...     engine = TorchEngine.open(checkpoint, kv=kv, max_prefill_length=32, memory=HostMemory())
    >>> [profile.name for profile in engine.profiles]
    ['prefill', 'decode']
    """

    def __init__(
        self,
        model: ModelConfig,
        load: LoadTensor,
        *,
        kv: KVCacheConfig,
        max_prefill_length: int,
        attention: AttentionName = "native",
        max_logits_per_slot: int | Literal["all"] = 1,
        names: TensorNames = DEFAULT_NAMES,
        memory: Memory,
    ) -> None:
        check_features(model, COMPUTED_FEATURES, "the PyTorch engine")
        super().__init__(
            model,
            kv=kv,
            max_prefill_length=max_prefill_length,
            attention=attention,
            max_logits_per_slot=max_logits_per_slot,
            names=names,
            memory=memory,
        )
        self._device = torch_device(memory)
        self._steps: dict[BoundTensors, TorchStep] = {}
        self._mixer = model.layers[0].attention  # of equal sizes in all layers, with the same RoPE: see COMPUTED_FEATURES
        assert self._mixer.rope is not None
        cos, sin = rope_table(self._mixer.rope, self._mixer.head_dim, kv.max_sequence_length)
        self._rope: Angles = rope_factors(*(torch.from_numpy(part).to(self._device.torch_device) for part in (cos, sin)))
        self._kernel_inputs = self._make_kernel_inputs(np.stack((cos, sin), axis=1)) if self._has_kernels() else None
        try:
            with torch.inference_mode():
                self._weights: TorchWeights | None = torch_weights(model, load)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{memory.device}: no room for the weights. {error}") from error
        self._device.synchronize()

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        *,
        kv: KVCacheConfig,
        max_prefill_length: int,
        attention: AttentionName = "native",
        max_logits_per_slot: int | Literal["all"] = 1,
        names: TensorNames = DEFAULT_NAMES,
        memory: Memory,
        progress: Callable[[int, int], object] | None = None,
    ) -> TorchEngine:
        """Return an engine with the weights of a checkpoint, rounded to the dtype of the cache.

        Parameters
        ----------
        checkpoint : Checkpoint
            Where the weights come from. It may be closed afterwards.
        kv : KVCacheConfig
            As for the class, like all that follow but the last.
        max_prefill_length : int
            The most new tokens per slot in one step.
        attention : {"native", "mask", "plugin"}
            Which decides the layout of the cache.
        max_logits_per_slot : int or "all"
            The most new tokens per slot whose logits one step returns.
        names : TensorNames
            Names of inputs and outputs.
        memory : Memory
            Where torch computes.
        progress : callable, optional
            Called as ``progress(done_bytes, total_bytes)`` while weights are read.

        Returns
        -------
        TorchEngine
            The caller's to close.

        Raises
        ------
        ConfigError, EngineError, CapacityError
            As for the class.
        CheckpointError
            A weight has no finite value in the dtype.
        """
        load = checkpoint_loader(checkpoint, kv.dtype, torch_device(memory).torch_device, progress)
        return cls(
            checkpoint.config,
            load,
            kv=kv,
            max_prefill_length=max_prefill_length,
            attention=attention,
            max_logits_per_slot=max_logits_per_slot,
            names=names,
            memory=memory,
        )

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """See :meth:`DecoderEngine.bind`."""
        super().bind(name, tensor)
        self._steps.pop(self._current, None)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """See :meth:`DecoderEngine.set_input_shape`."""
        super().set_input_shape(name, shape)
        self._steps.pop(self._current, None)

    def enqueue(self, stream: Any) -> None:
        """Enqueue one step: read the bound inputs, write rows of K and V and the logits.

        Parameters
        ----------
        stream : cuda.core.Stream, or HostStream
            A stream of the engine's memory. On a GPU the call does not wait, except where a decode step is captured, the second time
            that it runs with the same addresses and number of slots.

        Raises
        ------
        EngineError
            A tensor is not bound or has no shape, the shapes disagree, or, on a CPU, an input holds a value out of range: nothing was
            written. Or torch failed.
        CaptureError
            The stream is capturing: the memory that torch allocates would not belong to the graph.
        PlaceError
            The stream is not one of the engine's memory.
        ClosedError
            The engine, or the owner of a bound view, is closed.
        """
        self._check_open()
        self.memory.check_stream(stream)
        step = self._steps.get(self._current)
        if step is None:
            step = self._steps[self._current] = TorchStep.over(self._step_tensors(), self._device)
        step.check_open()
        if self.memory.is_host:
            self._check_values(step.input_ids.numpy(), step.last.numpy(), step.start.numpy())
        key = step.key if step.input_ids.shape[1] == 1 else None
        try:
            self._device.run(key, stream, partial(self._run, step, stream))
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{self.memory.device}: no room for a step. {error}") from error
        except KVCacheError:
            raise
        except RuntimeError as error:
            raise EngineError(f"torch: a step failed: {error}") from error

    def close(self) -> None:
        """Release weights, graphs and the bound tensors. Idempotent."""
        if self._closed:
            return
        super().close()
        self._steps.clear()
        self._device.close()
        self._weights = None
        if self._kernel_inputs is not None:
            cos_sin, workspace = self._kernel_inputs
            cos_sin.allocation.close()
            workspace.close()

    def _run(self, step: TorchStep, stream: Any) -> None:
        assert self._weights is not None
        with torch.inference_mode():
            elementwise = Elementwise() if self._kernel_inputs is None else KernelElementwise(self.memory, stream)
            normed = decoder_step(self._config, self._weights, self._attention_of(step, stream), elementwise, step.input_ids)
            write_logits(normed, step.last, self._weights.head, step.logits)

    def _attention_of(self, step: TorchStep, stream: Any) -> TorchAttention:
        if self.memory.is_host:
            return LiveRowsAttention(step, self._rope)
        if self._kernel_inputs is None or step.combined is None:
            return MaskedAttention(step, self._rope)
        return KernelAttention(step, self.memory, *self._kernel_inputs, stream)

    def _has_kernels(self) -> bool:
        """Whether the attention kernels know the model and the GPU."""
        return (
            not self.memory.is_host
            and self._dtype in ELEMENT_TYPES
            and self._mixer.head_dim in HEAD_DIMS
            and self._mixer.group <= MAX_GROUP
            and arch_number(self.memory.arch) >= MIN_ARCH  # type: ignore[attr-defined]
        )

    def _make_kernel_inputs(self, cos_sin: np.ndarray[Any, Any]) -> tuple[DeviceTensor, AttentionWorkspace]:
        """Return the RoPE table and the workspace of the attention kernels."""
        mixer, stream = self._mixer, self.memory.create_stream()
        sizes = {"num_heads": mixer.num_heads, "num_kv_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim}
        workspace = AttentionWorkspace(self.memory, **sizes, stream=stream)
        table = self.memory.to_device(cos_sin, stream=stream)
        self.memory.synchronize(stream)
        return table, workspace


def torch_device(memory: Memory) -> TorchDevice:
    """Return where torch computes over a memory.

    Raises
    ------
    EngineError
        The installed torch cannot use the GPU.
    """
    return HostDevice() if memory.is_host else CudaDevice(memory)


def write_logits(normed: torch.Tensor, last: torch.Tensor, head: torch.Tensor, logits: torch.Tensor) -> None:
    """Write the logits of the chosen tokens.

    Parameters
    ----------
    normed : torch.Tensor ``[A, s, hidden]``
        Of all new tokens.
    last : torch.Tensor int32 ``[A, m]``
        Which of them.
    head : torch.Tensor ``[vocab, hidden]``
        The head.
    logits : torch.Tensor float32 ``[A, vocab]`` or ``[A, m, vocab]``
        Overwritten.
    """
    slots, width, _ = normed.shape
    rows = normed.flatten(0, 1)
    if width > 1 or last.shape[1] > 1:
        rows = rows.index_select(0, (last + width * torch.arange(slots, device=last.device)[:, None]).flatten())
    logits = logits.flatten(0, -2)
    if rows.dtype == logits.dtype:
        torch.mm(rows, head.t(), out=logits)
    elif logits.is_cuda:
        torch.mm(rows, head.t(), out_dtype=logits.dtype, out=logits)
    else:
        logits.copy_(F.linear(rows, head))
