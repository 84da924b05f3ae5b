"""A plot of a cache as SVG: the tokens of each slot, and the bytes of each layer."""

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.errors import ShapeError

#: The kinds of tokens of a slot and their colours, which differ in brightness too.
COLOURS = {"reused": "#1b4f72", "live": "#5dade2", "free": "#e8eef2"}
#: The colour of the bytes of a layer.
LAYER_COLOUR = "#ca6f1e"

_WIDTH, _LABEL, _MARGIN = 760, 150, 16
_BAR = _WIDTH - _LABEL - 3 * _MARGIN - 90
_PANEL_HEIGHT = 320  # shared by the rows of a panel
_MIN_TEXT_SIZE = 6.0  # smaller text cannot be read
_INK, _PAPER = "#1c2833", "#ffffff"


def draw_cache(config: KVCacheConfig, lengths: Sequence[int] = (), reused: Sequence[int] = (), *, title: str = "KV cache") -> str:
    """Return a plot of a cache as an SVG document.

    Parameters
    ----------
    config : KVCacheConfig
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
    str
        Two panels: a row of S tokens per slot, with the reused, live and free ones; a bar per layer for its bytes. Rows that
        are too thin have no label.

    Raises
    ------
    ShapeError, RangeError
        There are more lengths than slots, or one is not from 0 to S.

    Examples
    --------
    >>> from trt_kvcache import KVCacheConfig, KVLayerConfig
    >>> config = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=64)], max_batch_size=2, max_sequence_length=256)
    >>> svg = draw_cache(config, lengths=[100, 30], reused=[80], title="after the prefill")
    >>> svg.startswith("<svg"), "100 / 256" in svg
    (True, True)
    """
    longest = config.max_sequence_length
    for what, values in (("lengths", lengths), ("reused", reused)):
        if len(values) > config.max_batch_size:
            raise ShapeError(f"{what}: expected at most max_batch_size={config.max_batch_size} of them, got {len(values)}.")
        for slot, value in enumerate(values):
            int_in_range(f"{what}[{slot}]", value, 0, longest)
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(_WIDTH))
    svg.set("font-family", "sans-serif")
    ElementTree.SubElement(svg, "rect", width="100%", height="100%", fill=_PAPER)
    ElementTree.SubElement(svg, "title").text = title
    y = _text(svg, _MARGIN, 2 * _MARGIN, title, size=16)
    y = _text(svg, _MARGIN, y, f"{config.max_batch_size} slots of {longest} tokens, {config.dtype}, {config.layout.value}")
    y = _legend(svg, y)
    slots = []
    for slot in range(config.max_batch_size):
        length = lengths[slot] if slot < len(lengths) else 0
        kept = min(reused[slot], length) if slot < len(reused) else 0
        shares = zip(COLOURS.values(), (kept / longest, (length - kept) / longest, (longest - length) / longest), strict=True)
        slots.append((f"slot {slot}" + ("" if slot < len(lengths) else " (not active)"), list(shares), f"{length} / {longest}"))
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
    """Draw a line of text and return the y of the next one."""
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
    """Draw a bar for each row, with a label before and a number behind it. The more rows, the thinner they are."""
    height = max(3.0, min(20.0, _PANEL_HEIGHT / len(rows)))
    for label, parts, number in rows:
        x = float(_LABEL + _MARGIN)
        for colour, share in parts:
            _rectangle(svg, x, y, share * _BAR, height * 0.85, colour)
            x += share * _BAR
        size = min(11.0, height * 0.8)
        if size >= _MIN_TEXT_SIZE:
            _text(svg, _MARGIN, y + height * 0.65, label, size=size)
            _text(svg, _LABEL + 2 * _MARGIN + _BAR, y + height * 0.65, number, size=size)
        y += height
    return y + _MARGIN


def _rectangle(svg: ElementTree.Element, x: float, y: float, width: float, height: float, colour: str) -> None:
    if width:
        sizes = {"x": x, "y": y, "width": width, "height": height}
        ElementTree.SubElement(svg, "rect", {**{name: f"{size:.2f}" for name, size in sizes.items()}, "fill": colour})
