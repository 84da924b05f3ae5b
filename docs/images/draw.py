"""Draw the pictures of the documentation: ``python docs/images/draw.py`` writes the SVG files beside this script.

``--check`` writes nothing; exit code 1 says that a file is not what the script draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent

INK, SOFT, LINE = "#1f2937", "#4b5563", "#64748b"
BLUE, GREEN, YELLOW, RED, GREY, PURPLE = "#dbeafe", "#dcfce7", "#fef3c7", "#fee2e2", "#f1f5f9", "#ede9fe"


class Picture:
    """An SVG that consists of boxes, texts and arrows. Sizes are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"',
            '  font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">',
            f'  <path d="M 0 0 L 10 5 L 0 10 z" fill="{LINE}"/></marker></defs>',
            f'<rect x="0" y="0" width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, fill: str = GREY, *, dashed: bool = False, rounded: int = 6) -> None:
        """Add a rectangle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{rounded}" fill="{fill}" stroke="{LINE}"{dash}/>')

    def line(self, x: int, y: int, x2: int, y2: int, color: str, *, width: int = 2) -> None:
        """Add a line from one point to another."""
        self._parts.append(f'<line x1="{x}" y1="{y}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="{width}"/>')

    def text(self, x: int, y: int, words: str, *, size: int = 13, bold: bool = False, anchor: str = "start", color: str = INK) -> None:
        """Add a line of text. ``y`` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x}" y="{y}" font-size="{size}"{weight} text-anchor="{anchor}" fill="{color}">{escape(words)}</text>')

    def upright(self, x: int, y: int, words: str) -> None:
        """Add a line of text that runs upwards, centred at a point."""
        place = f'x="{x}" y="{y}" transform="rotate(-90 {x} {y})"'
        self._parts.append(f'<text {place} font-size="12" text-anchor="middle" fill="{SOFT}">{escape(words)}</text>')

    def label(self, x: int, y: int, width: int, height: int, *lines: str, fill: str = GREY, size: int = 13, dashed: bool = False) -> None:
        """Add a rectangle with centred lines of text; the first is bold."""
        self.box(x, y, width, height, fill, dashed=dashed)
        step = size + 4
        first = y + (height - step * len(lines)) // 2 + size
        for index, line in enumerate(lines):
            color = INK if index == 0 else SOFT
            small = size if index == 0 else size - 2
            self.text(x + width // 2, first + index * step, line, size=small, bold=index == 0, anchor="middle", color=color)

    def arrow(self, *points: tuple[int, int], both: bool = False, dashed: bool = False) -> None:
        """Add an arrow along some points."""
        path = " L ".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path d="M {path}" fill="none" stroke="{LINE}" stroke-width="1.6"{dash}{start} marker-end="url(#tip)"/>')

    def svg(self) -> str:
        """Return the file."""
        return "\n".join([*self._parts, "</svg>", ""])


def overview() -> str:
    """Draw what the package does, from a model folder to text."""
    picture = Picture(860, 330, "From a model folder to text: build an engine, bind the cache, decode in a session")
    picture.label(20, 110, 150, 70, "model folder", "config, safetensors,", "tokenizer", fill=GREY)
    picture.arrow((170, 145), (235, 145))
    picture.text(202, 135, "build", size=12, anchor="middle", color=SOFT)
    picture.label(238, 110, 140, 70, "engine folder", "engine.plan,", "config.json", fill=GREY)
    picture.arrow((378, 145), (423, 145))
    picture.box(426, 20, 290, 290, BLUE)
    picture.text(442, 44, "InferenceSession", bold=True)
    picture.text(442, 62, "prefill, decode, generate, serve", size=11, color=SOFT)
    picture.label(446, 110, 110, 70, "engine", "TensorRT,", "or NumPy", fill=YELLOW)
    picture.label(590, 110, 106, 70, "cache", "K and V of", "every slot", fill=GREEN)
    picture.arrow((556, 135), (590, 135), both=True)
    picture.text(573, 100, "bound in place", size=11, anchor="middle", color=SOFT)
    picture.arrow((643, 180), (643, 218))
    picture.text(652, 204, "lengths", size=11, color=SOFT)
    picture.label(446, 218, 250, 60, "one stream, one step", "enqueue reads the lengths,", "commit adds to them", fill="#ffffff")
    picture.arrow((501, 180), (501, 218), both=True)
    picture.arrow((716, 145), (758, 145))
    picture.label(761, 110, 80, 70, "tokens", "and text", fill=GREY)
    picture.label(20, 228, 358, 76, "sequences", "prompt cache, snapshots, swapping to the host", fill=PURPLE)
    picture.arrow((378, 294), (706, 294), (706, 145), (697, 145), both=True)
    return picture.svg()


#: The rooms of the package from the top to the ground; a room in a row may import those to its right.
ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (RED, (("cli", "the command"), ("doctor", "checks of a GPU"), ("polygraphy", "comparisons"), ("benchmarking", "speed"))),
    (RED, (("server", "many clients: an engine for event loops, OpenAI's API"),)),
    (BLUE, (("session", "steps, generation, request queue"),)),
    (YELLOW, (("builder", "networks, engine builds"), ("trt", "TensorRT engines, CUDA graphs"), ("engine_folder", "files of an engine"))),
    (YELLOW, (("torch_engine", "decoder in PyTorch"), ("reference", "decoder in NumPy"))),
    (YELLOW, (("ops", "custom operations"), ("engine", "protocol, names, bindings"))),
    (PURPLE, (("handles", "sequences by id, swapping"), ("sequences", "copies of slots, prefix cache, snapshots"))),
    (GREEN, (("cache", "K, V and states of slots, layouts, lengths"),)),
    (
        GREEN,
        (("generation", "logits to text"), ("kernels", "CUDA and NumPy"), ("checkpoint", "model folders"), ("model", "what is computed")),
    ),
    (GREY, (("memory", "host and GPU memory, tensors, DLPack"),)),
    (GREY, (("plot", "pictures"), ("_util", "checks, files"), ("dtypes", "names and sizes"), ("errors", "the exceptions"))),
)


def layers() -> str:
    """Draw the rooms of the package and the direction of imports."""
    height, gap, left, width = 52, 10, 60, 720
    picture = Picture(800, 30 + len(ROWS) * (height + gap), "The layers of the package: a layer imports only what is below it")
    for row, (fill, rooms) in enumerate(ROWS):
        y = 20 + row * (height + gap)
        share = (width - (len(rooms) - 1) * gap) // len(rooms)
        for index, (name, what) in enumerate(rooms):
            picture.label(left + index * (share + gap), y, share, height, name, what, fill=fill)
    bottom = 20 + len(ROWS) * (height + gap) - gap
    picture.arrow((30, 20), (30, bottom))
    picture.upright(22, (20 + bottom) // 2, "imports")
    return picture.svg()


def token() -> str:
    """Draw one decode step: what the host does, what is ordered on the stream, what memory is touched."""
    picture = Picture(860, 355, "One decode step: upload, enqueue, commit, copy of the logits; one wait")
    for y, name, what in ((58, "host", "Python"), (168, "stream", "in this order"), (290, "memory", "never moves")):
        picture.text(16, y, name, bold=True)
        picture.text(16, y + 17, what, size=11, color=SOFT)
    picture.box(110, 20, 735, 80, GREY, rounded=10)
    picture.box(110, 125, 735, 90, BLUE, rounded=10)
    picture.box(110, 240, 735, 100, GREEN, rounded=10)
    columns = (125, 275, 425, 575, 720)
    picture.label(columns[0], 35, 130, 50, "last tokens", "one per slot", fill="#ffffff")
    picture.label(columns[4], 35, 112, 50, "sample", "the only wait", fill=YELLOW)
    steps = (
        ("1  upload", "new token ids"),
        ("2  enqueue", "the whole model"),
        ("3  commit", "lengths += 1"),
        ("4  copy", "logits to the host"),
    )
    for x, (name, what) in zip(columns, steps, strict=False):
        picture.label(x, 143, 130, 54, name, what, fill="#ffffff")
    for x in columns[:3]:
        picture.arrow((x + 130, 170), (x + 150, 170))
    picture.arrow((190, 85), (190, 143))
    picture.arrow((705, 170), (776, 170), (776, 85))
    picture.arrow((720, 60), (255, 60), dashed=True)
    picture.text(490, 52, "the sampled tokens are the input of the next step", size=11, anchor="middle", color=SOFT)
    tensors = (
        ("input_ids", "[A, 1]", "enqueue reads it"),
        ("K and V", "[B, H, S, D], each layer", "read; one row written"),
        ("lengths", "int32 [A]", "read, then counted up"),
        ("logits", "[A, vocab]", "enqueue writes them"),
    )
    for x, (name, shape, what) in zip(columns, tensors, strict=False):
        picture.label(x - 5, 262, 140, 46, name, shape, fill="#ffffff", size=12)
        picture.text(x + 65, 327, what, size=11, anchor="middle", color=SOFT)
    picture.arrow((190, 197), (190, 262))
    picture.arrow((340, 197), (340, 262), both=True)
    picture.arrow((490, 197), (490, 262))
    picture.arrow((460, 262), (460, 230), (375, 230), (375, 197))
    picture.arrow((640, 262), (640, 197))
    return picture.svg()


def layouts() -> str:
    """Draw the bytes of one layer of two slots in both layouts."""
    picture = Picture(760, 250, "The bytes of one layer in the combined and in the separate layout")
    size, gap, left = 130, 4, 150
    rows = (
        (40, "COMBINED", "[B, 2, H, S, D]", (("K", "slot 0", BLUE), ("V", "slot 0", GREEN), ("K", "slot 1", BLUE), ("V", "slot 1", GREEN))),
        (
            140,
            "SEPARATE",
            "[2, B, H, S, D]",
            (("K", "slot 0", BLUE), ("K", "slot 1", BLUE), ("V", "slot 0", GREEN), ("V", "slot 1", GREEN)),
        ),
    )
    for y, name, shape, cells in rows:
        picture.text(16, y + 25, name, bold=True)
        picture.text(16, y + 43, shape, size=12, color=SOFT)
        for index, (which, slot, fill) in enumerate(cells):
            picture.label(left + index * (size + gap), y, size, 54, which, slot, fill=fill)
    picture.text(left, 114, "one dense tensor with K and V: what the attention plugin binds", size=12, color=SOFT)
    picture.text(left, 214, "two dense tensors, K and V: what TensorRT's KVCacheUpdate and attention layers bind", size=12, color=SOFT)
    picture.arrow((left, 236), (left + 4 * size + 3 * gap, 236))
    picture.text(left - 10, 240, "address", size=12, anchor="end", color=SOFT)
    return picture.svg()


def slots() -> str:
    """Draw slots with reused, live and free rows, and a compaction that drops two of four sequences."""
    picture = Picture(800, 300, "Slots before and after a compaction with the mapping [-1, 0, -1, 1]")
    row, left, unit = 40, 70, 14

    def slot(x: int, y: int, number: int, reused: int, live: int, *, name: str = "", idle: bool = False) -> None:
        picture.text(x - 10, y + 21, str(number), anchor="end", color=SOFT)
        picture.box(x, y, 18 * unit, 30, "#ffffff")
        if reused:
            picture.box(x, y, reused * unit, 30, PURPLE, rounded=4)
        if live:
            picture.box(x + reused * unit, y, live * unit, 30, RED if idle else GREEN, rounded=4)
        picture.text(x + 8, y + 20, name, size=12)

    picture.text(left, 30, "before: active batch size 4", bold=True)
    slot(left, 50, 0, 0, 11, name="A, 11 tokens, ended", idle=True)
    slot(left, 50 + row, 1, 5, 7, name="B, 12")
    slot(left, 50 + 2 * row, 2, 0, 13, name="C, 13 tokens, ended", idle=True)
    slot(left, 50 + 3 * row, 3, 0, 14, name="D, 14 tokens")
    picture.arrow((345, 130), (430, 130))
    picture.text(388, 104, "compact_batch", size=12, anchor="middle")
    picture.text(388, 121, "[-1, 0, -1, 1]", size=12, anchor="middle", color=SOFT)
    right = 480
    picture.text(right, 30, "after: active batch size 2", bold=True)
    slot(right, 50, 0, 5, 7, name="B, 12")
    slot(right, 50 + row, 1, 0, 14, name="D, 14 tokens")
    slot(right, 50 + 2 * row, 2, 0, 0, name="free")
    slot(right, 50 + 3 * row, 3, 0, 0, name="free")
    for x, fill, what in (
        (left, PURPLE, "reused from the prompt cache"),
        (left + 240, GREEN, "live rows"),
        (left + 350, RED, "rows of an ended sequence"),
        (left + 560, "#ffffff", "free rows"),
    ):
        picture.box(x, 246, 18, 18, fill, rounded=3)
        picture.text(x + 26, 260, what, size=12, color=SOFT)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "overview": overview,
    "layers": layers,
    "token": token,
    "layouts": layouts,
    "slots": slots,
}


def main() -> int:
    """Write the pictures, or with ``--check`` compare them."""
    stale = [name for name, draw in PICTURES.items() if not _is_drawn(HERE / f"{name}.svg", draw())]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/images/{name}.svg is not what draw.py draws. Run: python docs/images/draw.py")
        return int(bool(stale))
    for name in stale:
        (HERE / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")
    return 0


def _is_drawn(path: Path, svg: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == svg


if __name__ == "__main__":
    sys.exit(main())
