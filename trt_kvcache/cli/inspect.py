"""``trt-kvcache inspect``: show the tensors, profiles and sizes of an engine folder."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.console import as_json, count, length_limit, put_json, results, say, size, span, table
from trt_kvcache.cli.formats import kv_format
from trt_kvcache.cli.option_groups import Json, choice
from trt_kvcache.cli.session_flags import FlavourName
from trt_kvcache.cli.tensor_rows import tensor_rows
from trt_kvcache.engine.attention_variants import window_in_cache
from trt_kvcache.engine.doctor_verdict import DoctorVerdict, gpu_and_driver, read_verdict
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.engine_folder.folder import CONFIG_FILE, PLAN_FILE
from trt_kvcache.engine_folder.inspection import EngineInspection, inspect_engine
from trt_kvcache.engine_folder.records import SegmentsRecord
from trt_kvcache.model import RoutedMlpConfig
from trt_kvcache.ops.segments import Segment
from trt_kvcache.trt.plan_inspection import PlanInspection, inspect_plan


def inspect(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="An engine folder, or a plan without one (needs its GPU).")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors of every layer, and every segment.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw its sizes into this file: .svg, .png or .pdf.")] = None,
    flavour: Annotated[FlavourName, choice(FlavourName, "--flavour", help="Which TensorRT reads a plan without a folder.")] = "auto",
    json: Json = False,
) -> None:
    """Show the contents of an engine folder.

    Tensors, aliases, profiles, sizes, attention. Needs neither TensorRT nor a GPU, except TensorRT for a plan without a folder.
    """
    folder = _folder_of(engine)
    if folder is None:
        if plot is not None:
            raise typer.BadParameter("expected an engine folder with it, got a plan.", param_hint="--plot")
        _show_plan(inspect_plan(engine, flavour), every_tensor=tensors, json=json)
        return
    found = inspect_engine(folder)
    if plot is not None:
        found.plot().save(plot)
    if json:
        verdict = _verdict(found)
        put_json({**as_json(found), "doctor": None if verdict is None else verdict._asdict()})
        return
    _print_head(found)
    inputs = (*found.adapter_tensors, *found.embedding_tensors, *found.tree_tensors)
    _print_tensors((*found.tensors, *inputs, *found.hidden_tensors, *found.v_outputs), every_tensor=tensors)
    _print_profiles(found)
    _print_attention(found)
    if found.segments is not None:
        _print_segments(found.segments, every_segment=tensors)
    _print_sizes(found)


def _folder_of(engine: Path) -> Path | None:
    """Return the engine folder of an argument, or None for a plan without one."""
    if not engine.is_file() or engine.suffix in (".json", ".safetensors", ".gguf"):
        return engine
    return engine.parent if engine.name == PLAN_FILE and (engine.parent / CONFIG_FILE).is_file() else None


def _show_plan(found: PlanInspection, *, every_tensor: bool, json: bool) -> None:
    if json:
        put_json(as_json(found))
        return
    say(str(found.path), style="bold")
    say(f"{found.nbytes} B ({size(found.nbytes)}), activations {size(found.activations_nbytes)}, read by {found.tensorrt}")
    _print_tensors(found.tensors, every_tensor=every_tensor)
    rows = table("index", "input", "smallest", "largest", title="Optimisation profiles")
    for index, profile in enumerate(found.profiles):
        for name, (low, high) in profile.ranges.items():
            if low != high:
                rows.add_row(str(index), name, str(list(low)), str(list(high)))
    results().print(rows)


def _print_head(found: EngineInspection) -> None:
    cache, checkpoint = found.cache, found.checkpoint
    targets = ", ".join(found.compute_capabilities) if found.compute_capabilities else "not restricted"
    say(str(found.path), style="bold")
    weights = f", weights in {checkpoint.weights}" if checkpoint.weights not in ("", found.model.dtype) else ""
    say(f"model: {found.model.family}, {count(found.model.num_layers, 'layer')}, computed in {found.dtype}{weights}")
    kinds = ([cache.kv.layout.value] if cache.kv else []) + (["states"] if cache.mamba else [])
    stored = kv_format(cache.dtype, cache.kv.scales if cache.kv else None)
    say(f"cache: {count(cache.max_batch_size, 'slot')} of {length_limit(cache.max_sequence_length)}, {stored}, {', '.join(kinds)}")
    say(f"built by: {found.tensorrt_flavour} {found.tensorrt_version}; compute capabilities: {targets}")
    say(f"built from: {checkpoint.path}{' (embedded)' if checkpoint.embedded else ''}, fingerprint {checkpoint.fingerprint[:16]}")
    experts = sum(isinstance(layer.mlp, RoutedMlpConfig) for layer in found.model.layers)
    if experts:
        say(f"experts: plugin layers of {count(experts, 'layer')}, which run in Python")
    if checkpoint.adapter:
        say(f"merged adapter: {checkpoint.adapter}, fingerprint {checkpoint.adapter_fingerprint[:16]}")
    if found.adapters is not None:
        say(f"inputs for adapters: {found.adapters.rank} ranks in all, of {', '.join(found.adapters.modules)}")
    if found.max_embeddings:
        say(f"input for rows in place of rows of the embedding: {found.max_embeddings}")
    if found.draft_tree is not None:
        say(f"takes trees of draft tokens: of up to {found.draft_tree} tokens for each slot")
    head = found.draft_head
    if head is not None:
        kind = "MTP" if head.model.merge_norm is not None else "EAGLE-3"
        say(f"draft head: {kind}, built from {head.checkpoint.path}, fingerprint {head.checkpoint.fingerprint[:16]}")
    library = found.plugin_library
    if library is not None:
        say(f"carries a plugin library, whose code runs when it is opened: {size(library.nbytes)}, SHA-256 {library.sha256[:16]}")
    needed = "the checkpoint and the adapter, one of which" if checkpoint.adapter else "the checkpoint, which"
    gone = "" if "torch" in found.engines else f"; torch and numpy need {needed} is gone"
    say(f"can be run by: {', '.join(found.engines)}{gone}")
    _print_verdict(found)


def _verdict(found: EngineInspection) -> DoctorVerdict | None:
    """Return the verdict of doctor on this machine's GPU with the TensorRT of the engine; None without either."""
    here = gpu_and_driver()
    return None if here is None else read_verdict(*here, f"{found.tensorrt_flavour} {found.tensorrt_version}")


def _print_verdict(found: EngineInspection) -> None:
    verdict = _verdict(found)
    if verdict is not None:
        failed = [name for name, status in verdict.checks.items() if status == "failed"]
        said = f"failed: {', '.join(failed)}" if failed else "passed" if verdict.passed else "plugin attention did not run in TensorRT"
        say(f"doctor: {said} ({verdict.date}, {verdict.gpu}, driver {verdict.driver})")
    elif gpu_and_driver() is not None:
        say("doctor: did not run with this GPU, driver and TensorRT; `trt-kvcache doctor` checks them")


def _print_tensors(tensors: Sequence[TensorSpec], *, every_tensor: bool) -> None:
    rows = table("tensor", "mode", "dtype", "shape", "shares memory with", title="Tensors")
    for row in tensor_rows(tensors, grouped=not every_tensor):
        rows.add_row(*row)
    results().print(rows)


def _print_profiles(found: EngineInspection) -> None:
    has_more = any(profile.max_logits > 1 for profile in found.profiles)
    more = ["logits per slot"] if has_more else []
    rows = table("index", "profile", "slots", "new tokens per slot", *more, title="Optimisation profiles")
    for index, profile in enumerate(found.profiles):
        sizes = [span(profile.min_batch, profile.max_batch), span(profile.min_width, profile.max_width)]
        sizes += [span(1, profile.max_logits)] if has_more else []
        rows.add_row(str(index), profile.name, *sizes)
    results().print(rows)


def _print_attention(found: EngineInspection) -> None:
    """Print one row for each run of consecutive layers with the same attention."""
    if not found.attention:
        return
    length = found.cache.max_sequence_length
    windows = {choice.layer: window_in_cache(found.model.layers[choice.layer].attention, length) for choice in found.attention}
    has_windows = any(window is not None for window in windows.values())
    rows = table("layers", "attention", *(["window"] if has_windows else []), "decomposable", title="Attention")
    numbered = enumerate(found.attention)
    for (variant, window, decomposable, reason, _), run in groupby(
        numbered,
        lambda pair: (pair[1].variant, windows[pair[1].layer], pair[1].decomposable, pair[1].reason, pair[1].layer - pair[0]),
    ):
        layers = [choice.layer for _, choice in run]
        size = ["" if window is None else str(window)] if has_windows else []
        rows.add_row(span(layers[0], layers[-1]), variant, *size, f"yes: {reason}" if decomposable else "no")
    results().print(rows)
    if found.attention_reason:
        say(f"{found.attention[0].variant} attention, because {found.attention_reason}")


def _print_segments(segments: SegmentsRecord, *, every_segment: bool) -> None:
    if not every_segment:
        operations = Counter(step.operation for step in segments.stages if not isinstance(step, Segment))
        between = ", ".join(f"{operation} ({number})" for operation, number in operations.items())
        say(f"{count(len(segments.plans), 'segment')}, with operations between them: {between}; --tensors lists them")
        return
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
    states = 0 if cache.mamba is None else cache.mamba.slot_nbytes
    sizes = {"engine.plan": found.plan_nbytes, **constants, "weights of the checkpoint": found.checkpoint.nbytes}
    if found.v_outputs:
        sizes["V outputs of all layers"] = found.v_outputs_nbytes
    if found.adapters is not None:
        sizes["adapters, of all ranks"] = found.adapters_nbytes
    if found.max_embeddings:
        sizes["rows in place of rows of the embedding"] = found.embeddings_nbytes
    if found.draft_head is not None:
        sizes["plan of the draft head"] = found.draft_head.plan_nbytes
        sizes["cache of the draft head"] = found.draft_head.memory.nbytes
        sizes["hidden states of a session with drafts"] = found.hidden_states_nbytes
    if cache.kv is not None:
        sizes["K and V of one token"] = memory.bytes_per_token
        sizes[f"K and V of one sequence of {cache.max_sequence_length}"] = memory.bytes_per_sequence - states
        sizes["K and V of one layer"] = memory.bytes_per_layer[0]
    if states:
        sizes["states of one sequence, both buffers"] = states
    sizes[f"cache of {count(cache.max_batch_size, 'slot')}"] = memory.nbytes
    for what, nbytes in sizes.items():
        rows.add_row(what, str(nbytes), size(nbytes))
    results().print(rows)
