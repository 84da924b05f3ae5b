"""``EngineFolderConfig``: ``config.json`` of an engine folder, the record of the build, its checkpoint and its TensorRT."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trt_kvcache._version import __version__
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.engine.adapter_inputs import AdapterInputs, most_slots
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.embedding_rows import embedding_tensors
from trt_kvcache.engine.hidden_tensors import hidden_tensors, to_plain
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine.step_ancestors import tree_inputs
from trt_kvcache.engine.step_rows import HiddenLayers
from trt_kvcache.engine_folder.decoder_segments import decoder_stages
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, tensor_to_dict
from trt_kvcache.model import ModelConfig
from trt_kvcache.ops.segments import Stage

#: The format of ``config.json`` that this package writes and reads.
FORMAT = 8


@dataclass(frozen=True, kw_only=True)
class EngineFolderConfig:
    """Everything that a runtime needs to know about an engine."""

    model: ModelConfig  # its dtype is the dtype of the stored weights
    cache: DecoderCacheConfig
    names: TensorNames
    tensors: tuple[TensorSpec, ...]  # inputs, then outputs
    profiles: tuple[EngineProfile, ...]  # of decoder_profiles
    attention_variant: str
    attention: tuple[AttentionLayerConfig, ...]
    tensorrt_flavour: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...] | None  # GPUs that it was built for; None where none were named
    plan: FileRecord  # the serialised engine, or the plans of all segments
    checkpoint: CheckpointRecord
    segments: SegmentsRecord | None = None  # None for an engine in one piece
    attention_reason: str = ""  # of attention_variant: chosen by which rule, or named
    computed_dtype: str | None = None  # dtype of computation if K and V are quantized, else None
    plugin_library: FileRecord | None = None  # that the plan carries
    v_outputs: tuple[TensorSpec, ...] = ()  # further outputs, which nobody reads
    adapters: AdapterInputs | None = None  # further inputs, for adapters that a session exchanges
    max_embeddings: int = 0  # rows of a further input, in place of rows of the embedding
    draft_tree: int | None = None  # most tokens of a tree, of an engine with a further input for trees of draft tokens
    hidden_layers: HiddenLayers | None = None  # hidden states that it returns, of each token
    draft_head: str = ""  # fingerprint of the draft head that reads them, whose engine is in the folder too; empty for none
    package_version: str = __version__  # at the build

    @property
    def dtype(self) -> str:
        """The dtype that the engine computes in."""
        return self.computed_dtype or self.cache.dtype

    @property
    def max_prefill_length(self) -> int:
        """Most new tokens per slot in one enqueue."""
        return max(profile.max_width for profile in self.profiles)

    @property
    def max_logits_per_slot(self) -> int:
        """Most new tokens per slot whose logits one enqueue returns."""
        return max((profile.max_logits for profile in self.profiles), default=1)

    @property
    def adapter_tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs for adapters; none of an engine without."""
        if self.adapters is None:
            return ()
        return self.adapters.tensors(self.model, slots=most_slots(self.profiles), dtype=self.dtype)

    @property
    def embedding_tensors(self) -> tuple[TensorSpec, ...]:
        """The input for rows in place of rows of the embedding; none of an engine without."""
        return embedding_tensors(self.model, self.max_embeddings, self.dtype)

    def stages_of_model(self) -> tuple[Stage, ...]:
        """Return the stages of an engine in segments of this model, with the operations of this package."""
        sizes = {"max_logits_per_slot": self.max_logits_per_slot, "max_embeddings": self.max_embeddings}
        return decoder_stages(self.model, self.cache, self.names, **sizes, dtype=self.dtype)

    @property
    def tree_tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs for trees of draft tokens; none of an engine without."""
        return () if self.draft_tree is None else tree_inputs(self.model, most_slots(self.profiles))

    @property
    def hidden_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of hidden states; none of an engine without."""
        return hidden_tensors(self.model, self.hidden_layers, self.profiles, self.dtype)

    def network_facts(self) -> dict[str, Any]:
        """Return the fields that say what the engine computes, without files and places: those of two builds of one model are equal."""
        fields = self.to_dict()
        files = ("producer", "plan", "checkpoint", "plugin_library", "segments", "draft_head")
        facts = {name: value for name, value in fields.items() if name not in files}
        return {**facts, "quantize": self.checkpoint.quantize, "is_segmented": self.segments is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that ``read_config`` reads back."""
        return {
            "format": FORMAT,
            "producer": {"name": "trt-kvcache", "version": self.package_version},
            "tensorrt": {"flavour": self.tensorrt_flavour, "version": self.tensorrt_version},
            "compute_capabilities": None if self.compute_capabilities is None else list(self.compute_capabilities),
            "plan": asdict(self.plan),
            "checkpoint": asdict(self.checkpoint),
            "plugin_library": None if self.plugin_library is None else asdict(self.plugin_library),
            "segments": None if self.segments is None else self.segments.to_dict(),
            "computed_dtype": self.computed_dtype,
            "kv_cache": self.cache.to_dict(),
            "names": asdict(self.names),
            "profiles": [asdict(profile) for profile in self.profiles],
            "attention_variant": self.attention_variant,
            "attention_reason": self.attention_reason,
            "attention": [asdict(layer) for layer in self.attention],
            "model": self.model.to_description(),
            "tensors": list(map(tensor_to_dict, self.tensors)),
            "v_outputs": list(map(tensor_to_dict, self.v_outputs)),
            "adapters": None if self.adapters is None else {"rank": self.adapters.rank, "modules": list(self.adapters.modules)},
            "max_embeddings": self.max_embeddings,
            "draft_tree": self.draft_tree,
            "hidden_layers": to_plain(self.hidden_layers),
            "draft_head": self.draft_head,
        }
