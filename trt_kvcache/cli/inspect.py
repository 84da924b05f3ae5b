"""``trt-kvcache inspect``: show the tensors, profiles and sizes of an engine folder."""

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.console import count, results, say, size, span, table
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.engine_folder.inspection import EngineInspection, inspect_engine
from trt_kvcache.engine_folder.records import SegmentsRecord
from trt_kvcache.ops.segments import Segment


def inspect(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="An engine folder.")],
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw its sizes into this file: .svg, .png or .pdf.")] = None,
) -> None:
    """Show what is in an engine folder.

    Tensors, aliases, profiles, sizes, attention. Needs neither TensorRT nor a GPU.
    """
    found = inspect_engine(engine)
    if plot is not None:
        found.plot().save(plot)
    _print_head(found)
    _print_tensors(found)
    _print_profiles(found)
    _print_attention(found)
    if found.segments is not None:
        _print_segments(found.segments)
    _print_sizes(found)


def _print_head(found: EngineInspection) -> None:
    cache, checkpoint = found.cache, found.checkpoint
    targets = ", ".join(found.compute_capabilities) if found.compute_capabilities else "not restricted"
    say(str(found.path), style="bold")
    say(f"model: {found.model.family}, {count(found.model.num_layers, 'layer')}, computed in {found.dtype}")
    say(f"cache: {count(cache.max_batch_size, 'slot')} of {count(cache.max_sequence_length, 'token')}, {cache.dtype}, {cache.layout.value}")
    say(f"built by: {found.tensorrt_flavour} {found.tensorrt_version}; compute capabilities: {targets}")
    say(f"built from: {checkpoint.path}{' (embedded)' if checkpoint.embedded else ''}, fingerprint {checkpoint.fingerprint[:16]}")


def _print_tensors(found: EngineInspection) -> None:
    rows = table("tensor", "mode", "dtype", "shape", "shares memory with", title="Tensors")
    for spec in found.tensors:
        rows.add_row(spec.name, spec.mode.value, spec.dtype, str(list(spec.shape)).replace("-1", "?"), spec.alias or "")
    results().print(rows)


def _print_profiles(found: EngineInspection) -> None:
    rows = table("index", "profile", "slots", "new tokens per slot", title="Optimisation profiles")
    for index, profile in enumerate(found.profiles):
        rows.add_row(str(index), profile.name, span(profile.min_batch, profile.max_batch), span(profile.min_width, profile.max_width))
    results().print(rows)


def _print_attention(found: EngineInspection) -> None:
    """Print one row for each run of layers whose attention is the same."""
    rows = table("layers", "attention", "decomposable", title="Attention")
    for (variant, decomposable, reason), run in groupby(
        found.attention, lambda choice: (choice.variant, choice.decomposable, choice.reason)
    ):
        layers = [choice.layer for choice in run]
        rows.add_row(span(layers[0], layers[-1]), variant, f"yes: {reason}" if decomposable else "no")
    results().print(rows)


def _print_segments(segments: SegmentsRecord) -> None:
    rows = table("step", "reads", "writes", "bytes", numbers=("bytes",), title="Segments and operations")
    plans = iter(enumerate(segments.plans))
    for step in segments.stages:
        if isinstance(step, Segment):
            index, nbytes = next(plans)
            sides = [[spec.name for spec in step.tensors if spec.mode is mode] for mode in TensorMode]
            rows.add_row(f"segment {index}", *map(", ".join, sides), str(nbytes))
        else:
            rows.add_row(step.operation, ", ".join(step.inputs), ", ".join(step.outputs), "")
    results().print(rows)


def _print_sizes(found: EngineInspection) -> None:
    memory, cache = found.memory, found.cache
    rows = table("what", "bytes", "size", numbers=("bytes", "size"), title="Sizes")
    constants = {} if found.segments is None else {"constants.safetensors": found.segments.constants.nbytes}
    sizes = {
        "engine.plan": found.plan_nbytes,
        **constants,
        "weights of the checkpoint": found.checkpoint.nbytes,
        "K and V of one token": memory.bytes_per_token,
        f"K and V of one sequence of {cache.max_sequence_length}": memory.bytes_per_sequence,
        "K and V of one layer": memory.bytes_per_layer[0],
        f"cache of {count(cache.max_batch_size, 'slot')}": memory.nbytes,
    }
    for what, nbytes in sizes.items():
        rows.add_row(what, str(nbytes), size(nbytes))
    results().print(rows)
