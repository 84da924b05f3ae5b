"""``trt-kvcache compare``: run a model by several paths and compare every step."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from trt_kvcache.builder.checked_build import checked_build
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import as_json, messages, note, put_json, say, warn
from trt_kvcache.cli.formats import weights_format
from trt_kvcache.cli.interrupt import held_interrupts
from trt_kvcache.cli.option_groups import Json, choice
from trt_kvcache.cli.prompt_flags import PromptIds, Prompts, read_prompts
from trt_kvcache.engine.attention_variants import AttentionName, tensorrt_attention
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import BuildError, ConfigError, CudaError, EngineError
from trt_kvcache.session.open_model import why_no_tensorrt
from trt_kvcache.session.session_options import ENGINE_ALIASES, DTypeChoice, FlavourChoice, SessionOptions
from trt_kvcache.session.session_source import SessionSource

if TYPE_CHECKING:
    from trt_kvcache.polygraphy.comparison import Comparison

DIFFERS = 3

ReferenceName = Literal["numpy", "torch"]


def compare(
    folder: session_flags.Folder,
    prompt: Prompts = None,
    prompt_ids: PromptIds = None,
    steps: Annotated[int, typer.Option(min=0, metavar="N", help="Decode steps after the prefill.")] = 16,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Largest allowed difference, relative to the largest value of the slot and head. Default: depends on the dtype.",
        ),
    ] = None,
    engine: session_flags.EngineOption = "auto",
    reference: Annotated[
        ReferenceName,
        choice(ReferenceName, "--reference", aliases=ENGINE_ALIASES, help="Reference for the others: NumPy, or PyTorch (faster)."),
    ] = "numpy",
    flavour: session_flags.FlavourOption = "auto",
    max_sequence_length: session_flags.MaxSequenceLength = None,
    dtype: session_flags.DTypeOption = None,
    attention: session_flags.AttentionOption = None,
    plugin_layers: session_flags.PluginLayersOption = None,
    quantize: session_flags.QuantizeOption = None,
    adapter: session_flags.AdapterOrName = None,
    adapters: session_flags.AdaptersOption = None,
    kv_dtype: session_flags.KVDTypeOption = None,
    kv_scales: session_flags.KVScalesOption = None,
    json: Json = False,
) -> None:
    """Compare the engines that can run a model, step by step.

    They run the same tokens, and logits and live cache rows are compared: the NumPy reference engine, with its cache and once more
    recomputing everything at each step, and TensorRT if a supported GPU is present, or PyTorch with --engine torch. Each runs with
    TensorRT's attention and with the plugin's, unless --attention names one; with quantized K and V only with the plugin's. At a
    difference, the first step, layer, slot and head are printed, and the exit code is 3. For an engine folder, the engine with the other
    attention is built from its checkpoint.
    """
    from trt_kvcache.polygraphy.comparison import comparison_lines
    from trt_kvcache.polygraphy.path_comparison import TOLERANCES, compare_paths
    from trt_kvcache.polygraphy.runners import RecomputeRunner, SessionRunner

    prompts = read_prompts(prompt, prompt_ids)
    if tolerance is not None and not tolerance >= 0:
        raise typer.BadParameter(f"expected 0 or more, got {tolerance}.", param_hint="--tolerance")

    folder = session_flags.located(folder)
    packed = weights_format(folder)
    if packed is not None:
        note(f"weights: {packed}")
    flags = session_flags.SessionFlags(
        engine=reference,
        flavour=flavour,
        max_sequence_length=max_sequence_length,
        dtype=dtype,
        attention=attention,
        plugin_layers=plugin_layers,
        quantize=quantize,
        adapter=adapter,
        adapters=adapters,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
    )
    source = flags.source(folder, slots=len(prompts))
    name_of_reference = "reference" if reference == "numpy" else reference
    sources = {"": source}
    runner = partial(SessionRunner, adapter=flags.request_adapter)
    paths = [runner(source, name_of_reference), RecomputeRunner(source, "full recomputation", adapter=flags.request_adapter)]
    if attention is None and kv_dtype is None and not _has_quantized_kv(folder):
        other = _other_attention(folder, source)
        sources[f"{other.options.attention} "] = other
        paths.append(runner(other, f"{other.options.attention} {name_of_reference}"))
    if engine == "torch" != reference:
        paths[:0] = [runner(one.replace(engine="torch"), f"{name}torch") for name, one in sources.items()]
    with ExitStack() as opened:
        if _with_tensorrt(engine, folder, flavour):
            refusals = (BuildError, CudaError, EngineError) if engine == "auto" else ()
            for place, (name, source) in enumerate(sources.items()):
                try:
                    session = opened.enter_context(session_flags.open_session(source.replace(engine="tensorrt")))
                except refusals as error:
                    warn(f"comparing without {name}TensorRT: {error}")
                    break
                paths.insert(place, runner(session, f"{name}TensorRT"))
                refusals = (*refusals, ConfigError)  # the other attention may not support this model
        with messages().status("prefill") as status:
            comparison = compare_paths(
                paths,
                prompts,
                steps=steps,
                tolerances=TOLERANCES if tolerance is None else dict.fromkeys(TOLERANCES, tolerance),
                on_step=lambda step: status.update(f"step {step} of {steps}"),
            )
    if json:
        put_json(_document(comparison))
    else:
        for line in comparison_lines(comparison):
            say(line)
    if not comparison.agrees:
        raise typer.Exit(DIFFERS)


def _document(comparison: "Comparison") -> dict[str, Any]:
    """Return the document for ``--json``: all fields of the comparison."""
    document: dict[str, Any] = {"agrees": comparison.agrees, **as_json(comparison)}
    document["pairs"] = [{"agrees": pair.agrees, **as_json(pair)} for pair in comparison.pairs]
    return document


def _with_tensorrt(engine: str, folder: Path, flavour: str) -> bool:
    """Tell whether TensorRT is compared too. If ``auto`` leaves it out, warn with the reason."""
    if engine != "auto":
        return engine == "tensorrt"
    built_by = EngineFolder.open(folder).config.tensorrt_flavour if is_engine_folder(folder) else "auto"
    with held_interrupts():  # it imports TensorRT
        reason = why_no_tensorrt(built_by if flavour == "auto" else flavour)
    if reason is not None:
        warn(f"comparing without TensorRT: {reason}")
    return reason is None


def _has_quantized_kv(folder: Path) -> bool:
    """Tell whether a folder has an engine with quantized K and V."""
    kv = EngineFolder.open(folder).config.cache.kv if is_engine_folder(folder) else None
    return kv is not None and kv.has_scales


def _other_attention(folder: Path, reference: SessionSource) -> SessionSource:
    """Return a source of the same model and sizes with the other attention: the plugin's, or TensorRT's if the engine has the plugin's."""
    if not is_engine_folder(folder):
        return reference.replace(attention=_other_than_auto(folder, reference.options))
    engine = EngineFolder.open(folder)
    config = engine.config
    return reference.replace(
        engine.checkpoint_path if engine.checkpoint_path.is_dir() else config.checkpoint.path,
        flavour=cast(FlavourChoice, config.tensorrt_flavour) if reference.options.flavour == "auto" else reference.options.flavour,
        max_batch_size=config.cache.max_batch_size,
        max_sequence_length=config.cache.max_sequence_length,
        max_prefill_length=config.max_prefill_length,
        dtype=cast(DTypeChoice, config.dtype),
        quantize=config.checkpoint.quantize or None,
        adapter=str(engine.find_adapter() or config.checkpoint.adapter) or None,
        attention=_beside_plugin(config) if config.attention_variant == "plugin" else "plugin",
    )


def _other_than_auto(folder: Path, options: SessionOptions) -> AttentionName:
    """Return the plugin's attention, or TensorRT's if the plugin's is what a build takes here."""
    given = BuildOptions(
        dtype=options.dtype,
        flavour=options.flavour,
        device=options.device,
        quantize=options.quantize,
        adapter=options.adapter,
        max_sequence_length=options.max_sequence_length,
    )
    try:
        build = checked_build(folder, None, given, dry_run=True)
    except ConfigError:  # TensorRT cannot build the model: other engines are compared
        return "plugin"
    build.checkpoint.close()
    return next(iter(build.options.choice.others), "mask") if build.options.attention == "plugin" else "plugin"


def _beside_plugin(config: EngineFolderConfig) -> AttentionName:
    """Return the variant of TensorRT's attention for a model; for full TensorRT the variant that every release computes correctly."""
    return "mask" if config.tensorrt_flavour == "tensorrt" else tensorrt_attention(config.model, config.cache.max_sequence_length)
