"""``Plot``: a matplotlib figure for files (SVG, PNG, PDF) and notebooks. matplotlib is imported by the first drawing."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Suffixes of the formats of plots.
FORMATS = ("svg", "png", "pdf")

#: Sizes in inches are those of 100 dots; a PNG has twice as many.
_DPI = 200

#: Colours of text, and of unused parts.
INK, GREY = "#1c2833", "#8395a2"

#: Style of a legend over a drawing: a white box.
LEGEND: Any = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 0.9}

#: The same figure gives the same SVG: ids come from its content, text stays text.
_STYLE: Any = {
    "svg.hashsalt": "trt_kvcache",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#7b8a97",
    "xtick.color": "#34495e",
    "ytick.color": "#34495e",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


class Plot:
    """A figure. Notebooks show it; :meth:`save` writes it.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.

    Examples
    --------
    >>> from trt_kvcache import KVCacheConfig, KVLayerConfig, draw_cache
    >>> config = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=64)], max_batch_size=2, max_sequence_length=256)
    >>> plot = draw_cache(config, lengths=[100, 30])
    >>> plot.svg.startswith("<?xml")
    True
    """

    def __init__(self, figure: "Figure") -> None:
        self._figure = figure

    def __repr__(self) -> str:
        width, height = self._figure.get_size_inches()
        return f"Plot({width:g} x {height:g} inches)"

    @property
    def figure(self) -> "Figure":
        """The figure, to be changed or to become part of another one."""
        return self._figure

    @property
    def svg(self) -> str:
        """The picture as an SVG document."""
        return self._render("svg").decode("utf-8")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture to a file. An existing one is replaced once the new one is complete.

        Parameters
        ----------
        path : path
            Its suffix is the format: ``.svg``, ``.png`` or ``.pdf``.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        ConfigError
            Another suffix. Nothing was written.
        OSError
            The file cannot be written.
        """
        path = Path(path)
        content = self._render(format_of(path))
        with atomic_file(path) as file:
            file.write(content)
        return path

    def _render(self, kind: str) -> bytes:
        from matplotlib import rc_context

        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {}
        with rc_context(_STYLE):
            self._figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
        return buffer.getvalue()

    def _repr_svg_(self) -> str:
        return self.svg


def format_of(path: Path) -> str:
    """Return the format of a file by its suffix; ConfigError for any other suffix."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(f"{path}: expected a file name that ends with {', '.join(f'.{one}' for one in FORMATS)}.")
    return kind


def check_can_draw(path: Path) -> None:
    """Check in advance that a plot can be drawn and saved: raise ConfigError for the suffix, ModuleNotFoundError without matplotlib."""
    format_of(path)
    with naming_the_extra():
        import matplotlib.figure  # noqa: F401


def draw(height: float, paint: Callable[[Any], object], *, width: float = 9.0) -> Plot:
    """Draw a plot: ``paint(figure)`` gets an empty figure. Sizes are in inches."""
    with naming_the_extra():
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        paint(figure)
        figure.draw_without_rendering()  # lays it out once, so that every format shows the same
        figure.set_layout_engine("none")
    return Plot(figure)


def size_text(nbytes: int) -> str:
    """Return a number of bytes for people: four digits and a binary unit, such as ``1.5 MiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def paint_sizes(axes: Any, sizes: Sequence[tuple[str, int]], colours: Sequence[str], texts: Sequence[str] | None = None) -> None:
    """Draw a bar for each size in bytes, from the top, followed by ``texts`` or the sizes."""
    rows = range(len(sizes))
    axes.barh(rows, [nbytes for _, nbytes in sizes], color=colours, height=0.78, linewidth=0)
    axes.set_yticks(rows, [name for name, _ in sizes])
    for row, (_, nbytes) in enumerate(sizes):
        text = size_text(nbytes) if texts is None else texts[row]
        axes.annotate(text, (nbytes, row), (6, 0), textcoords="offset points", va="center", color=INK)
    axes.set_ylim(len(sizes) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(nbytes for _, nbytes in sizes))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
