"""The network of a whole decoder: inputs, layers, outputs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.builder.network import head
from trt_kvcache.builder.network.adapter_updates import AdapterUpdates
from trt_kvcache.builder.network.attention_lowering import PluginLayerLowering, SegmentCutLowering
from trt_kvcache.builder.network.causal_mask import causal_masks
from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.decoder_layer import decoder_layer
from trt_kvcache.builder.network.decomposable import attention_layer_config
from trt_kvcache.builder.network.embedding_rows import ids_of_tokens, with_rows
from trt_kvcache.builder.network.embedding_table import embedding_table, look_up, split_table
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.hidden_states import add_hidden_states, head_inputs, step_rows
from trt_kvcache.builder.network.new_tokens import NewTokens
from trt_kvcache.builder.network.per_layer_input import PerLayerInputs
from trt_kvcache.builder.network.plugin_nodes import DecoderPluginLayers, decoder_plugin_layers
from trt_kvcache.builder.network.query_scaling import query_factors
from trt_kvcache.builder.network.rope import cos_sin, rope_tables
from trt_kvcache.builder.network.step_lengths import step_lengths
from trt_kvcache.builder.network.unit_triangle import UnitTriangle
from trt_kvcache.builder.network.weights import LayerWeights, PluginProducts, Weights
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.engine.attention_variants import AttentionLayerConfig, window_in_cache
from trt_kvcache.engine.decoder_profiles import MIN_BATCH_SIZE
from trt_kvcache.engine.decoder_tensors import cache_indices, logits_tensors, state_tensors
from trt_kvcache.engine.hidden_tensors import HIDDEN_INPUTS
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine_folder.decoder_segments import (
    EMBEDDING,
    PER_LAYER_ROWS,
    cos_sin_names,
    embedding_output_name,
    segments_with_per_layer_inputs,
)
from trt_kvcache.model import AttentionConfig, ModelConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING, embedding_name


def add_decoder(
    graph: Graph,
    weights: Weights,
    model: ModelConfig,
    options: ResolvedOptions,
    *,
    cache: DecoderCacheConfig,
    names: TensorNames = DEFAULT_NAMES,
    draft_tokens: npt.NDArray[np.int64] | None = None,
) -> tuple[AttentionLayerConfig, ...]:
    """Fill the empty network of ``graph`` with a decoder; return how attention was built.

    Keep ``graph``, which owns arrays, until the build is done. ``draft_tokens``: token ids of the logits of a draft head, None for all.
    """
    attention, max_sequence_length = options.attention, cache.max_sequence_length
    operations = options.operations or {}
    # first, into an empty network
    plugin_layers = None
    if attention == "plugin":
        kernels, trees = options.packed_kernels, options.tree_tensors(model)[:1]
        plugin_layers = decoder_plugin_layers(graph, weights, model, names, cache, operations, trees, packed_kernels=kernels)
    input_ids = graph.input(names.input_ids, "int32", (-1, -1))
    start_index = graph.input(names.kvcache_start_index, "int32", (-1,))
    last_token_ids = _last_token_ids(graph, model, names, options)

    configs = attention_layer_configs(
        model,
        attention,
        is_rtx=graph.tensorrt.is_rtx,
        dtype=graph.dtype,
        min_batch_size=MIN_BATCH_SIZE,
        max_sequence_length=max_sequence_length,
    )
    context = _context(model, names, cache, options.max_prefill_length, configs)
    if options.adapter_inputs is not None:
        updates = AdapterUpdates(graph, options.adapter_tensors(model), slots_of=input_ids)
        context = replace(context, updates=updates)
    if plugin_layers is not None:
        lowering = _plugin_lowering(graph, weights, model, plugin_layers, options, start_index=start_index)
        context = replace(context, lowering=lowering, plugin_layers=plugin_layers)
    elif attention != "plugin":
        lengths = step_lengths(graph, tokens=input_ids, start_index=start_index)
        scalings = filter(None, dict.fromkeys(mixer.query_scaling for mixer in model.attention_layers))
        context = replace(
            context,
            lengths=lengths,
            tables=rope_tables(graph, model, length=max_sequence_length),
            query_factors={
                scaling: query_factors(graph, scaling, lengths.position_ids, length=max_sequence_length, index=index)
                for index, scaling in enumerate(scalings)
            },
        )
        if attention == "mask":
            windows = (window_in_cache(mixer, max_sequence_length) for mixer in model.attention_layers)
            masks = causal_masks(graph, position_ids=lengths.position_ids, max_sequence_length=max_sequence_length, windows=windows)
            context = replace(context, masks=masks)
    table = embedding_table(graph, weights, embedding_name(model), EMBEDDING)
    if plugin_layers is None or plugin_layers.embedding is None:
        tokens = ids_of_tokens(graph, input_ids, model) if options.max_embeddings else input_ids
        rows = look_up(graph, "model.embed_tokens", [table], tokens)
    else:
        rows = graph.result(plugin_layers.layers.add(plugin_layers.embedding, [table, input_ids]))
    x = head.scaled_embedding(graph, rows, model)
    if options.max_embeddings:
        x = with_rows(graph, x, input_ids, model, options.max_embeddings)
    if model.per_layer_embedding is not None:
        tables = split_table(graph, weights, PER_LAYER_EMBEDDING, model.per_layer_embedding.shape(model.num_layers))
        rows = look_up(graph, PER_LAYER_EMBEDDING.removesuffix(".weight"), tables, input_ids)
        context = replace(context, per_layer=PerLayerInputs(graph, rows, x, weights, model))
    mixer_input = None
    for spec in options.hidden_tensors(model):
        if spec.name == HIDDEN_INPUTS:
            states = step_rows(graph, graph.input(spec.name, spec.dtype, spec.shape), input_ids)
            x, mixer_input = head_inputs(graph, x, states, weights, model)
    residuals = [x]
    for layer in range(model.num_layers):
        residuals.append(decoder_layer(graph, residuals[-1], weights, context, layer, mixer_input if layer == 0 else None))
    normed = None
    if options.hidden_layers is not None:
        normed = head.final_norm(graph, residuals[-1], weights, model) if options.hidden_layers == "final_norm" else None
        add_hidden_states(graph, residuals, normed, options.hidden_layers, weights)
    last = residuals[-1]
    _add_head(graph, last, last_token_ids, weights, model, table, names, normed=normed, draft_tokens=draft_tokens, products=plugin_layers)
    return configs


def _context(
    model: ModelConfig, names: TensorNames, cache: DecoderCacheConfig, max_width: int, configs: Sequence[AttentionLayerConfig]
) -> DecoderContext:
    """Return the part of the context that every variant of attention has."""
    mamba = cache.mamba
    return DecoderContext(
        model=model,
        names=names,
        max_sequence_length=cache.max_sequence_length,
        attention={config.layer: config for config in configs},
        indices=cache_indices(model),
        states=() if mamba is None else tuple(state_tensors(mamba, names, index) for index in range(mamba.num_layers)),
        new_tokens=NewTokens(names),
        unit_triangle=UnitTriangle(max_width),
    )


def _last_token_ids(graph: Graph, model: ModelConfig, names: TensorNames, options: ResolvedOptions) -> Any:
    """Add the input with the indices of the new tokens whose logits are wanted."""
    spec, _ = logits_tensors(model, names, max_logits_per_slot=options.max_logits_per_slot)
    return graph.input(spec.name, spec.dtype, spec.shape)


def _add_head(
    graph: Graph,
    x: Any,
    last_token_ids: Any,
    weights: Weights,
    model: ModelConfig,
    table: Any,
    names: TensorNames,
    *,
    normed: Any = None,
    draft_tokens: npt.NDArray[np.int64] | None = None,
    products: PluginProducts | None = None,
) -> None:
    """Add the logits of each token that ``last_token_ids`` selects. ``normed``: ``x`` after the final norm, if it is known."""
    is_single = last_token_ids.shape[1] == 1
    select = head.last_token if is_single else head.chosen_tokens
    if normed is None:
        normed = head.final_norm(graph, select(graph, x, last_token_ids), weights, model)
    else:
        normed = select(graph, normed, last_token_ids)
    found = head.logits(graph, normed, weights, model, table, products)
    if draft_tokens is not None:
        found = head.spread(graph, found, draft_tokens, model)
    graph.output(found if is_single else head.by_slot(graph, found, last_token_ids, model), names.logits)


def _plugin_lowering(
    graph: Graph, weights: Weights, model: ModelConfig, layers: DecoderPluginLayers, options: ResolvedOptions, *, start_index: Any
) -> PluginLayerLowering:
    """Return the lowering to plugin layers, after adding the RoPE tables and the attention sinks that they read."""
    length = options.max_sequence_length
    tables = {kind: graph.constant(name, cos_sin(kind, length=length)) for kind, name in cos_sin_names(model).items()}
    sinks = {
        index: graph.constant(f"model.layers.{index}.self_attn.sinks", LayerWeights(weights, model, index).exact("sinks"))
        for index, mixer in zip(model.attention_indices, model.attention_layers, strict=True)
        if mixer.sinks
    }
    trees = [graph.input(spec.name, spec.dtype, spec.shape) for spec in options.tree_tensors(model)]
    v_outputs, inputs = options.v_outputs, {"start_index": start_index, "trees": trees, "cos_sin": tables, "sinks": sinks}
    return PluginLayerLowering(model, layers, max_sequence_length=length, **inputs, v_outputs=v_outputs)


def add_segments(
    graph: Graph,
    weights: Weights,
    model: ModelConfig,
    options: ResolvedOptions,
    create_network: Callable[[], Any],
    *,
    cache: DecoderCacheConfig,
    names: TensorNames = DEFAULT_NAMES,
) -> tuple[AttentionLayerConfig, ...]:
    """Fill one network after another, the first in ``graph``, with the segments of a decoder.

    ``decoder_stages`` lists the tensors of each segment. Keep ``graph`` until the builds are done.
    """
    length = cache.max_sequence_length
    configs = attention_layer_configs(model, "plugin", dtype=graph.dtype, min_batch_size=MIN_BATCH_SIZE, max_sequence_length=length)
    lowering = SegmentCutLowering(model, create_network, names, max_sequence_length=length)
    context = replace(_context(model, names, cache, options.max_prefill_length, configs), lowering=lowering)
    x = graph.input(embedding_output_name(model, options.max_embeddings), graph.dtype, (-1, -1, model.hidden_size))
    x = head.scaled_embedding(graph, x, model)
    if options.max_embeddings:
        x = with_rows(graph, x, graph.input(names.input_ids, "int32", (-1, -1)), model, options.max_embeddings)
    if model.per_layer_embedding is not None:
        rows = graph.input(PER_LAYER_ROWS, graph.dtype, (-1, -1, model.num_layers * model.per_layer_embedding.size))
        context = replace(context, per_layer=(inputs := PerLayerInputs(graph, rows, x, weights, model)))
        if segments_with_per_layer_inputs(model) - {0}:
            inputs.pass_on(graph)
    for layer in range(model.num_layers):
        x = decoder_layer(graph, x, weights, context, layer)
    last_token_ids = _last_token_ids(graph, model, names, options)
    tied = model.tie_word_embeddings
    table = graph.input(EMBEDDING, graph.dtype, (model.vocab_size, model.hidden_size)) if tied else None
    _add_head(graph, x, last_token_ids, weights, model, table, names)
    return configs


def attention_layer_configs(
    model: ModelConfig, attention: str, *, is_rtx: bool = True, dtype: str, min_batch_size: int, max_sequence_length: int
) -> tuple[AttentionLayerConfig, ...]:
    """Return the variant of each attention layer, and whether TensorRT may decompose it."""
    return tuple(
        attention_layer_config(
            index,
            attention,
            is_rtx=is_rtx,
            dtype=dtype,
            num_attention_heads=layer.attention.num_heads,
            head_dim=layer.attention.head_dim,
            softcap=layer.attention.softcap,
            min_batch_size=min_batch_size,
            max_sequence_length=max_sequence_length,
        )
        for index, layer in enumerate(model.layers)
        if isinstance(layer.mixer, AttentionConfig)
    )
