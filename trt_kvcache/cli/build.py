"""``trt-kvcache build``: build an engine folder from a model folder."""

import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from trt_kvcache.builder.build_engine import BuildReport
from trt_kvcache.builder.checked_build import checked_build
from trt_kvcache.builder.estimate import BuildEstimate, estimate_build, estimate_checked
from trt_kvcache.builder.options import DEFAULT_MAX_PREFILL_LENGTH, MAX_OPTIMIZATION_LEVEL, BuildKeywords, BuildOptions
from trt_kvcache.checkpoint.weight_files import has_weight_files
from trt_kvcache.cli.build_process import build_in_child
from trt_kvcache.cli.console import as_json, count, length_limit, note, progress_display, put_json, results, say, size, table
from trt_kvcache.cli.formats import kv_format
from trt_kvcache.cli.option_groups import Json, choice, logits_per_slot
from trt_kvcache.cli.session_flags import (
    ADAPTER_HELP,
    ATTENTION_HELP,
    DTYPE_HELP,
    KV_DTYPE_HELP,
    KV_SCALES_HELP,
    MAX_SEQUENCE_LENGTH_HELP,
    PLUGIN_LAYERS_HELP,
    QUANTIZE_HELP,
    DTypeName,
    FlavourName,
    located,
    located_adapter,
    located_draft_head,
    located_headers,
)
from trt_kvcache.dtypes import DTYPE_SHORT_NAMES
from trt_kvcache.engine.attention_variants import AUTO, AttentionSetting
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import CheckpointError, KVCacheError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.session.session_options import KVDTypeChoice, KVScalesChoice, PluginLayersChoice

_STOPPING = "Ctrl-C: the build stops when TensorRT next reports, which can take a minute. Press Ctrl-C again to end it at once."


@dataclass(frozen=True, kw_only=True)
class BuildFlags:
    """Options of the command line with the names of :class:`~trt_kvcache.builder.options.BuildOptions`."""

    max_batch_size: Annotated[int, typer.Option(min=1, metavar="SLOTS", help="Slots of the cache.")] = 1
    max_sequence_length: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help=MAX_SEQUENCE_LENGTH_HELP)] = None
    max_prefill_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help=f"Most new tokens of a slot in one enqueue; longer prompts run in chunks. Default: at most {DEFAULT_MAX_PREFILL_LENGTH}.",
        ),
    ] = None
    max_logits_per_slot: Annotated[
        Any,
        logits_per_slot(
            help="Most new tokens of a slot whose logits one enqueue returns: for score, and to verify drafts. Memory: slots x tokens x "
            "vocabulary x 4 bytes."
        ),
    ] = 1
    dtype: Annotated[DTypeName | None, choice(DTypeName, "--dtype", aliases=DTYPE_SHORT_NAMES, help=DTYPE_HELP)] = None
    attention: Annotated[AttentionSetting, choice(AttentionSetting, "--attention", help=ATTENTION_HELP)] = AUTO
    plugin_layers: Annotated[PluginLayersChoice, choice(PluginLayersChoice, "--plugin-layers", help=PLUGIN_LAYERS_HELP)] = "one-plan"
    plugin_library: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With plugin attention: a plugin library in C++, whose plugin the engine uses, and carries. The engine runs code of it.",
        ),
    ] = None
    v_outputs: Annotated[
        bool | None,
        typer.Option(
            "--v-outputs/--no-v-outputs",
            help="With plugin layers in full TensorRT: make V an output too, which nobody reads. Default: with 10.13 and 10.14, which may "
            "corrupt V.",
        ),
    ] = None
    packed_kernels: Annotated[
        bool,
        typer.Option(
            "--packed-kernels",
            help="With plugin attention: multiply with packed weights by kernels of this package. They also keep FP4, and "
            "Q4_K, Q5_K and Q6_K of GGUF, packed.",
        ),
    ] = False
    flavour: Annotated[
        FlavourName,
        choice(
            FlavourName,
            "--flavour",
            help="Which TensorRT to use. auto: full TensorRT if it works and has native attention, else TensorRT for RTX.",
        ),
    ] = "auto"
    device: Annotated[
        int, typer.Option(min=0, metavar="N", help="Index of the GPU: full TensorRT builds for it, and auto attention depends on it.")
    ] = 0
    embed_weights: Annotated[bool, typer.Option("--embed-weights", help="Copy the checkpoint into the engine folder.")] = False
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X.Y",
            help="Build for this compute capability only (TensorRT for RTX). Can be given several times. Default: all supported ones.",
        ),
    ] = None
    builder_optimization_level: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_OPTIMIZATION_LEVEL,
            metavar="N",
            help="How hard TensorRT searches for fast kernels; 0 builds fastest. Default: 3.",
        ),
    ] = None
    quantize: Annotated[str | None, typer.Option(metavar="FORMAT", help=QUANTIZE_HELP)] = None
    adapter: Annotated[str | None, typer.Option(metavar="ADAPTER", help=ADAPTER_HELP)] = None
    adapters_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Make inputs for LoRA adapters, so that --adapters of other commands needs no build: most ranks of all adapters together. "
            "Default: none.",
        ),
    ] = None
    adapters_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --adapters-rank: a linear layer that adapters may change, such as q_proj. Can be given several times. Default: all.",
        ),
    ] = None
    max_embeddings: Annotated[
        int,
        typer.Option(
            min=0, metavar="ROWS", help="Make an input for rows in place of rows of the embedding, such as the features of an image."
        ),
    ] = 0
    draft_tree: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=MAX_TREE_TOKENS,
            metavar="N",
            help="Make an input for trees of draft tokens, for --draft-tree of other commands: most tokens of a tree. "
            "Default: chains only.",
        ),
    ] = None
    draft_head: Annotated[
        str | None,
        typer.Option(
            metavar="mtp|HEAD",
            help="Build the engine of a draft head too, for --draft of other commands: mtp for the multi-token prediction head in the "
            "model folder, or the folder of an EAGLE-3 head, or its id of the Hugging Face Hub. Default: none.",
        ),
    ] = None
    kv_dtype: Annotated[KVDTypeChoice | None, choice(KVDTypeChoice, "--kv-dtype", help=KV_DTYPE_HELP)] = None
    kv_scales: Annotated[KVScalesChoice | None, choice(KVScalesChoice, "--kv-scales", help=KV_SCALES_HELP)] = None
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start from the kernel timings in this file and add to them (full TensorRT). It need not exist."),
    ] = None

    def keywords(self) -> BuildKeywords:
        """Return the arguments of ``build_engine``."""
        options = {**vars(self)}
        options["compute_capabilities"] = options.pop("compute_capability") or None
        options["adapters_modules"] = options.pop("adapters_module") or None
        options["adapter"] = located_adapter(self.adapter)
        options["draft_head"] = located_draft_head(self.draft_head)
        options["operations"] = None  # they are registered from Python
        return cast(BuildKeywords, options)


def build(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A Hugging Face folder, a GGUF file, or an id of the Hugging Face Hub."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="ENGINE", help="The engine folder to write. An existing one is replaced.")
    ],
    flags: BuildFlags,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build nothing: print the sizes of plan, cache and peak memory.")] = False,
    json: Json = False,
) -> None:
    """Build a TensorRT engine from a model folder. TensorRT for RTX needs no GPU for it."""
    if is_engine_folder(model):
        raise CheckpointError(f"{model}: expected a Hugging Face folder, got an engine folder.")
    options = flags.keywords()
    if dry_run:
        with located_headers(model) as folder:
            with closing(checked_build(folder, output, BuildOptions.of(options), dry_run=True)) as checked:
                estimate = estimate_checked(checked)
            if not has_weight_files(folder):
                note(f"{model}: no weights found, which a build needs; only config.json was checked")
        if json:
            put_json(as_json(estimate))
        else:
            print_build_sizes(estimate)
        return
    folder = located(model)
    with progress_display() as progress:
        report = build_in_child(folder, output, progress=progress, on_interrupt=lambda: note(_STOPPING), **options)
    for warning in report.warnings:
        note(f"TensorRT warns: {warning}")
    if json:
        put_json(as_json(report))
    else:
        _print_report(report)
        if flags.quantize is not None:
            _note_larger_plan(report, folder, options)


def print_build_sizes(estimate: BuildEstimate) -> None:
    """Print an estimate of a build."""
    rows = table("what", "bytes", "size", numbers=("bytes", "size"), title="Before the build (estimate)")
    constants = {"constants": estimate.constants_nbytes} if estimate.constants_nbytes else {}
    adapters = {"adapters": estimate.adapters_nbytes} if estimate.adapters_nbytes else {}
    head = estimate.draft_head
    drafts = {} if head is None else {"hidden states": estimate.hidden_states_nbytes, "draft head": head.device_nbytes}
    rows_of_prompts = {"rows of prompts": estimate.embeddings_nbytes} if estimate.embeddings_nbytes else {}
    sizes = {
        "weights": estimate.weights_nbytes,
        "plan: weights and kernels": estimate.plan_nbytes,
        **constants,
        "cache": estimate.cache_nbytes,
        **adapters,
        **rows_of_prompts,
        "activations and logits": estimate.activations_nbytes,
        **drafts,
        "GPU, in all": estimate.device_nbytes,
        "disk": estimate.disk_nbytes,
        "host, at the peak of the build": estimate.host_peak_nbytes,
    }
    for what, nbytes in sizes.items():
        rows.add_row(what, str(nbytes), size(nbytes))
    results().print(rows)


def _note_larger_plan(report: BuildReport, folder: Path, options: BuildKeywords) -> None:
    """Print the reason if quantization has made the plan larger."""
    try:
        plain = estimate_build(folder, **cast(BuildKeywords, {**options, "quantize": None})).plan_nbytes
    except KVCacheError:  # no estimate for this build
        return
    if report.plan_nbytes > plain:
        note(
            f"without --quantize the plan would take about {size(plain)}: kernels for rounded weights take more than rounding saves of a "
            "model this small"
        )


def _print_report(report: BuildReport) -> None:
    peak = "" if report.peak_memory_nbytes is None else f", peak memory {size(report.peak_memory_nbytes)}"
    say(f"{report.path}: {size(report.plan_nbytes)} by {report.tensorrt} in {report.seconds:.1f} s{peak}")
    config = EngineFolder.open(report.path).config
    cache, kv = config.cache, config.cache.kv
    stored = kv_format(cache.dtype, kv.scales if kv else None)
    say(f"{count(cache.max_batch_size, 'slot')} of {length_limit(cache.max_sequence_length)}, {stored}; {_gpus(config)}")
    if config.model.attention_layers:
        say(f"attention: {config.attention_variant}, because {config.attention_reason}")
    say(f'next: trt-kvcache generate {shlex.quote(str(report.path))} --prompt "..."')
    decomposed = sum(choice.decomposable for choice in report.attention)
    if decomposed:
        say(f"attention of {count(decomposed, 'layer')} is decomposable; `trt-kvcache inspect {report.path}` says why")


def _gpus(config: EngineFolderConfig) -> str:
    """Return the GPUs of an engine, in words."""
    if config.compute_capabilities:
        return f"for GPUs of compute capability {', '.join(config.compute_capabilities)}"
    return f"for all GPUs that {config.tensorrt_flavour} supports"
