"""A picture of a cache as SVG: slots by tokens, and bytes by layer."""

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import ShapeError

#: What a token of a slot can be, and its colour: told apart in grey too.
COLOURS = {"reused": "#1b4f72", "live": "#5dade2", "free": "#e8eef2"}
#: Of the bytes of a layer.
LAYER_COLOUR = "#ca6f1e"

_WIDTH, _LABEL, _MARGIN = 760, 150, 16
_BAR = _WIDTH - _LABEL - 3 * _MARGIN - 90
_PANEL = 320  # height that rows share
_SMALLEST = 6.0  # text that can be read
_INK, _PAPER = "#1c2833", "#ffffff"


def draw_cache(config: KVCacheConfig, lengths: Sequence[int] = (), reused: Sequence[int] = (), *, title: str = "KV cache") -> str:
    """Return an SVG document.

    Parameters
    ----------
    config : KVCacheConfig
    lengths : sequence of int (A,)
        Tokens that each active slot holds. Other slots are drawn free.
    reused : sequence of int (A,)
        How many of them, from the start of the slot, were restored or kept instead of run; none where it is shorter.
    title : str

    Returns
    -------
    str
        Two panels: a row per slot, of S tokens, with what is reused, live and free; a bar per layer, of its bytes. Rows are
        labelled where there is room.

    Raises
    ------
    ShapeError, RangeError
        More lengths than slots, or one that is not from 0 to S.
    """
    most = config.max_sequence_length
    for what, values in (("lengths", lengths), ("reused", reused)):
        if len(values) > config.max_batch_size:
            raise ShapeError(f"{what}: expected at most max_batch_size={config.max_batch_size} of them, got {len(values)}.")
        for slot, value in enumerate(values):
            int_in_range(f"{what}[{slot}]", value, 0, most)
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(_WIDTH))
    svg.set("font-family", "sans-serif")
    ElementTree.SubElement(svg, "rect", width="100%", height="100%", fill=_PAPER)
    ElementTree.SubElement(svg, "title").text = title
    y = _text(svg, _MARGIN, 2 * _MARGIN, title, size=16)
    y = _text(svg, _MARGIN, y, f"{config.max_batch_size} slots of {most} tokens, {config.dtype}, {config.layout.value}")
    y = _legend(svg, y)
    slots = []
    for slot in range(config.max_batch_size):
        length = lengths[slot] if slot < len(lengths) else 0
        kept = min(reused[slot], length) if slot < len(reused) else 0
        shares = zip(COLOURS.values(), (kept / most, (length - kept) / most, (most - length) / most), strict=True)
        slots.append((f"slot {slot}" + ("" if slot < len(lengths) else " (not active)"), list(shares), f"{length} / {most}"))
    y = _rows(svg, y, slots)
    sizes = estimate_memory(config).bytes_per_layer
    y = _text(svg, _MARGIN, y + _MARGIN, f"bytes per layer, {sum(sizes):,} in all")
    layers = [
        (f"layer {index}: {layer.num_kv_heads} x {layer.head_dim}", [(LAYER_COLOUR, size / max(sizes))], f"{size:,}")
        for index, (layer, size) in enumerate(zip(config.layers, sizes, strict=True))
    ]
    y = _rows(svg, y, layers)
    svg.set("height", str(round(y + _MARGIN)))
    svg.set("viewBox", f"0 0 {_WIDTH} {svg.get('height')}")
    return ElementTree.tostring(svg, encoding="unicode")


def _text(svg: ElementTree.Element, x: float, y: float, text: str, *, size: float = 12) -> float:
    """Write a line and return where the next one goes."""
    line = ElementTree.SubElement(svg, "text", {"x": f"{x:g}", "y": f"{y:g}", "font-size": f"{size:g}", "fill": _INK})
    line.text = text
    return y + 1.6 * size


def _legend(svg: ElementTree.Element, y: float) -> float:
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = _MARGIN + 90 * place
        _rectangle(svg, x, y - 10, 12, 12, colour)
        _text(svg, x + 18, y, name)
    return y + 2 * _MARGIN


def _rows(svg: ElementTree.Element, y: float, rows: Sequence[tuple[str, Iterable[tuple[str, float]], str]]) -> float:
    """Draw a bar for each row, label before and number behind; many rows are thin ones."""
    height = max(3.0, min(20.0, _PANEL / len(rows)))
    for label, parts, number in rows:
        x = float(_LABEL + _MARGIN)
        for colour, share in parts:
            _rectangle(svg, x, y, share * _BAR, height * 0.85, colour)
            x += share * _BAR
        size = min(11.0, height * 0.8)
        if size >= _SMALLEST:
            _text(svg, _MARGIN, y + height * 0.65, label, size=size)
            _text(svg, _LABEL + 2 * _MARGIN + _BAR, y + height * 0.65, number, size=size)
        y += height
    return y + _MARGIN


def _rectangle(svg: ElementTree.Element, x: float, y: float, width: float, height: float, colour: str) -> None:
    if width:
        sizes = {"x": x, "y": y, "width": width, "height": height}
        ElementTree.SubElement(svg, "rect", {**{name: f"{size:.2f}" for name, size in sizes.items()}, "fill": colour})
