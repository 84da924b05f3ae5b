"""Engine folders without TensorRT: a real configuration around bytes that stand for a plan."""

from __future__ import annotations

import hashlib

from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.decoder_tensors import cache_config, decoder_profiles, decoder_tensors
from trt_kvcache.engine_config import CheckpointRecord, EngineConfig, PlanRecord
from trt_kvcache.engine_folder import write_engine_folder
from trt_kvcache.names import DEFAULT_NAMES
from trt_kvcache.network.decomposable import AttentionChoice

PLAN = b"these bytes stand for an engine"


def make_config(checkpoint, *, plan=PLAN, embedded=False, **changes):
    """Return the configuration of an engine of ``checkpoint`` with B = 3, S = 38, P = 11."""
    model = checkpoint.config
    cache = cache_config(model, max_batch_size=3, max_sequence_length=38, dtype="float16")
    values = {
        "model": model,
        "cache": cache,
        "names": DEFAULT_NAMES,
        "tensors": decoder_tensors(model, cache, DEFAULT_NAMES),
        "profiles": decoder_profiles(max_batch_size=3, max_prefill_length=11),
        "attention": tuple(AttentionChoice(layer=layer, variant="native", decomposable=False) for layer in range(model.num_layers)),
        "tensorrt_flavour": "tensorrt_rtx",
        "tensorrt_version": "1.7.1",
        "compute_capabilities": None,
        "plan": PlanRecord(nbytes=len(plan), sha256=hashlib.sha256(plan).hexdigest()),
        "checkpoint": CheckpointRecord(
            path=str(checkpoint.path), fingerprint=checkpoint.fingerprint(), nbytes=checkpoint.nbytes, embedded=embedded
        ),
    }
    return EngineConfig(**{**values, **changes})


def make_engine_folder(model, target, *, plan=PLAN, embedded=False, **changes):
    """Write an engine folder for the model folder ``model``."""
    with Checkpoint.open(model) as checkpoint:
        config = make_config(checkpoint, plan=plan, embedded=embedded, **changes)
        return write_engine_folder(target, config=config, plan=plan, checkpoint=checkpoint)
