"""``trt-kvcache memory``: print how many bytes a cache takes, without allocating it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer

from trt_kvcache.cache.config import KVCacheConfig, KVLayerConfig
from trt_kvcache.cache.estimate import MemoryEstimate, estimate_memory, largest_batch, longest_sequence
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.checkpoint.json_file import read_json
from trt_kvcache.cli.console import count, results, say, size, span, table
from trt_kvcache.cli.options import choice
from trt_kvcache.cli.session_flags import located
from trt_kvcache.engine.decoder_tensors import cache_config
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import CapacityError, CheckpointError

_GIB = 2**30
_MAX_GIB = 1e9
_DTYPE_HELP = "Data type of K and V: float16, bfloat16, float32, float8_e4m3fn or int8. Default: the folder's, or float16."
_PANEL = "Without a folder"


KVDTypeName = Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]


def memory(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="ENGINE|MODEL", help="Folder or id of the Hugging Face Hub to take layers and heads from. Only config.json is read."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=10_000, metavar="N", help="Attention layers.", rich_help_panel=_PANEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, metavar="N", help="Key-value heads of each layer.", rich_help_panel=_PANEL)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, metavar="N", help="Elements of one K or V row.", rich_help_panel=_PANEL)] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="SLOTS", help="Slots. Default: those of the engine folder, or 1.")
    ] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens that a slot can hold. Default: the folder's.")
    ] = None,
    dtype: Annotated[KVDTypeName | None, choice(KVDTypeName, "--dtype", metavar="DTYPE", help=_DTYPE_HELP)] = None,
    gib: Annotated[float | None, typer.Option(metavar="N", help="Also print what fits into N GiB (2^30 bytes).")] = None,
) -> None:
    """Print the size of a cache in bytes.

    Per layer, per sequence and in total. Nothing is allocated.
    """
    if gib is not None and not 0 <= gib <= _MAX_GIB:
        raise typer.BadParameter(f"expected 0 to {_MAX_GIB:g}, got {gib}.", param_hint="--gib")
    if folder is None:
        config = _config_of_numbers(layers, kv_heads, head_dim, max_sequence_length)
    elif (layers, kv_heads, head_dim) == (None, None, None):
        config = _config_of_folder(located(folder, ["config.json"]))
    else:
        raise typer.BadParameter("expected a folder, or --layers, --kv-heads and --head-dim, got both.")
    config = replace(
        config,
        max_batch_size=max_batch_size or config.max_batch_size,
        max_sequence_length=max_sequence_length or config.max_sequence_length,
        dtype=dtype or config.dtype,
    )
    _print_estimate(config, estimate_memory(config))
    if gib is not None:
        _print_what_fits(config, gib)


def _config_of_numbers(layers: int | None, kv_heads: int | None, head_dim: int | None, max_sequence_length: int | None) -> KVCacheConfig:
    if layers is None or kv_heads is None or head_dim is None or max_sequence_length is None:
        raise typer.BadParameter("expected a folder, or --layers, --kv-heads, --head-dim and --max-sequence-length.")
    layer = KVLayerConfig(num_kv_heads=kv_heads, head_dim=head_dim)
    return KVCacheConfig(layers=(layer,) * layers, max_batch_size=1, max_sequence_length=max_sequence_length)


def _config_of_folder(folder: Path) -> KVCacheConfig:
    if is_engine_folder(folder):
        return EngineFolder.open(folder).config.cache
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected an engine or model folder, got a file.")
    model = ModelConfig.from_dict(read_json(folder / "config.json"))
    return cache_config(model, max_batch_size=1, max_sequence_length=model.max_position_embeddings, dtype=model.dtype)


def _print_estimate(config: KVCacheConfig, estimate: MemoryEstimate) -> None:
    rows = table("layers", "KV heads", "head dim", "bytes per layer", "size", numbers=("bytes per layer", "size"))
    layers = enumerate(zip(config.layers, estimate.bytes_per_layer, strict=True))
    for (layer, nbytes), run in groupby(layers, lambda item: item[1]):
        indices = [index for index, _ in run]
        rows.add_row(span(indices[0], indices[-1]), str(layer.num_kv_heads), str(layer.head_dim), str(nbytes), size(nbytes))
    results().print(rows)
    slots, length = count(config.max_batch_size, "slot"), count(config.max_sequence_length, "token")
    say(f"{slots} of {length}, {config.dtype}, {config.layout.value}")
    say(f"per token:    {_bytes(estimate.bytes_per_token)}")
    say(f"per sequence: {_bytes(estimate.bytes_per_sequence)}")
    if estimate.scales_nbytes:
        say(f"scales:       {_bytes(estimate.scales_nbytes)}")
    say(f"in all:       {_bytes(estimate.nbytes)}")


def _print_what_fits(config: KVCacheConfig, gib: float) -> None:
    budget = int(gib * _GIB)
    say(f"in {gib:g} GiB ({budget} B):")
    slots, length = count(config.max_batch_size, "slot"), count(config.max_sequence_length, "token")
    say(f"  longest sequence with {slots}: {_fitting(longest_sequence, config, budget, 'token')}")
    say(f"  largest batch of {length}: {_fitting(largest_batch, config, budget, 'slot')}")


def _fitting(search: Callable[[KVCacheConfig, int], int], config: KVCacheConfig, budget: int, what: str) -> str:
    try:
        return count(search(config, budget), what)
    except CapacityError:
        return f"not even 1 {what} fits"


def _bytes(nbytes: int) -> str:
    return f"{nbytes} B ({size(nbytes)})"
