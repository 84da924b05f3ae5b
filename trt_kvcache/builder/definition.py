"""Defining the TensorRT network of a checkpoint: one network for the whole decoder, or one for each segment."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from trt_kvcache.builder.capable_gpus import have_fp4
from trt_kvcache.builder.network import Graph, Weights, add_decoder, add_segments
from trt_kvcache.builder.network.rope import cos_sin
from trt_kvcache.builder.network.weights import TensorSource
from trt_kvcache.builder.options import ONE_PLAN, SEGMENTS
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.tensorrt_calls import require
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.safetensors_file import safetensors_buffers
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine_folder.decoder_segments import EMBEDDING, cos_sin_names, decoder_stages
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING, embedding_tables
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.ops.segments import Segment
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderDefinition:
    """A decoder, or a segment of one, as a TensorRT network that is not built yet.

    Keep it until the build is done: TensorRT points at weights that ``graph`` owns.
    """

    builder: Any  # IBuilder
    network: Any  # INetworkDefinition
    graph: Graph  # owner of the arrays that the network points at
    cache: DecoderCacheConfig
    names: TensorNames  # of the whole engine
    tensors: tuple[TensorSpec, ...]  # of this network; quantized K and V packed as int32
    profiles: tuple[EngineProfile, ...]
    attention: tuple[AttentionLayerConfig, ...]  # of the whole decoder


def define_decoder(
    checkpoint: Checkpoint,
    options: ResolvedOptions,
    cache: DecoderCacheConfig,
    tensorrt: TensorRT,
    messages: Messages,
    names: TensorNames = DEFAULT_NAMES,
    *,
    tensors: TensorSource | None = None,
) -> DecoderDefinition:
    """Define one network for the decoder of a checkpoint. ``tensors``: its weights, if some are of another checkpoint."""
    model = checkpoint.config
    if options.in_segments:
        raise ConfigError(f"plugin_layers: expected {ONE_PLAN} in one network, got {SEGMENTS}.")
    builder, create_network = _network_factory(model, tensorrt, messages)
    network = create_network()
    graph = Graph(tensorrt, network, messages, dtype=options.dtype)
    attention = add_decoder(
        graph,
        Weights(tensors or checkpoint, options.dtype, has_fp4=have_fp4(options.compute_capabilities, is_rtx=tensorrt.is_rtx)),
        model,
        options,
        cache=cache,
        names=names,
        draft_tokens=checkpoint.draft_tokens,
    )
    specs = decoder_tensors(model, cache, names, max_logits_per_slot=options.max_logits_per_slot)
    return DecoderDefinition(
        builder=builder,
        network=network,
        graph=graph,
        cache=cache,
        names=names,
        tensors=(
            *map(packed_as_int32, specs),
            *options.adapter_tensors(model),
            *options.embedding_tensors(model),
            *options.tree_tensors(model),
            *options.hidden_tensors(model),
            *(v_outputs(model, options.dtype) if options.v_outputs else ()),
        ),
        profiles=options.profiles,
        attention=attention,
    )


def define_segments(
    checkpoint: Checkpoint,
    options: ResolvedOptions,
    cache: DecoderCacheConfig,
    tensorrt: TensorRT,
    messages: Messages,
    names: TensorNames = DEFAULT_NAMES,
) -> tuple[DecoderDefinition, ...]:
    """Define a network for each segment of a decoder."""
    model = checkpoint.config
    if options.hidden_layers is not None:  # of the second choice of ``auto``
        raise ConfigError(f"draft_head: expected plugin_layers={ONE_PLAN} with it, got {SEGMENTS}.")
    builder, create_network = _network_factory(model, tensorrt, messages)
    networks = [create_network()]

    def create_next() -> Any:
        networks.append(create_network())
        return networks[-1]

    graph = Graph(tensorrt, networks[0], messages, dtype=options.dtype)
    attention = add_segments(
        graph,
        Weights(checkpoint, options.dtype, has_fp4=have_fp4(options.compute_capabilities, is_rtx=tensorrt.is_rtx)),
        model,
        options,
        create_next,
        cache=cache,
        names=names,
    )
    sizes = {"max_logits_per_slot": options.max_logits_per_slot, "max_embeddings": options.max_embeddings}
    stages = decoder_stages(model, cache, names, **sizes, dtype=options.dtype)
    segments = [stage for stage in stages if isinstance(stage, Segment)]
    make = partial(
        DecoderDefinition, builder=builder, graph=graph, cache=cache, names=names, profiles=options.profiles, attention=attention
    )
    return tuple(make(network=network, tensors=segment.tensors) for network, segment in zip(networks, segments, strict=True))


def define_constants(checkpoint: Checkpoint, cache: DecoderCacheConfig, *, dtype: str) -> list[Any]:
    """Return the buffers of a safetensors file with the constants of an engine in segments: embedding tables and RoPE tables.

    A table that is stored in this dtype is a view of the checkpoint's memory.
    """
    weights = Weights(checkpoint, dtype)
    tables = dict(zip((EMBEDDING, PER_LAYER_EMBEDDING), map(weights, embedding_tables(checkpoint.config)), strict=False))
    angles = {name: cos_sin(kind, length=cache.max_sequence_length) for kind, name in cos_sin_names(checkpoint.config).items()}
    return safetensors_buffers({**tables, **angles})


def _network_factory(model: ModelConfig, tensorrt: TensorRT, messages: Messages) -> tuple[Any, Callable[[], Any]]:
    """Return an ``IBuilder``, and a function that makes an empty network with it."""
    builder = require(tensorrt.create, messages, f"{tensorrt} cannot start a builder", "Builder")
    flags = 0 if tensorrt.is_rtx else 1 << int(tensorrt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)  # RTX always is

    def create_network() -> Any:
        network = require(builder.create_network, messages, "TensorRT cannot make a network", flags)
        network.name = model.family
        return network

    return builder, create_network
