"""``ReferenceEngine``: a checkpoint run in NumPy, as an :class:`~trt_kvcache.engine.protocol.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.engine.bound_tensors import BoundTensors, StepTensors
from trt_kvcache.engine.decoder_engine import DecoderEngine
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.step_rows import HiddenLayers, StepRows
from trt_kvcache.errors import PlaceError
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import AttentionConfig, ModelConfig, RopeConfig, rope_table
from trt_kvcache.reference.adapters import adapted, load_updates
from trt_kvcache.reference.attention import (
    Attention,
    CombinedAttention,
    LayerAttention,
    RopePositions,
    RotatedBeforeNorms,
    ScaledQueries,
    SeparateAttention,
)
from trt_kvcache.reference.model import LayerCache, LayerRecurrence, decoder_step
from trt_kvcache.reference.recurrent import layer_recurrence
from trt_kvcache.reference.step_positions import StepPositions
from trt_kvcache.reference.weights import DecoderWeights, Float32, load_weights

#: RoPE and head dimension: layers in which both are equal share a table of angles.
_RopeKey = tuple[RopeConfig, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class _NumpyStep:
    """A step over bound memory as arrays and layers: made when addresses or shapes change, and used until they change again."""

    tensors: StepTensors
    stream: Any
    input_ids: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    logits: npt.NDArray[Any]
    new_lengths: npt.NDArray[np.int32] | None
    hidden_states: Float32 | None
    hidden_inputs: Float32 | None
    positions: StepPositions
    rope: Mapping[_RopeKey, RopePositions]
    caches: Sequence[LayerCache]


class ReferenceEngine(DecoderEngine):
    """A decoder in NumPy with the tensors, aliases and profiles of the TensorRT engine of the same model.

    It reads and writes the *bound* cache memory as TensorRT's KVCacheUpdate and attention layers, or our plugin, do: a step of
    width s writes rows ``start .. start + s - 1`` of every slot of the call and nothing else; rows past S are dropped. Weights
    are rounded to the dtype of the cache, and all sums are accumulated in float32.

    Parameters
    ----------
    checkpoint : Checkpoint
        Source of the weights. It may be closed afterwards.
    kv : KVCacheConfig or HybridCacheConfig
        The cache that will be bound; its dtype is the engine's unless K and V are quantized, which ``"plugin"`` attention takes.
    dtype : str, optional
        The compute dtype, if K and V are quantized; otherwise it is the dtype of the cache.
    max_prefill_length : int
        The most new tokens per slot in one step, ``1 <= max_prefill_length <= S``.
    attention : {"native", "mask", "plugin"}
        ``"native"`` and ``"plugin"`` never read a row from ``start + s`` on. ``"mask"`` reads all S rows, dead ones with a weight of 0:
        a NaN there reaches the result, as with the explicit-mask variant on a device. ``"plugin"`` is for COMBINED caches, the
        others are for SEPARATE ones.
    max_logits_per_slot : int or "all"
        The most new tokens per slot whose logits one step returns, ``1 <= max_logits_per_slot <= max_prefill_length``: see
        ``trt_kvcache.engine.decoder_tensors.decoder_tensors``. ``"all"`` stands for ``max_prefill_length``.
    names : TensorNames
        Names of inputs and outputs.
    memory : HostMemory
        Memory that bound tensors must be in.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` while weights are read.
    max_embeddings : int
        Rows that prompts may have in place of rows of the embedding, as for
        :class:`~trt_kvcache.session.session_options.SessionOptions`.
    hidden_layers : "final_norm", tuple of int or ReducedLayers, optional
        Hidden states of each token of the last step to keep in :attr:`hidden_states`: the output of the final norm, or the residual stream
        before each of these layers, side by side. The number of layers stands for the end of the residual stream. ``ReducedLayers`` of
        ``trt_kvcache.engine.step_rows``: the residual stream before these layers, reduced by the projection of an EAGLE-3 head, which
        :meth:`open_draft_head` must have opened before the first step. None if left out.
    adapters : AdapterSet, optional
        Adapters of the model, of which each slot of a step takes the one that :attr:`slot_adapters` names for it.
    shared : ReferenceEngine, optional
        Engine of the model of which the checkpoint is a draft head, for the tensors that both share: embedding, language model head.

    Attributes
    ----------
    tensors : mapping of str to TensorSpec
        Inputs and outputs by name, inputs first.
    profiles : tuple of EngineProfile
        ``prefill`` (up to ``max_prefill_length`` new tokens) and ``decode`` (one), and with more logits than one ``verify``: see
        ``trt_kvcache.engine.decoder_profiles.decoder_profiles``.
    memory : HostMemory
        Memory that bound tensors must be in.
    hidden_states, hidden_inputs : StepRows or None
        Hidden states of the tokens of the last step, and those that the next step of a draft head reads, in float32.
    slot_adapters : SlotAdapters or None
        The adapters of the slots of the next step.
    ancestors : StepAncestors or None
        The trees of the new tokens of the next step; None for a model with states.

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
    >>> from trt_kvcache import Checkpoint, HostMemory, ReferenceEngine
    >>> from trt_kvcache.engine.decoder_cache import cache_config
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     kv = cache_config(checkpoint.config, max_batch_size=2, max_sequence_length=64, dtype="float32")
    ...     engine = ReferenceEngine(checkpoint, kv=kv, max_prefill_length=32, memory=HostMemory())
    >>> [profile.name for profile in engine.profiles]
    ['prefill', 'decode']
    """

    memory: HostMemory

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        kv: DecoderCacheConfig,
        dtype: str | None = None,
        max_prefill_length: int,
        attention: Attention = "native",
        max_logits_per_slot: int | Literal["all"] = 1,
        names: TensorNames = DEFAULT_NAMES,
        memory: HostMemory,
        progress: Callable[[int, int], object] | None = None,
        max_embeddings: int = 0,
        hidden_layers: HiddenLayers | None = None,
        adapters: AdapterSet | None = None,
        shared: ReferenceEngine | None = None,
    ) -> None:
        if not memory.is_host:
            raise PlaceError(f"memory: expected host memory, which NumPy can work in, got {memory.device}.")
        super().__init__(
            checkpoint.config,
            kv=kv,
            dtype=dtype,
            max_prefill_length=max_prefill_length,
            attention=attention,
            max_logits_per_slot=max_logits_per_slot,
            names=names,
            memory=memory,
            max_embeddings=max_embeddings,
            hidden_layers=hidden_layers,
            rows_dtype="float32",
            adapters=adapters,
            takes_trees=True,
        )
        self._updates = () if adapters is None else load_updates(adapters, checkpoint.config, self._dtype)
        self._rows = None if self.embeddings is None else memory.array(self.embeddings.table)
        self._masked = attention == "mask"
        self._rope = {
            key: rope_table(*key, kv.max_sequence_length) for key in map(_rope_key, self._config.attention_layers) if key is not None
        }
        self._weights: DecoderWeights | None = load_weights(
            checkpoint, self._dtype, progress, shared=None if shared is None else shared._weights
        )
        self._reduction: Float32 | None = None  # of an EAGLE-3 head of the model
        self._draft_tokens = checkpoint.draft_tokens
        self._clusters = checkpoint.token_clusters
        self._steps: dict[BoundTensors, _NumpyStep] = {}
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
            A tensor is not bound or has no shape, the shapes disagree, an input holds a value out of range, or the engine was opened for
            an EAGLE-3 head and has none. Nothing was written.
        PlaceError
            The stream is not one of host memory.
        ClosedError
            The engine, or the owner of a bound view, is closed.
        """
        bound = self._bindings.active
        assert self._weights is not None
        self._check_reduction()
        self.memory.check_stream(stream)
        tensors, step = bound.step_tensors(), self._steps.get(bound)
        if step is None or step.tensors is not tensors or step.stream is not stream:
            step = self._steps[bound] = self._new_step(tensors, stream)
        self._check_values(step.input_ids, step.last, step.start, step.new_lengths)
        trees = self.ancestors if self.ancestors is not None and self.ancestors.in_use else None
        step.positions.update(None if trees is None else trees.of_step(*step.input_ids.shape))
        for rope in step.rope.values():
            rope.update()
        weights = self._weights
        if self.slot_adapters is not None and self.slot_adapters.in_use:
            slots, width = step.input_ids.shape
            weights = adapted(weights, self._updates, self.memory.array(self.slot_adapters.table)[:slots], width)
        with np.errstate(over="ignore", invalid="ignore"):
            logits = decoder_step(
                self._config,
                weights,
                step.caches,
                step.input_ids,
                step.last,
                self._dtype,
                self._rows,
                hidden_inputs=step.hidden_inputs,
                hidden_states=step.hidden_states,
                hidden_layers=self._hidden_layers,
                reduction=self._reduction,
                clusters=self._clusters,
            )
        if self._draft_tokens is None:
            step.logits[...] = logits.reshape(step.logits.shape)
        else:
            step.logits[...] = -np.inf
            step.logits[..., self._draft_tokens] = logits.reshape(*step.logits.shape[:-1], -1)

    def open_draft_head(
        self,
        checkpoint: Checkpoint,
        *,
        kv: DecoderCacheConfig,
        max_prefill_length: int,
        max_logits_per_slot: int = 1,
        hidden_layers: HiddenLayers,
    ) -> ReferenceEngine:
        """Return an engine of a draft head or an assistant of the model, in the same memory and dtype, with the tensors that they share.

        From then on, this engine reduces its hidden states with the projection of an EAGLE-3 head.

        Parameters
        ----------
        checkpoint : Checkpoint
            The head: see :meth:`Checkpoint.open_mtp_head`, :meth:`Checkpoint.open_eagle3_head` and :meth:`Checkpoint.open_assistant`. It
            may be closed afterwards.
        kv : KVCacheConfig
            The cache that will be bound. Of an assistant, the layers of the cache of the model whose K and V it reads.
        max_prefill_length : int
            The most new tokens per slot in one step.
        max_logits_per_slot : int
            The most new tokens per slot whose logits one step returns.
        hidden_layers : "final_norm" or tuple of int
            Hidden states of the head that it keeps.

        Returns
        -------
        ReferenceEngine
            It reads :attr:`hidden_inputs`, and has hidden states. Logits of token ids that an EAGLE-3 head cannot propose are -inf.

        Raises
        ------
        ConfigError
            The head does not read the ``hidden_layers`` of this engine, or is its second EAGLE-3 head.
        """
        self._check_head(checkpoint.config)
        reads_model = checkpoint.config.assistant_input is not None
        head = ReferenceEngine(
            checkpoint,
            kv=kv,
            dtype=self._dtype if reads_model else None,
            attention=self.attention if reads_model else "native",
            max_prefill_length=max_prefill_length,
            max_logits_per_slot=max_logits_per_slot,
            memory=self.memory,
            hidden_layers=hidden_layers,
            shared=self,
        )
        if self._lacks_head:
            assert head._weights is not None
            assert head._weights.merge is not None
            self._reduction, self._lacks_head = head._weights.merge.projection, False
        return head

    def close(self) -> None:
        """Release the weights and the bound tensors. Idempotent."""
        self._weights = self._combined = self._rows = self._reduction = None
        self._updates = ()
        self._steps.clear()
        super().close()

    def _new_step(self, tensors: StepTensors, stream: Any) -> _NumpyStep:
        input_ids, last, start, logits = map(self.memory.array, (tensors.input_ids, tensors.last, tensors.start, tensors.logits))
        positions = StepPositions(start, input_ids.shape[1])
        rope = {key: RopePositions(table, positions) for key, table in self._rope.items()}
        attentions = dict(zip(self._config.attention_indices, self._attentions(tensors, start, positions, rope, stream), strict=True))
        recurrences = dict(zip(self._config.recurrent_indices, _recurrences(self._config, tensors, stream), strict=True))
        return _NumpyStep(
            tensors=tensors,
            stream=stream,
            input_ids=input_ids,
            last=last,
            start=start,
            logits=logits,
            new_lengths=None if tensors.new_lengths is None else self.memory.array(tensors.new_lengths),
            hidden_states=self._rows_of(self.hidden_states, input_ids),
            hidden_inputs=self._rows_of(self.hidden_inputs, input_ids),
            positions=positions,
            rope=rope,
            caches=[
                LayerCache(attention=attentions.get(layer), recurrence=recurrences.get(layer)) for layer in range(self._config.num_layers)
            ],
        )

    def _rows_of(self, rows: StepRows | None, input_ids: npt.NDArray[np.int32]) -> Float32 | None:
        return None if rows is None else self.memory.array(rows.of_step(*input_ids.shape))

    def _attentions(
        self,
        step: StepTensors,
        start: npt.NDArray[np.int32],
        positions: StepPositions,
        rope: Mapping[_RopeKey, RopePositions],
        stream: Any,
    ) -> list[LayerAttention]:
        """Return the attention of each attention layer over the bound caches."""
        step = step.by_attention_layer(self._config.kv_of_attention)
        attentions: list[LayerAttention] = []
        for index, (layer, sinks, cache) in enumerate(zip(self._config.attention_layers, self._sinks(), step.caches, strict=True)):
            attention: LayerAttention
            mixer = layer.after_norms
            if self._combined is not None:
                cos_sin, workspace, bound_sinks = self._combined[index]
                scales = step.scales[index] if step.scales else None
                attention = CombinedAttention(
                    mixer,
                    cos_sin,
                    cache[0],
                    step.start,
                    positions,
                    workspace,
                    stream,
                    kv_scales=scales,
                    sinks=bound_sinks,
                    dtype=self._dtype,
                )
            else:
                key = _rope_key(mixer)
                k, v = map(self.memory.array, cache)
                rotation = None if key is None else rope[key]
                attention = SeparateAttention(mixer, rotation, k, v, start, positions, masked=self._masked, sinks=sinks)
            if mixer.query_scaling is not None:
                attention = ScaledQueries(attention, mixer.query_scaling, positions)
            key = _rope_key(layer)
            attentions.append(RotatedBeforeNorms(attention, rope[key]) if key is not None and layer.rotates_before_norm else attention)
        return attentions

    def _sinks(self) -> list[Float32 | None]:
        """Return the attention sinks ``[Hq]`` of each attention layer, or None."""
        assert self._weights is not None
        return [self._weights.layers[index].get("sinks") for index in self._config.attention_indices]

    def _combined_inputs(self) -> list[tuple[DeviceTensor | None, AttentionWorkspace, DeviceTensor | None]]:
        """Return RoPE table, workspace and sinks of each attention layer for :class:`CombinedAttention`, cached for all steps."""
        stream = self.memory.create_stream()
        tables = {key: self.memory.to_device(np.stack(table, axis=1), stream=stream) for key, table in self._rope.items()}
        workspaces: dict[tuple[int, int, int], AttentionWorkspace] = {}
        found = []
        for mixer, sinks in zip(self._config.attention_layers, self._sinks(), strict=True):
            key = _rope_key(mixer.after_norms)
            sizes = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
            if sizes not in workspaces:
                named = dict(zip(("num_heads", "num_kv_heads", "head_dim"), sizes, strict=True))
                workspaces[sizes] = AttentionWorkspace(self.memory, **named, stream=stream)
            bound_sinks = None if sinks is None else self.memory.to_device(sinks, stream=stream)
            found.append((None if key is None else tables[key], workspaces[sizes], bound_sinks))
        return found


def _recurrences(config: ModelConfig, step: StepTensors, stream: Any) -> list[LayerRecurrence]:
    """Return the recurrence of each recurrent layer over its bound states."""
    if step.new_lengths is None:
        return []
    return [
        layer_recurrence(mixer, states, step.new_lengths, stream)
        for mixer, states in zip(config.recurrent_layers, step.states, strict=True)
    ]


def _rope_key(mixer: AttentionConfig) -> _RopeKey | None:
    """Return the cache key of a layer's RoPE table; None without RoPE."""
    return None if mixer.rope is None else (mixer.rope, mixer.head_dim)
