"""``TorchEngine``: a checkpoint run in PyTorch, as an :class:`~trt_kvcache.engine.protocol.Engine`."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.attention_variants import AttentionName
from trt_kvcache.engine.bound_tensors import MAX_STEPS, StepTensors
from trt_kvcache.engine.decoder_engine import DecoderEngine
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.step_rows import HiddenLayers
from trt_kvcache.errors import CapacityError, ConfigError, EngineError, KVCacheError
from trt_kvcache.kernels.compile import compile_ahead
from trt_kvcache.memory.base import Memory
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.features import check_features
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, shared_tensors
from trt_kvcache.torch_engine.adapted_projections import AdaptedProjections
from trt_kvcache.torch_engine.adapter_updates import updates_of
from trt_kvcache.torch_engine.attention import LiveRowsAttention, MaskedAttention, RotationBeforeNorms, ScaledQueries
from trt_kvcache.torch_engine.checkpoint_tensors import CheckpointTensors
from trt_kvcache.torch_engine.device import CudaDevice, HostDevice, TorchDevice
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.experts import MAX_FIXED_ROWS, FixedProducts, SortedProducts
from trt_kvcache.torch_engine.grouped_experts import GroupedProducts
from trt_kvcache.torch_engine.kernel_adapted_projections import KernelAdaptedProjections
from trt_kvcache.torch_engine.kernel_experts import KernelExperts
from trt_kvcache.torch_engine.kernel_projections import KernelProjections
from trt_kvcache.torch_engine.kernel_router import KernelRouter
from trt_kvcache.torch_engine.kernel_variants import decoder_variants
from trt_kvcache.torch_engine.kernels import AttentionInputs, KernelAttention, KernelElementwise, attention_is_supported
from trt_kvcache.torch_engine.model import KeptLayers, decoder_step
from trt_kvcache.torch_engine.operations import (
    Elementwise,
    ExpertProducts,
    Operations,
    Projections,
    TorchAttention,
    TorchMatrix,
    TorchProjection,
)
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_projections import PackedProjections, new_workspace, packed_weights_are_supported
from trt_kvcache.torch_engine.positions import PositionFactors
from trt_kvcache.torch_engine.quantized_rows import QuantizedRowsAttention
from trt_kvcache.torch_engine.router import route
from trt_kvcache.torch_engine.row_lookup import KernelLookUp, look_up
from trt_kvcache.torch_engine.state_kernels import KernelStates, states_are_supported
from trt_kvcache.torch_engine.states import TorchStates
from trt_kvcache.torch_engine.step import TorchStep
from trt_kvcache.torch_engine.step_widths import COARSE_WIDTHS, MAX_CAPTURED_WIDTH, STEP_WIDTHS
from trt_kvcache.torch_engine.stored_rows import LoadRows
from trt_kvcache.torch_engine.stored_weights import LoadPacked, LoadTensor
from trt_kvcache.torch_engine.tiled_experts import TiledExperts, fits_tiles
from trt_kvcache.torch_engine.weights import TorchWeights, torch_weights

#: Features of :data:`~trt_kvcache.model.features.FEATURES` that this engine computes.
COMPUTED_FEATURES: frozenset[str] = frozenset(
    {
        *("window", "softcap", "scale", "query_scaling", "no_rope", "partial_rotary", "several_ropes", "full_qk_norm", "several_shapes"),
        *("norm_offset", "norm_rounding", "norm_places", "activation", "residual_multiplier", "embedding_multiplier"),
        *("final_softcap", "logits_divisor", "fused_tensors", "no_mixer", "no_mlp", "short_conv", "mamba2"),
        *("gated_delta_net", "output_gate", "relu2", "ungated_mlp", "experts", "shared_expert", "latent_experts"),
        *("router_norm", "expert_scale", "branch_norms"),
        *("interleaved_rope", "norm_after_rope", "layer_norm", "parallel", "sinks", "clamped_swiglu"),
        *("v_norm", "values_are_keys", "shared_kv", "per_layer_embeddings", "output_scale", "merged_input"),
        *("parallel_mixers", "no_scan_norm", "gate_after_norm", "projection_multipliers"),
    }
)

#: Elements of a layer's intermediate tensors, in rows of its widest projection, rounded up: an estimate.
_TENSORS_PER_ROW = 3


class TorchEngine(DecoderEngine):
    """A decoder in PyTorch with the tensors, aliases and profiles of the TensorRT engine of the same model. Not thread-safe.

    A step of width s writes rows ``start .. start + s - 1`` of every slot and nothing else; rows past S are dropped.
    """

    def __init__(
        self,
        model: ModelConfig,
        load: LoadTensor,
        load_packed: LoadPacked = lambda name, rows: None,
        load_rows: LoadRows = lambda name: None,
        *,
        kv: DecoderCacheConfig,
        dtype: str | None = None,
        max_prefill_length: int,
        attention: AttentionName = "native",
        max_logits_per_slot: int | Literal["all"] = 1,
        names: TensorNames = DEFAULT_NAMES,
        memory: Memory,
        max_embeddings: int = 0,
        hidden_layers: HiddenLayers | None = None,
        draft_tokens: npt.NDArray[np.int64] | None = None,
        token_clusters: npt.NDArray[np.int64] | None = None,
        adapters: AdapterSet | None = None,
    ) -> None:
        check_features(model, COMPUTED_FEATURES, "the PyTorch engine")
        super().__init__(
            model,
            kv=kv,
            dtype=dtype,
            max_prefill_length=max_prefill_length,
            attention=attention,
            max_logits_per_slot=max_logits_per_slot,
            names=names,
            memory=memory,
            max_embeddings=max_embeddings,
            hidden_layers=hidden_layers,
            adapters=adapters,
            takes_trees=True,
        )
        self._device = torch_device(memory)
        self._hidden_states, self._hidden_inputs = (
            None if rows is None else self._device.view(rows.table) for rows in (self.hidden_states, self.hidden_inputs)
        )
        self._reduction: TorchProjection | None = None  # of an EAGLE-3 head of the model
        self._draft_tokens = None if draft_tokens is None else torch.as_tensor(draft_tokens, device=self._device.torch_device)
        self._clusters = None if token_clusters is None else torch.as_tensor(token_clusters, device=self._device.torch_device)
        self._slot_numbers = None if self.slot_adapters is None else self._device.view(self.slot_adapters.table)
        self._rows = None if self.embeddings is None else self._device.view(self.embeddings.table)
        if self._device.graphs is not None:
            self.width_buckets, self.coarse_width_buckets = STEP_WIDTHS, COARSE_WIDTHS
        self._views = DeviceViews(memory)
        self._steps: OrderedDict[StepTensors, TorchStep] = OrderedDict()
        self._mixers = tuple(mixer.after_norms for mixer in model.attention_layers)
        self._positions = PositionFactors(self._mixers, kv.max_sequence_length, self._device.torch_device)
        rotated = [mixer if mixer.rotates_before_norm else replace(mixer, rope=None) for mixer in model.attention_layers]
        self._positions_before_norms = PositionFactors(rotated, kv.max_sequence_length, self._device.torch_device)
        known = attention_is_supported(self._mixers, self._dtype, memory)
        self._kv_dtype = kv.kv.dtype if kv.kv is not None and kv.kv.has_scales else None
        if self._kv_dtype is not None and not known and not memory.is_host:
            raise ConfigError(f"kv_dtype: {self._kv_dtype} needs the attention kernels, which do not know the model, its dtype or the GPU.")
        self._kernel_inputs = AttentionInputs(self._mixers, kv.max_sequence_length, memory) if known else None
        if known:
            compile_ahead(decoder_variants(model, self._dtype, self._kv_dtype), memory.arch)  # type: ignore[attr-defined]  # a GPU
        self._has_state_kernels = states_are_supported(model.recurrent_layers, memory)
        try:
            with torch.inference_mode():
                updates = () if adapters is None else (updates_of(adapters, model, self._dtype, self._device.torch_device),)
                self._weights: TorchWeights | None = torch_weights(model, self._dtype, load, load_packed, *updates, load_rows=load_rows)
                self._workspace: torch.Tensor | None = None
                if self._weights.is_packed and not memory.is_host:
                    self._workspace = new_workspace(getattr(torch, self._dtype), self._device.torch_device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{memory.device}: no room for the weights. {error}") from error
        has_tiles = known or self._workspace is not None
        self._experts_may_wait = any(not (has_tiles and fits_tiles(one)) for one in self._weights.experts)
        self._row_nbytes = _TENSORS_PER_ROW * self._weights.widest * itemsize(self._dtype)
        self._device.synchronize()

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        *,
        kv: DecoderCacheConfig,
        dtype: str | None = None,
        max_prefill_length: int,
        attention: AttentionName = "native",
        max_logits_per_slot: int | Literal["all"] = 1,
        names: TensorNames = DEFAULT_NAMES,
        memory: Memory,
        progress: Callable[[int, int], object] | None = None,
        max_embeddings: int = 0,
        hidden_layers: HiddenLayers | None = None,
        adapters: AdapterSet | None = None,
        has_host_table: bool = False,
    ) -> TorchEngine:
        """Return an engine with the weights of a checkpoint, which may be closed afterwards.

        ``has_host_table``: a GPU reads the table of per-layer embeddings in host memory.
        """
        computed = dtype or kv.dtype
        tensors = CheckpointTensors(checkpoint, computed, torch_device(memory).torch_device, memory, progress)
        loads: dict[str, Any] = {}
        if packed_weights_are_supported(computed, memory):
            loads = {"load_packed": tensors.load_packed, "load_rows": tensors.load_rows}
        if has_host_table and not memory.is_host:
            loads["load_rows"] = tensors.load_host_rows
        return cls(
            checkpoint.config,
            tensors.load,
            **loads,
            kv=kv,
            dtype=dtype,
            max_prefill_length=max_prefill_length,
            attention=attention,
            max_logits_per_slot=max_logits_per_slot,
            names=names,
            memory=memory,
            max_embeddings=max_embeddings,
            hidden_layers=hidden_layers,
            draft_tokens=checkpoint.draft_tokens,
            adapters=adapters,
        )

    def open_draft_head(
        self,
        checkpoint: Checkpoint,
        *,
        kv: DecoderCacheConfig,
        max_prefill_length: int,
        max_logits_per_slot: int = 1,
        hidden_layers: HiddenLayers,
    ) -> TorchEngine:
        """See :meth:`DecoderEngine.open_draft_head`."""
        weights = self._weights
        assert weights is not None
        self._check_head(checkpoint.config)
        tensors = CheckpointTensors(checkpoint, self._dtype, self._device.torch_device, self.memory)
        is_packed = packed_weights_are_supported(self._dtype, self.memory)
        of_model = {embedding_name(checkpoint.config): weights.embedding, HEAD: weights.head}
        known = {name: of_model[name] for name in shared_tensors(checkpoint.config)}

        def load(name: str) -> torch.Tensor:
            found = known.get(name)
            return found if isinstance(found, torch.Tensor) else tensors.load(name)

        def load_packed(name: str, rows: Sequence[slice | list[int]]) -> PackedMatrix | None:
            if name in known:
                found = known[name]
                return None if isinstance(found, torch.Tensor) else found
            return tensors.load_packed(name, rows) if is_packed else None

        config, reads_model = checkpoint.config, checkpoint.config.assistant_input is not None
        head = TorchEngine(
            config if reads_model else replace(config, tie_word_embeddings=False),  # `load` returns the head, tied or not
            load,
            load_packed,
            kv=kv,
            dtype=self._dtype if reads_model else None,
            attention=self.attention if reads_model else "native",
            max_prefill_length=max_prefill_length,
            max_logits_per_slot=max_logits_per_slot,
            memory=self.memory,
            hidden_layers=hidden_layers,
            draft_tokens=checkpoint.draft_tokens,
            token_clusters=checkpoint.token_clusters,
        )
        if reads_model:
            assert head._weights is not None
            head._weights = replace(head._weights, embedding=weights.embedding)
        if self._lacks_head:
            assert head._weights is not None
            assert head._weights.merge is not None
            self._reduction, self._lacks_head = TorchProjection(head._weights.merge.projection, None), False
        return head

    @property
    def graph_refusals(self) -> Sequence[str]:
        """Reasons why steps ran without a CUDA graph, in torch's words, each once."""
        return () if self._device.graphs is None else tuple(self._device.graphs.refusals)

    def enqueue(self, stream: Any) -> None:
        """Enqueue one step, see :meth:`Engine.enqueue`. On a CPU it is done, and inputs are checked, when the call returns.

        On a GPU, a step that is run again is captured, where the call waits, or replayed. A capturing stream is an error: torch allocates.
        """
        bound = self._bindings.active
        self._check_reduction()
        self.memory.check_stream(stream)
        step = self._step(bound.step_tensors())
        if self.ancestors is not None and self.ancestors.in_use:
            step = step.over_trees(self.ancestors.of_step(*step.input_ids.shape), self._device)
        if self.memory.is_host:
            new_lengths = None if step.new_lengths is None else step.new_lengths.numpy()
            self._check_values(step.input_ids.numpy(), step.last.numpy(), step.start.numpy(), new_lengths)
        try:
            has_adapters = self.slot_adapters is not None and self.slot_adapters.in_use
            key = step.key, has_adapters  # a step without adapters does not compute their products
            self._device.run(key if self._is_captured(step) else None, stream, partial(self._run, step, stream, has_adapters))
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{self.memory.device}: no room for a step. {error}") from error
        except KVCacheError:
            raise
        except RuntimeError as error:
            raise EngineError(f"torch: a step failed: {error}") from error

    def close(self) -> None:
        """Release weights, graphs and the bound tensors. Idempotent."""
        if self._bindings.closed:
            return
        self._rows = self._hidden_states = self._hidden_inputs = self._slot_numbers = None  # views of what is closed next
        super().close()
        self._steps.clear()
        self._device.close()
        self._weights = self._workspace = self._reduction = self._draft_tokens = self._clusters = None
        if self._kernel_inputs is not None:
            self._kernel_inputs.close()

    def _step(self, tensors: StepTensors) -> TorchStep:
        """Return the step over bound tensors. Views are made once."""
        step = self._steps.get(tensors)
        if step is None:
            if self._steps and next(reversed(self._steps)).closed:
                for old in [old for old in self._steps if old.closed]:
                    del self._steps[old]
            step = self._steps[tensors] = TorchStep.over(tensors.by_attention_layer(self._config.kv_of_attention), self._device)
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(tensors)
        return step

    def _is_captured(self, step: TorchStep) -> bool:
        """Return True if a step may become a CUDA graph: the tensors of a layer then take up to half of the budget, and graphs the rest."""
        width, graphs = step.input_ids.shape[1], self._device.graphs
        if graphs is None:
            return True  # a device without graphs ignores keys
        if self._experts_may_wait and step.input_ids.numel() > MAX_FIXED_ROWS:
            return False  # for the number of rows of each expert
        return bool(width <= MAX_CAPTURED_WIDTH and 2 * step.input_ids.numel() * self._row_nbytes <= graphs.max_nbytes)

    def _run(self, step: TorchStep, stream: Any, has_adapters: bool) -> None:
        assert self._weights is not None
        with torch.inference_mode():
            operations = self._operations(step, stream, has_adapters)
            slots, width = step.input_ids.shape
            inputs = None if self._hidden_inputs is None else self._hidden_inputs[: slots * width].unflatten(0, (slots, width))
            states = None if self._hidden_states is None else self._hidden_states[: slots * width].unflatten(0, (slots, width))
            kept = None if states is None else self._kept(states)
            normed = decoder_step(self._weights, operations, step.input_ids, self._rows, inputs, kept)
            assistant = self._weights.assistant
            if states is not None and kept is None:
                states[...] = normed if assistant is None else F.linear(normed, assistant.post_projection)
            elif states is not None and kept is not None and self._reduction is not None:
                states[...] = operations.projections.project(self._reduction, kept.rows)
            ids = self._draft_tokens
            logits = step.logits if ids is None else step.logits.new_empty((*step.logits.shape[:-1], len(ids)))
            write_logits(operations.projections, normed, step.last, self._weights.head, logits)
            scale_logits(self._config, logits)
            if self._clusters is not None:
                keep_nearest_clusters(self._config, self._weights, normed, self._clusters, step.logits)
            if ids is not None:
                step.logits.fill_(-math.inf).index_copy_(-1, ids, logits)

    def _kept(self, states: torch.Tensor) -> KeptLayers | None:
        """Return the places of the residual stream before layers: ``states`` themselves, or a tensor that is reduced afterwards."""
        if not self._hidden_layers:
            return None
        if self._reduction is None:
            return KeptLayers(states, self._hidden_layers)
        width = len(self._hidden_layers) * self._config.hidden_size
        return KeptLayers(states.new_empty((*states.shape[:-1], width)), self._hidden_layers)

    def _operations(self, step: TorchStep, stream: Any, has_adapters: bool) -> Operations:
        has_kernels = self._kernel_inputs is not None
        elementwise = KernelElementwise(self._views, stream) if has_kernels else Elementwise()
        projections = KernelProjections(elementwise, self._views, stream) if has_kernels else Projections(elementwise)
        if self._workspace is not None:
            projections = PackedProjections(projections, elementwise, self._workspace, self._views, stream)
        experts: ExpertProducts = SortedProducts(projections)
        if self._device.graphs is not None:
            many = GroupedProducts(experts, elementwise)
            experts = FixedProducts(many, elementwise)
        if has_kernels or self._workspace is not None:
            experts = KernelExperts(TiledExperts(experts, elementwise, self._views, stream), elementwise, self._views, stream)
        if self._slot_numbers is not None and has_adapters:
            numbers = self._slot_numbers[: len(step.input_ids)]
            projections = (
                KernelAdaptedProjections(projections, elementwise, numbers, self._views, stream)
                if has_kernels
                else AdaptedProjections(projections, elementwise, numbers)
            )
        return Operations(
            rotation=RotationBeforeNorms(step, self._mixers, self._positions_before_norms),
            attention=self._attention_of(step, stream),
            states=KernelStates(step, self._views, stream) if self._has_state_kernels else TorchStates(step),
            elementwise=elementwise,
            projections=projections,
            router=KernelRouter(self._views, stream) if has_kernels else route,
            experts=experts,
            look_up=look_up if self.memory.is_host else KernelLookUp(self._views, stream),
        )

    def _attention_of(self, step: TorchStep, stream: Any) -> TorchAttention:
        layers = (step, self._mixers, self._positions)
        attention: TorchAttention
        if self.memory.is_host and self._kv_dtype is not None:
            attention = QuantizedRowsAttention(*layers)
        elif self.memory.is_host:
            attention = LiveRowsAttention(*layers)
        elif self._kernel_inputs is None or step.combined is None:
            attention = MaskedAttention(*layers)
        else:
            attention = KernelAttention(step, self._views, self._kernel_inputs, stream)
        return ScaledQueries(attention, *layers) if self._positions.scale_queries else attention


def torch_device(memory: Memory) -> TorchDevice:
    """Return the device of torch for a memory. Raises EngineError."""
    return HostDevice() if memory.is_host else CudaDevice(memory)


def write_logits(projections: Projections, normed: torch.Tensor, last: torch.Tensor, head: TorchMatrix, logits: torch.Tensor) -> None:
    """Write float32 ``logits [A, vocab]`` or ``[A, m, vocab]`` of the tokens ``last [A, m]`` of ``normed [A, s, hidden]``."""
    slots, width, _ = normed.shape
    rows = normed.flatten(0, 1)
    if width > 1 or last.shape[1] > 1:
        rows = rows.index_select(0, (last + width * torch.arange(slots, device=last.device)[:, None]).flatten())
    projections.write_logits(rows, head, logits.flatten(0, -2))


def keep_nearest_clusters(
    config: ModelConfig, weights: TorchWeights, normed: torch.Tensor, clusters: torch.Tensor, logits: torch.Tensor
) -> None:
    """Keep the logits ``[A, vocab]`` of the clusters whose centroids are nearest to ``normed [A, 1, hidden]``; others become -inf."""
    assert config.assistant_input is not None
    assert config.assistant_input.clusters is not None
    assert weights.assistant is not None
    assert weights.assistant.centroids is not None
    nearest = F.linear(normed[:, 0], weights.assistant.centroids).topk(config.assistant_input.clusters.chosen).indices
    tokens = clusters[nearest].flatten(1)
    kept = logits.gather(1, tokens)
    logits.fill_(-math.inf).scatter_(1, tokens, kept)


def scale_logits(config: ModelConfig, logits: torch.Tensor) -> None:
    """Divide and soft-cap logits in place, if the model does."""
    if config.logits_divisor != 1:
        logits.div_(config.logits_divisor)
    if config.final_softcap is not None:
        logits.div_(config.final_softcap).tanh_().mul_(config.final_softcap)
