"""Engine folders without TensorRT: a real configuration around bytes that stand for a plan."""

from trt_kvcache.builder.definition import define_constants
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.engine.step_rows import hidden_layers_of
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.decoder_segments import decoder_stages
from trt_kvcache.engine_folder.folder import EngineFiles, write_engine_folder
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, with_padding
from trt_kvcache.ops.segments import Segment

PLAN = b"these bytes stand for an engine"


def make_config(checkpoint, *, plan=PLAN, embedded=False, quantize="", **changes):
    model = checkpoint.config
    segmented, logits = changes.pop("segmented", False), {"max_logits_per_slot": changes.pop("max_logits_per_slot", 1)}
    chosen = changes["attention"][0].variant if changes.get("attention") else "plugin" if segmented else "native"
    variant, dtype, quantized = changes.get("attention_variant", chosen), changes.pop("dtype", "float16"), changes.pop("quantized", None)
    sizes = {"max_batch_size": 3, "max_sequence_length": 38}
    cache = decoder_cache_config(model, **sizes, dtype=dtype, attention=variant, quantized=quantized)
    values = {
        "model": model,
        "cache": cache,
        "names": DEFAULT_NAMES,
        "tensors": decoder_tensors(model, cache, DEFAULT_NAMES, **logits),
        "profiles": decoder_profiles(max_batch_size=3, max_prefill_length=11, **logits, draft_tree=changes.get("draft_tree")),
        "attention_variant": variant,
        "attention": tuple(AttentionLayerConfig(layer=layer, variant=variant, decomposable=False) for layer in model.attention_indices),
        "tensorrt_flavour": "tensorrt_rtx",
        "tensorrt_version": "1.7.1",
        "compute_capabilities": None,
        "plan": FileRecord.of([plan]),
        "checkpoint": CheckpointRecord(
            path=str(checkpoint.path),
            fingerprint=checkpoint.fingerprint(),
            nbytes=checkpoint.nbytes,
            embedded=embedded,
            weights=checkpoint.weights.format,
            quantize=quantize,
            adapter=str(checkpoint.adapter.path) if checkpoint.adapter else "",
            adapter_fingerprint=checkpoint.adapter.fingerprint() if checkpoint.adapter else "",
        ),
        "computed_dtype": None if quantized is None else dtype,
    }
    if segmented and changes.get("segments", True):
        steps = decoder_stages(model, cache, DEFAULT_NAMES, **logits, max_embeddings=changes.get("max_embeddings", 0))
        plans = segment_plans(cuts_of(steps))
        record = FileRecord.of(define_constants(checkpoint, cache, dtype=dtype))
        values["segments"] = SegmentsRecord(stages=steps, plans=tuple(map(len, plans)), constants=record)
        values["plan"] = FileRecord.of(with_padding(plans))
    return EngineFolderConfig(**{**values, **changes})


def segment_plans(cuts):
    """Return bytes that stand for the plans of the segments between so many cuts."""
    return [b"segment %d" % index + b"." * index for index in range(cuts + 1)]


def cuts_of(stages):
    """Return where the stages of a decoder are cut: its segments, but for the last one."""
    return sum(isinstance(stage, Segment) for stage in stages) - 1


def make_engine_folder(model, target, *, plan=PLAN, embedded=False, quantize="", adapter=None, **changes):
    with Checkpoint.open(model, quantize=quantize or None, adapter=adapter) as checkpoint:
        config = make_config(checkpoint, plan=plan, embedded=embedded, quantize=quantize, **changes)
        constants = define_constants(checkpoint, config.cache, dtype=config.dtype) if config.segments else None
        plans = with_padding(segment_plans(cuts_of(config.segments.stages))) if config.segments else [plan]
        return write_engine_folder(target, config=config, plans=plans, checkpoint=checkpoint, constants=constants)


def make_folder_with_head(model, head, target, *, embedded=False, **changes):
    """Write an engine folder with that of a draft head in it: "mtp", or the folder of an EAGLE-3 head."""
    open_head = Checkpoint.open_mtp_head if head == "mtp" else Checkpoint.open_eagle3_head
    with Checkpoint.open(model) as checkpoint, open_head(model if head == "mtp" else head) as own:
        layers = hidden_layers_of(own.config, checkpoint.config, option="draft_head")
        of_head = make_config(own, hidden_layers="final_norm" if head == "mtp" else (1,), embedded=embedded and head != "mtp", **changes)
        drafts = {"hidden_layers": layers, "draft_head": of_head.checkpoint.fingerprint, "max_logits_per_slot": 11}
        config = make_config(checkpoint, embedded=embedded, **drafts, **changes)
        files = EngineFiles(config=of_head, plans=[PLAN], checkpoint=own)
        return write_engine_folder(target, config=config, plans=[PLAN], checkpoint=checkpoint, draft_head=files)
