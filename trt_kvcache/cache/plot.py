"""A plot of a cache: the tokens of each slot, and the bytes of each layer."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import ShapeError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.plot import GREY, INK, LEGEND, Plot, draw, paint_sizes, size_text

#: The kinds of tokens of a slot and their colours, which differ in brightness too.
COLOURS = {"reused": "#1b4f72", "live": "#5dade2", "free": "#e8eef2"}
#: The colour of the bytes of a layer.
LAYER_COLOUR = "#ca6f1e"

#: Slots up to which each is labelled with its name and number of tokens.
_MAX_NAMED_SLOTS = 40


def draw_cache(config: DecoderCacheConfig, lengths: Sequence[int] = (), reused: Sequence[int] = (), *, title: str = "KV cache") -> Plot:
    """Return a plot of a cache.

    Parameters
    ----------
    config : KVCacheConfig, CacheConfig, MambaCacheConfig or HybridCacheConfig
        The cache.
    lengths : sequence of int (A,)
        Tokens that each active slot holds. Slots without a length are drawn as not active.
    reused : sequence of int (A,)
        For each active slot how many of its tokens, from the start, were restored or kept instead of computed. Slots without a
        number have none.
    title : str
        The title.

    Returns
    -------
    Plot
        Two panels: a bar of S tokens per slot, with the reused, live and free ones; and the bytes of the layers, where neighbours of one
        shape share a bar, and all layers with states. Where nothing limits S, as in a cache of states alone, the axis ends at the longest
        sequence.

    Raises
    ------
    ShapeError, RangeError
        There are more lengths than slots, or one is not from 0 to S.
    ModuleNotFoundError
        matplotlib is not installed.

    Examples
    --------
    >>> from trt_kvcache import KVCacheConfig, KVLayerConfig, draw_cache
    >>> config = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=64)], max_batch_size=2, max_sequence_length=256)
    >>> plot = draw_cache(config, lengths=[100, 30], reused=[80], title="after the prefill")
    >>> "slot 1" in plot.svg
    True
    """
    for what, values in (("lengths", lengths), ("reused", reused)):
        if len(values) > config.max_batch_size:
            raise ShapeError(f"{what}: expected at most max_batch_size={config.max_batch_size} of them, got {len(values)}.")
        for slot, value in enumerate(values):
            int_in_range(f"{what}[{slot}]", value, 0, config.max_sequence_length)
    slots = config.max_batch_size
    heights = (0.5 + (0.26 * slots if slots <= _MAX_NAMED_SLOTS else 5.5), 0.6 + 0.26 * len(layer_runs(config)))

    def paint(figure: Any) -> None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        upper, lower = figure.subplots(2, 1, height_ratios=heights)
        _paint_slots(upper, config, lengths, reused)
        paint_layers(lower, config)

    return draw(0.5 + sum(heights), paint)


def _paint_slots(axes: Any, config: DecoderCacheConfig, lengths: Sequence[int], reused: Sequence[int]) -> None:
    slots = config.max_batch_size
    is_limited = config.max_sequence_length < MAX_DIMENSION
    longest = config.max_sequence_length if is_limited else max(1, *lengths, 1)
    held = [*lengths, *[0] * (slots - len(lengths))]
    kept = [min(length, count) for length, count in zip(held, [*reused, *[0] * (slots - len(reused))], strict=True)]
    rows = range(slots)
    is_named = slots <= _MAX_NAMED_SLOTS
    bar: dict[str, Any] = {"height": 0.78 if is_named else 1.0, "linewidth": 0}
    starts = {"reused": ([0] * slots, kept), "live": (kept, held), "free": (held, [longest] * slots if is_limited else held)}
    for name, (first, end) in starts.items():
        widths = [after - before for before, after in zip(first, end, strict=True)]
        axes.barh(rows, widths, left=first, color=COLOURS[name], label=name, **bar)
    if len(lengths) < slots:
        left_out = range(len(lengths), slots)
        axes.barh(left_out, longest, facecolor="none", edgecolor=GREY, hatch="//", alpha=0.35, label="not active", **bar)
    axes.set_xlim(0, longest)
    axes.set_xticks(_token_ticks(longest))
    axes.set_ylim(slots - 0.5, -0.5)
    axes.set_xlabel("tokens")
    if is_named:
        axes.set_yticks(rows, [f"slot {slot}" for slot in rows])
        for slot, length in enumerate(held):
            share = f" ({length / longest:.0%})" if is_limited else ""
            text = f"{length:,}{share}" if slot < len(lengths) else "not active"
            axes.annotate(text, (1, slot), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center", color=INK)
    else:
        axes.set_ylabel("slot")
    tokens = f"{sum(held):,} of {slots * longest:,} tokens ({sum(held) / (slots * longest):.0%})" if is_limited else f"{sum(held):,} tokens"
    axes.set_title(f"{tokens} in {len(lengths)} of {slots} slots", fontsize=9, color=INK)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, **LEGEND, borderaxespad=0.1, handlelength=1, handleheight=1)
    axes.tick_params(left=not is_named)


def paint_layers(axes: Any, config: DecoderCacheConfig) -> None:
    """Draw the bytes of the layers, where neighbours of one shape share a bar."""
    layers = layer_runs(config)
    total = sum(count * nbytes for _, count, nbytes in layers)
    texts = [size_text(nbytes) if count == 1 else f"{count} layers of {size_text(nbytes)}" for _, count, nbytes in layers]
    paint_sizes(axes, [(name, nbytes) for name, _, nbytes in layers], [LAYER_COLOUR] * len(layers), texts)
    what = "K and V" if config.mamba is None else "States" if config.kv is None else "K and V, or states,"
    layout = "" if config.kv is None else f", {config.kv.layout.value}"
    axes.set_title(f"{what} of each layer: {size_text(total)} in all, {config.dtype}{layout}", fontsize=9, color=INK)


def _token_ticks(longest: int) -> list[int]:
    """Return up to 9 numbers of tokens from 0 to S, in steps of a power of two."""
    step = 1
    while longest // step > 8:
        step *= 2
    return list(range(0, longest + 1, step))


def layer_runs(config: DecoderCacheConfig) -> list[tuple[str, int, int]]:
    """Return name, number of layers and bytes of one layer for each run of equal attention layers, and for all layers with states."""
    sizes = estimate_memory(config).bytes_per_layer
    layers = () if config.kv is None else config.kv.layers
    shapes = [(layer.num_kv_heads, layer.head_dim, nbytes) for layer, nbytes in zip(layers, sizes, strict=True)]
    kind = "layer" if config.mamba is None else "attention layer"
    runs = []
    first = 0
    for (heads, dim, nbytes), run in groupby(shapes):
        count = len(list(run))
        name = kind + (f" {first}" if count == 1 else f"s {first} to {first + count - 1}")
        runs.append((f"{name}: {heads} {'head' if heads == 1 else 'heads'} x {dim}", count, nbytes))
        first += count
    if config.mamba is not None:
        layers_with = "1 layer" if config.mamba.num_layers == 1 else f"{config.mamba.num_layers} layers"
        runs.append((f"{layers_with} with states", config.mamba.num_layers, config.mamba.nbytes // config.mamba.num_layers))
    return runs
