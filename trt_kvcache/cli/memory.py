"""``trt-kvcache memory``: print the size of a cache in bytes, without allocating it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.builder.estimate import BuildEstimate, estimate_build
from trt_kvcache.builder.options import DEFAULT_MAX_SEQUENCE_LENGTH, default_sequence_length
from trt_kvcache.builder.what_fits import Fit, what_fits
from trt_kvcache.cache.config import DecoderCacheConfig, HybridCacheConfig, KVCacheConfig
from trt_kvcache.cache.estimate import MemoryEstimate, estimate_memory, largest_batch, longest_sequence
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.recurrent_states import state_storages
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.cli.build import print_build_sizes
from trt_kvcache.cli.console import as_json, count, length_limit, note, put_json, results, say, size, span, table
from trt_kvcache.cli.formats import weights_format
from trt_kvcache.cli.option_groups import Json, WrongUsage, choice, logits_per_slot
from trt_kvcache.cli.session_flags import (
    DRAFT_HEAD_HELP,
    MAX_SEQUENCE_LENGTH_HELP,
    PER_LAYER_TABLE_HELP,
    QUANTIZE_HELP,
    located,
    located_draft_head,
    located_headers,
)
from trt_kvcache.dtypes import DTYPE_SHORT_NAMES, MODEL_DTYPES, SCALED_KV_DTYPES, dtype_in_full
from trt_kvcache.engine.attention_variants import window_in_cache
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import CapacityError
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.model.parameter_counts import ParameterCounts
from trt_kvcache.session.session_options import KVDTypeChoice, KVScalesChoice, PerLayerTableChoice

_GIB = 2**30
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_MAX_GIB = 1e9
#: A smaller size without a unit is refused: it probably means gigabytes.
_LEAST_WITHOUT_UNIT = 10**6
_DTYPE_HELP = "Data type of K and V: float16, bfloat16, float32, fp8 (float8_e4m3fn) or int8. Default: the folder's, or float16."
_PANEL = "Without a folder"

#: Files of a model that are needed, except for the sizes of its weights.
_FILES = ("config.json", "hf_quant_config.json")


_SHORT_NAMES = {name: dtype for name, dtype in DTYPE_SHORT_NAMES.items() if dtype in MODEL_DTYPES}

KVDTypeName = Literal["float16", "bfloat16", "float32", "fp8", "float8_e4m3fn", "int8"]


def memory(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="ENGINE|MODEL",
            help="Engine or model folder, or id of the Hugging Face Hub, to take layers and heads from. No weights are downloaded.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=10_000, metavar="N", help="Attention layers.", rich_help_panel=_PANEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, metavar="N", help="Key-value heads of each layer.", rich_help_panel=_PANEL)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, metavar="N", help="Elements of one K or V row.", rich_help_panel=_PANEL)] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="SLOTS", help="Slots. Default: those of the engine folder, or 1.")
    ] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help=f"{MAX_SEQUENCE_LENGTH_HELP} Of an engine folder: its own.")
    ] = None,
    dtype: Annotated[KVDTypeName | None, choice(KVDTypeName, "--dtype", aliases=_SHORT_NAMES, metavar="DTYPE", help=_DTYPE_HELP)] = None,
    kv_dtype: Annotated[
        KVDTypeChoice | None,
        choice(KVDTypeChoice, "--kv-dtype", help="Quantize K and V to 8 bits; --dtype is the dtype of the computation."),
    ] = None,
    kv_scales: Annotated[
        KVScalesChoice | None,
        choice(KVScalesChoice, "--kv-scales", help="Scales of K and V in 8 bits: for each token and head (default), or static ones."),
    ] = None,
    gib: Annotated[
        float | None,
        typer.Option(metavar="N", help="Also print the longest sequence and the largest batch that fit into N GiB (2^30 bytes)."),
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Also print the sizes of an engine of this model: plan, activations, peak memory of the build.")
    ] = False,
    max_logits_per_slot: Annotated[
        Any, logits_per_slot(help="With --engine: most new tokens of a slot whose logits one enqueue returns. Default: 1.")
    ] = None,
    quantize: Annotated[str | None, typer.Option(metavar="FORMAT", help=f"With --engine. {QUANTIZE_HELP}")] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X.Y",
            help="With --engine or --fit: of the GPUs. FP4 weights take 4 bits from 12.0 on, else the bytes of INT8.",
        ),
    ] = None,
    adapters_rank: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="With --engine or --fit: ranks of all LoRA adapters of a session together, to be counted too."
        ),
    ] = None,
    per_layer_table: Annotated[
        PerLayerTableChoice,
        choice(PerLayerTableChoice, "--per-layer-table", help=f"With --fit. {PER_LAYER_TABLE_HELP}"),
    ] = "device",
    draft_head: Annotated[str | None, typer.Option(metavar="mtp|HEAD", help=f"With --engine or --fit. {DRAFT_HEAD_HELP}")] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Also print the lengths and slots that fit into a GPU of this memory (8GB, 7.5GiB), for each format of weights, K and V.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the size of a cache in bytes.

    Per layer, per sequence and in total. Nothing is allocated.
    """
    dtype = dtype_in_full(dtype)
    memory_nbytes = None if fit is None else _parsed_size(fit)
    if compute_capability and not engine and fit is None:
        raise typer.BadParameter("expected --engine or --fit with it, got neither.", param_hint="--compute-capability")
    if adapters_rank is not None and not engine and fit is None:
        raise typer.BadParameter("expected --engine or --fit with it, got neither.", param_hint="--adapters-rank")
    if per_layer_table != "device" and fit is None:
        raise typer.BadParameter("expected --fit with it, got none.", param_hint="--per-layer-table")
    if draft_head is not None and not engine and fit is None:
        raise typer.BadParameter("expected --engine or --fit with it, got neither.", param_hint="--draft-head")
    if max_logits_per_slot is not None and not engine:
        raise typer.BadParameter("expected --engine with it, got none.", param_hint="--max-logits-per-slot")
    _check_formats(quantize, dtype, kv_dtype, with_engine=engine, with_fit=fit is not None)
    if gib is not None and not 0 <= gib <= _MAX_GIB:
        raise typer.BadParameter(f"expected 0 to {_MAX_GIB:g}, got {gib}.", param_hint="--gib")
    config: DecoderCacheConfig
    if folder is None:
        config = _config_of_numbers(layers, kv_heads, head_dim, max_sequence_length)
    elif (layers, kv_heads, head_dim) == (None, None, None):
        config = _config_of_folder(located(folder, _FILES))
    else:
        raise WrongUsage("expected a folder, or --layers, --kv-heads and --head-dim, got both.")
    if max_batch_size:
        config = config.with_max_batch_size(max_batch_size)
    if max_sequence_length:
        config = config.with_max_sequence_length(max_sequence_length)
    computed, stored = _dtypes(dtype, kv_dtype)
    if kv_scales and stored is None:
        raise typer.BadParameter("expected --kv-dtype fp8 or int8 with it, got none.", param_hint="--kv-scales")
    if computed:
        config = _with_dtype(config, computed, None)
    if stored:
        config = _with_dtype(config, stored, kv_scales or "token")
    estimate = estimate_memory(config)
    model = _model_of(folder)
    packed = None if folder is None else weights_format(located(folder, _FILES))
    positions = None if model is None else model.max_position_embeddings
    parameters = _parameters(model)
    asked = {"dtype": computed, "max_logits_per_slot": max_logits_per_slot or 1, "quantize": quantize}
    head = {"draft_head": located_draft_head(draft_head)}
    both = {"compute_capabilities": compute_capability or None, "adapters_rank": adapters_rank, **head}
    build = _build_estimate(folder, config, **asked, **both, kv_dtype=stored, kv_scales=kv_scales) if engine else None
    placed = {**both, "per_layer_table": per_layer_table}
    fitting = None if memory_nbytes is None else _fits(folder, memory_nbytes, config, max_sequence_length, **placed)
    if json:
        extra = {} if build is None else {"build": as_json(build)}
        fits = {} if gib is None else _what_fits(config, gib, positions)
        weights = {} if packed is None else {"weights_format": packed}
        weights |= {} if parameters is None else {"parameters": as_json(parameters)}
        formats = {} if fitting is None else {"fits": as_json(fitting)}
        put_json({"config": as_json(config), "estimate": as_json(estimate), **weights, **extra, **fits, **formats})
        return
    if positions is not None and config.kv is not None and config.max_sequence_length > positions:
        note(f"the model was made for {positions} positions: no engine holds slots of {config.max_sequence_length} tokens")
    _print_estimate(config, estimate, model)
    if packed is not None:
        say(f"weights:      {packed}")
    if parameters is not None:
        total, active = (f"{number} ({number / 1e9:.1f} billion)" for number in (parameters.total, parameters.active))
        say(f"parameters:   {total}, {active} of them for each token")
    if build is not None:
        print_build_sizes(build)
    if gib is not None:
        _print_what_fits(config, gib, positions)
    if fitting is not None and memory_nbytes is not None:
        of_engine = "with PyTorch, and the table of per-layer embeddings in host memory"
        _print_fits(fitting, memory_nbytes, config, max_sequence_length, None if per_layer_table == "device" else of_engine)


def _parameters(model: ModelConfig | None) -> ParameterCounts | None:
    """Return the parameters of a model with experts, of which a token uses some; None for others."""
    if model is None or not any(isinstance(layer.mlp, RoutedMlpConfig) for layer in model.layers):
        return None
    return ParameterCounts.of(model)


def _check_formats(quantize: str | None, dtype: str | None, kv_dtype: str | None, *, with_engine: bool, with_fit: bool) -> None:
    """Raise an error if formats are given without the option that uses them."""
    if quantize is not None:
        Quantization.parse(quantize)
        if not with_engine and not with_fit:
            raise typer.BadParameter("expected --engine with it, got none: a cache has no weights.", param_hint="--quantize")
    of_kv = "--kv-dtype" if kv_dtype is not None else "--dtype" if dtype in SCALED_KV_DTYPES else None
    given = "--quantize" if quantize is not None else of_kv
    if with_fit and given is not None:
        raise typer.BadParameter("expected without --fit, which lists all formats of weights, K and V.", param_hint=given)


def _dtypes(dtype: str | None, kv_dtype: str | None) -> tuple[str | None, str | None]:
    """Return the dtype of the computation and of quantized K and V, None if not given. ``--dtype`` may be either."""
    if dtype not in SCALED_KV_DTYPES:
        return dtype, None if kv_dtype is None else dtype_in_full(kv_dtype)
    if kv_dtype is not None:
        raise typer.BadParameter(f"expected --dtype {' or '.join(MODEL_DTYPES)} with it, got {dtype}.", param_hint="--kv-dtype")
    return None, dtype


def _parsed_size(text: str) -> int:
    """Parse a size such as ``8GB`` to bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B?)\s*", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"expected a size such as 8GB (10^9 bytes) or 7.5GiB (2^30), got {text!r}.", param_hint="--fit")
    nbytes = int(Decimal(found[1]) * _UNITS[found[2].upper().removesuffix("B")])
    if not found[2] and nbytes < _LEAST_WITHOUT_UNIT:
        raise typer.BadParameter(f"expected a unit with it, such as {found[1]}GB or {found[1]}GiB, got {text!r}.", param_hint="--fit")
    if nbytes > _MAX_GIB * _GIB:
        raise typer.BadParameter(f"expected at most {_MAX_GIB:g} GiB, got {short_repr(text)}.", param_hint="--fit")
    return nbytes


def _fits(folder: Path | None, nbytes: int, config: DecoderCacheConfig, length: int | None, **asked: Any) -> tuple[Fit, ...]:
    if folder is None:
        raise typer.BadParameter("expected a model folder with it, got none.", param_hint="--fit")
    if is_engine_folder(folder):
        engine = EngineFolder.open(folder)
        built_from = engine.find_checkpoint() or engine.config.checkpoint.path
        raise typer.BadParameter(
            f"expected a model folder with it, got an engine folder, whose formats are fixed. It was built from {built_from}.",
            param_hint="--fit",
        )
    dtype = config.dtype if config.dtype in MODEL_DTYPES else None
    with located_headers(folder) as path:
        return what_fits(path, nbytes, max_batch_size=config.max_batch_size, max_sequence_length=length, dtype=dtype, **asked)


def _print_fits(fits: Sequence[Fit], nbytes: int, config: DecoderCacheConfig, length: int | None, of_engine: str | None) -> None:
    """Print a row for each format of weights, and of K and V. ``of_engine``: the engine in words, if the caller chose it."""
    slots = f"tokens of {count(config.max_batch_size, 'slot')}"
    batch = f"slots of {length or min(config.max_sequence_length, DEFAULT_MAX_SEQUENCE_LENGTH)} tokens"
    numbers = ("weights take", slots, batch)
    without = "with PyTorch, since TensorRT does not build this model"
    engine = of_engine or (without if fits and fits[0].engine == "torch" else "as an engine")
    rows = table("weights", "K and V", *numbers, numbers=numbers, title=f"In {size(nbytes)} of a GPU ({nbytes} B), {engine} (estimate)")
    remarks: dict[str, int] = {}
    for index, one in enumerate(fits):
        kv = one.kv_dtype if one.kv_scales is None else f"8 bits, scale a {one.kv_scales}"
        found = (str(number) if number else "-" for number in (one.longest_sequence, one.largest_batch))
        remark = _remark(one, [before for before in fits[:index] if (before.kv_dtype, before.kv_scales) == (one.kv_dtype, one.kv_scales)])
        mark = "" if remark is None else f" ({remarks.setdefault(remark, len(remarks) + 1)})"
        rows.add_row(one.weights + mark, kv, size(one.weights_nbytes), *found)
    results().print(rows)
    for remark, number in remarks.items():
        say(f"({number}) {remark}")


def _remark(fit: Fit, before: Sequence[Fit]) -> str | None:
    """Return a remark on an unexpected row, compared with earlier rows of the same K and V."""
    if not (fit.longest_sequence and fit.largest_batch):
        return "not even one token, or one slot, fits"
    if any(fit.weights_nbytes < other.weights_nbytes and fit.largest_batch < other.largest_batch for other in before):
        return "fewer slots: kernels for rounded weights take more than rounding saves of a model this small"
    return None


def _with_dtype(config: DecoderCacheConfig, dtype: str, scales: str | None) -> DecoderCacheConfig:
    """Return a configuration with another dtype of K and V; conv states follow, unless it is a quantized dtype."""
    kv = None if config.kv is None else replace(config.kv, dtype=dtype, scales=scales)
    if kv is not None and config.mamba is None:
        return kv
    mamba = replace(config.mamba, conv_dtype=dtype) if config.mamba is not None and dtype in MODEL_DTYPES else config.mamba
    return HybridCacheConfig(layer_types=config.layer_types, kv=kv, mamba=mamba)


def _config_of_numbers(layers: int | None, kv_heads: int | None, head_dim: int | None, max_sequence_length: int | None) -> KVCacheConfig:
    if layers is None or kv_heads is None or head_dim is None or max_sequence_length is None:
        raise WrongUsage("expected a folder, or --layers, --kv-heads, --head-dim and --max-sequence-length.")
    layer = KVLayerConfig(num_kv_heads=kv_heads, head_dim=head_dim)
    return KVCacheConfig(layers=(layer,) * layers, max_batch_size=1, max_sequence_length=max_sequence_length)


def _build_estimate(folder: Path | None, config: DecoderCacheConfig, **asked: Any) -> BuildEstimate:
    if folder is None or is_engine_folder(folder):
        raise typer.BadParameter(
            "expected a model folder with it; `trt-kvcache inspect` has the sizes of an engine.", param_hint="--engine"
        )
    with located_headers(folder) as path:
        return estimate_build(path, max_batch_size=config.max_batch_size, max_sequence_length=config.max_sequence_length, **asked)


def _config_of_folder(folder: Path) -> DecoderCacheConfig:
    if is_engine_folder(folder):
        return EngineFolder.open(folder).config.cache
    model = Checkpoint.read_config(folder)
    return decoder_cache_config(model, max_batch_size=1, max_sequence_length=default_sequence_length(model), dtype=model.dtype)


def _model_of(folder: Path | None) -> ModelConfig | None:
    """Return the model of a folder."""
    if folder is None:
        return None
    folder = located(folder, _FILES)
    if is_engine_folder(folder):
        return EngineFolder.open(folder).config.model
    return Checkpoint.read_config(folder)


def _print_estimate(config: DecoderCacheConfig, estimate: MemoryEstimate, model: ModelConfig | None) -> None:
    if config.kv is not None:
        _print_attention_layers(config.kv, estimate, model)
    slots, length = count(config.max_batch_size, "slot"), length_limit(config.max_sequence_length)
    say(f"{slots} of {length}, {config.dtype}" + (f", {config.kv.layout.value}" if config.kv else ""))
    if config.mamba is not None:
        shapes = " and ".join(str(storage.slot_shape) for storage in state_storages(config.mamba).values())
        say(f"states:       {_bytes(estimate.states_nbytes)} in {count(config.mamba.num_layers, 'layer')} of {shapes}, two buffers")
    say(f"per token:    {_bytes(estimate.bytes_per_token)}")
    say(f"per sequence: {_bytes(estimate.bytes_per_sequence)}")
    if estimate.scales_nbytes:
        say(f"scales:       {_bytes(estimate.scales_nbytes)}")
    say(f"in all:       {_bytes(estimate.nbytes)}")


def _print_attention_layers(kv: KVCacheConfig, estimate: MemoryEstimate, model: ModelConfig | None) -> None:
    """Print one row for each run of consecutive equal attention layers. Sliding-window layers save no bytes."""
    mixers = [None] * kv.num_layers if model is None else model.kv_layers
    windows = [None if mixer is None else window_in_cache(mixer, kv.max_sequence_length) for mixer in mixers]
    window = ["window"] if any(windows) else []
    rows = table("layers", "KV heads", "head dim", *window, "bytes per layer", "size", numbers=("bytes per layer", "size"))
    layers = zip(_attention_indices(kv, model), kv.layers, windows, estimate.bytes_per_layer, strict=True)
    for (layer, tokens, nbytes, _), run in groupby(enumerate(layers), lambda item: (*item[1][1:], item[1][0] - item[0])):
        indices = [index for _, (index, *_) in run]
        shown = [str(tokens or "")] if window else []
        rows.add_row(span(indices[0], indices[-1]), str(layer.num_kv_heads), str(layer.head_dim), *shown, str(nbytes), size(nbytes))
    results().print(rows)
    readers = 0 if model is None else len(model.attention_layers) - len(model.kv_layers)
    if readers:
        say(f"shared K/V:   {count(readers, 'more layer')} {'reads' if readers == 1 else 'read'} K and V of these")


def _attention_indices(kv: KVCacheConfig, model: ModelConfig | None) -> Sequence[int]:
    """Return the index of each layer that stores K and V among all layers of the model."""
    if model is None:
        return range(kv.num_layers)
    return model.kv_indices


def _what_fits(config: DecoderCacheConfig, gib: float, positions: int | None) -> dict[str, int]:
    """Return the largest sizes that fit, for ``--json``."""
    longest, batch = (_fitting(search, config, int(gib * _GIB)) for search in (longest_sequence, largest_batch))
    return {"longest_sequence": longest if positions is None else min(longest, positions), "largest_batch": batch}


def _print_what_fits(config: DecoderCacheConfig, gib: float, positions: int | None) -> None:
    budget = int(gib * _GIB)
    say(f"in {gib:g} GiB ({budget} B):")
    slots, length = count(config.max_batch_size, "slot"), length_limit(config.max_sequence_length)
    longest, batch = (_fitting(search, config, budget) for search in (longest_sequence, largest_batch))
    at_most = positions or longest
    positions_end = ", all positions of the model" if longest > at_most else ""
    say(f"  longest sequence with {slots}: {length_limit(min(longest, at_most)) + positions_end if longest else 'not even 1 token fits'}")
    say(f"  largest batch of {length}: {count(batch, 'slot') if batch else 'not even 1 slot fits'}")


def _fitting(search: Callable[[DecoderCacheConfig, int], int], config: DecoderCacheConfig, budget: int) -> int:
    """Return the largest size that fits; 0 if not even one slot or token does."""
    try:
        return search(config, budget)
    except CapacityError:
        return 0


def _bytes(nbytes: int) -> str:
    return f"{nbytes} B ({size(nbytes)})"
