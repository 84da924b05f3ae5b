"""``inspect_engine``: the contents of an engine folder, read from its ``config.json`` without TensorRT or a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.cache.estimate import MemoryEstimate, estimate_memory
from trt_kvcache.cache.plot import LAYER_COLOUR, layer_runs, paint_layers
from trt_kvcache.engine.adapter_inputs import AdapterInputs, most_slots
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.embedding_rows import embedding_tensors
from trt_kvcache.engine.hidden_tensors import hidden_states_nbytes, hidden_tensors
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine.step_ancestors import tree_inputs
from trt_kvcache.engine.step_rows import HiddenLayers
from trt_kvcache.engine_folder.folder import DRAFT_HEAD_FOLDER, EngineFolder
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord
from trt_kvcache.engine_folder.v_outputs import v_output_nbytes
from trt_kvcache.memory.shapes import MAX_DIMENSION, dense_nbytes
from trt_kvcache.model import ModelConfig
from trt_kvcache.plot import INK, Plot, draw, paint_sizes, size_text

#: The colour of the bytes of plan and constants.
PLAN_COLOUR = "#5d6d7e"


@dataclass(frozen=True, kw_only=True)
class EngineInspection:
    """An engine in plain values, for people and scripts.

    Parameters
    ----------
    path : Path
        The engine folder.
    tensorrt_flavour, tensorrt_version : str
        The TensorRT that built it.
    compute_capabilities : tuple of str or None
        GPUs that it was built for; None for all that TensorRT for RTX knows, or for the GPU of the build.
    dtype : str
        Dtype of computation.
    model : ModelConfig
        The model of the checkpoint.
    cache : KVCacheConfig or HybridCacheConfig
        The cache that it runs on.
    tensors : tuple of TensorSpec
        Inputs and outputs, with shapes, dtypes, modes and aliases.
    profiles : tuple of EngineProfile
        The optimisation profiles, by index.
    attention_reason : str
        Why the build has this variant of attention.
    attention : tuple of AttentionLayerConfig
        For each layer that has attention the variant, whether it is decomposable, and why.
    plan_nbytes : int
        Size in bytes of the serialised engine, or of the plans of all segments.
    memory : MemoryEstimate
        Memory of the cache: per layer, per sequence, and in total.
    checkpoint : CheckpointRecord
        The checkpoint that it was built from.
    engines : tuple of str
        Values of ``engine=`` for the folder, wherever such an engine is installed: ``"tensorrt"``, and ``"torch"`` and ``"numpy"``
        while the checkpoint exists.
    segments : SegmentsRecord or None
        For an engine in segments: its segments and operations, in order.
    plugin_library : FileRecord or None
        For an engine that carries a plugin library: size and hash of the library.
    v_outputs : tuple of TensorSpec
        Further outputs, which nobody reads: V of each plugin layer, of an engine that was built with ``v_outputs``.
    adapters : AdapterInputs or None
        For an engine that was built with ``adapters_rank``: the ranks of all adapters, and the linear layers that they may change.
    max_embeddings : int
        Rows in place of rows of the embedding for which the engine has an input; 0 for an engine without.
    draft_tree : int or None
        For an engine that was built with ``draft_tree``: most tokens of a tree of draft tokens.
    hidden_layers : "final_norm", tuple of int, ReducedLayers or None
        For an engine that was built with ``draft_head``, and for that of a draft head: the hidden states that it returns of each token.
    draft_head : EngineInspection or None
        For an engine that was built with ``draft_head``: the engine of the draft head.
    """

    path: Path
    tensorrt_flavour: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...] | None
    dtype: str
    model: ModelConfig
    cache: DecoderCacheConfig
    tensors: tuple[TensorSpec, ...]
    profiles: tuple[EngineProfile, ...]
    attention_reason: str
    attention: tuple[AttentionLayerConfig, ...]
    plan_nbytes: int
    memory: MemoryEstimate
    checkpoint: CheckpointRecord
    engines: tuple[str, ...]
    segments: SegmentsRecord | None
    plugin_library: FileRecord | None
    v_outputs: tuple[TensorSpec, ...]
    adapters: AdapterInputs | None
    max_embeddings: int
    draft_tree: int | None
    hidden_layers: HiddenLayers | None
    draft_head: EngineInspection | None

    @property
    def hidden_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of hidden states, which are not among ``tensors``; none of an engine without."""
        return hidden_tensors(self.model, self.hidden_layers, self.profiles, self.dtype)

    @property
    def hidden_states_nbytes(self) -> int:
        """Bytes of hidden states of a session that drafts with the head: of all tokens in the cache, and of those of an enqueue."""
        if self.draft_head is None:
            return 0
        lengths = {"max_sequence_length": self.cache.max_sequence_length, "max_prefill_length": self.profiles[0].max_width}
        return hidden_states_nbytes(self.model, self.draft_head.model, slots=self.cache.max_batch_size, dtype=self.dtype, **lengths)

    @property
    def adapter_tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs for adapters, which are not among ``tensors``; none of an engine without."""
        if self.adapters is None:
            return ()
        return self.adapters.tensors(self.model, slots=most_slots(self.profiles), dtype=self.dtype)

    @property
    def tree_tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs for trees of draft tokens, which are not among ``tensors``; none of an engine without."""
        return () if self.draft_tree is None else tree_inputs(self.model, most_slots(self.profiles))

    @property
    def adapters_nbytes(self) -> int:
        """Bytes of the inputs for adapters; 0 without them."""
        return 0 if self.adapters is None else self.adapters.nbytes(self.model, self.dtype)

    @property
    def embedding_tensors(self) -> tuple[TensorSpec, ...]:
        """The input for rows in place of rows of the embedding, which is not among ``tensors``; none of an engine without."""
        return embedding_tensors(self.model, self.max_embeddings, self.dtype)

    @property
    def embeddings_nbytes(self) -> int:
        """Bytes of the rows in place of rows of the embedding; 0 without them."""
        return sum(dense_nbytes(spec.shape, spec.dtype) for spec in self.embedding_tensors)

    @property
    def v_outputs_nbytes(self) -> int:
        """Bytes of the memory of all ``v_outputs``; 0 without them."""
        return sum(v_output_nbytes(self.v_outputs, self.profiles))

    @property
    def decomposable_layers(self) -> tuple[AttentionLayerConfig, ...]:
        """The layers whose attention may run as several plain layers instead of a fused kernel."""
        return tuple(layer for layer in self.attention if layer.decomposable)

    def plot(self) -> Plot:
        """Plot the GPU memory of the engine as far as it is known before it runs: plan, constants, K and V by layer, and states.

        Returns
        -------
        Plot
            Two panels.

        Raises
        ------
        ModuleNotFoundError
            matplotlib is not installed.
        """
        sizes = {"plan": self.plan_nbytes}
        if self.segments is not None:
            sizes["constants"] = self.segments.constants.nbytes
        if self.v_outputs:
            sizes["V outputs"] = self.v_outputs_nbytes
        if self.adapters is not None:
            sizes["adapters"] = self.adapters_nbytes
        if self.max_embeddings:
            sizes["rows of prompts"] = self.embeddings_nbytes
        if self.draft_head is not None:
            sizes["draft head"] = self.draft_head.plan_nbytes + self.draft_head.memory.nbytes
            sizes["hidden states"] = self.hidden_states_nbytes
        if self.cache.kv is not None:
            sizes["K and V"] = self.memory.nbytes - self.memory.states_nbytes
        if self.memory.states_nbytes:
            sizes["states"] = self.memory.states_nbytes
        num_caches = (self.cache.kv is not None) + (self.cache.mamba is not None)
        heights = (0.6 + 0.26 * len(sizes), 0.6 + 0.26 * len(layer_runs(self.cache)))

        def paint(figure: Any) -> None:
            figure.suptitle(str(self.path), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
            upper, lower = figure.subplots(2, 1, height_ratios=heights)
            cache = self.cache
            slots = f"{cache.max_batch_size} {'slot' if cache.max_batch_size == 1 else 'slots'}"
            slots += "" if cache.max_sequence_length == MAX_DIMENSION else f" of {cache.max_sequence_length:,} tokens"
            paint_sizes(upper, list(sizes.items()), [PLAN_COLOUR] * (len(sizes) - num_caches) + [LAYER_COLOUR] * num_caches)
            upper.set_title(f"{size_text(sum(sizes.values()))} for {slots}, without activations", fontsize=9, color=INK)
            paint_layers(lower, cache)

        return draw(0.5 + sum(heights), paint)


def inspect_engine(path: str | os.PathLike[str]) -> EngineInspection:
    """Read an engine folder.

    Parameters
    ----------
    path : path
        The folder.

    Returns
    -------
    EngineInspection
        The fields of ``config.json``, and the memory of the engine's cache. TensorRT and a GPU are not needed.

    Raises
    ------
    EngineError
        It is not an engine folder, or it is damaged.

    Examples
    --------
    A folder is made by :func:`~trt_kvcache.builder.build_engine.build_engine`. This one has a configuration, but no real plan:

    >>> import tempfile
    >>> from trt_kvcache.checkpoint import Checkpoint
    >>> from trt_kvcache.engine.decoder_cache import cache_config
    >>> from trt_kvcache.engine.decoder_profiles import decoder_profiles
    >>> from trt_kvcache.engine.decoder_tensors import decoder_tensors
    >>> from trt_kvcache.engine.names import DEFAULT_NAMES
    >>> from trt_kvcache.engine_folder.config import EngineFolderConfig
    >>> from trt_kvcache.engine_folder.folder import write_engine_folder
    >>> from trt_kvcache.engine_folder.records import FileRecord
    >>> with tempfile.TemporaryDirectory() as folder, Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     model = checkpoint.config
    ...     cache = cache_config(model, max_batch_size=4, max_sequence_length=256, dtype="float16")
    ...     config = EngineFolderConfig(
    ...         model=model,
    ...         cache=cache,
    ...         names=DEFAULT_NAMES,
    ...         tensors=decoder_tensors(model, cache, DEFAULT_NAMES),
    ...         profiles=decoder_profiles(max_batch_size=4, max_prefill_length=64),
    ...         attention_variant="native",
    ...         attention=tuple(
    ...             AttentionLayerConfig(layer=layer, variant="native", decomposable=False) for layer in range(model.num_layers)
    ...         ),
    ...         tensorrt_flavour="tensorrt_rtx",
    ...         tensorrt_version="1.7.1.116",
    ...         compute_capabilities=("8.6",),
    ...         plan=FileRecord.of([b"no real plan"]),
    ...         checkpoint=CheckpointRecord(path="/models/tiny-llama", fingerprint="", nbytes=checkpoint.nbytes, embedded=False),
    ...     )
    ...     _ = write_engine_folder(Path(folder) / "engine", config=config, plans=[b"no real plan"], checkpoint=checkpoint)
    ...     engine = inspect_engine(Path(folder) / "engine")
    >>> [profile.name for profile in engine.profiles], engine.decomposable_layers, engine.plan_nbytes
    (['prefill', 'decode'], (), 12)
    >>> engine.engines  # there is no checkpoint in /models/tiny-llama
    ('tensorrt',)
    """
    folder = EngineFolder.open(path)
    config = folder.config
    return EngineInspection(
        path=folder.path,
        tensorrt_flavour=config.tensorrt_flavour,
        tensorrt_version=config.tensorrt_version,
        compute_capabilities=config.compute_capabilities,
        dtype=config.dtype,
        model=config.model,
        cache=config.cache,
        tensors=config.tensors,
        profiles=config.profiles,
        attention_reason=config.attention_reason,
        attention=config.attention,
        plan_nbytes=config.plan.nbytes,
        memory=estimate_memory(config.cache),
        checkpoint=config.checkpoint,
        engines=("tensorrt", "torch", "numpy") if folder.has_checkpoint else ("tensorrt",),
        segments=config.segments,
        plugin_library=config.plugin_library,
        v_outputs=config.v_outputs,
        adapters=config.adapters,
        max_embeddings=config.max_embeddings,
        draft_tree=config.draft_tree,
        hidden_layers=config.hidden_layers,
        draft_head=inspect_engine(folder.path / DRAFT_HEAD_FOLDER) if config.draft_head else None,
    )
