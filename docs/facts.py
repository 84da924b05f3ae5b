"""Facts that several pages state, each defined once: ``python docs/facts.py`` writes them into the pages, between two marks.

``--check`` writes nothing; exit code 1 means that a page differs. The extras and their packages come from pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

#: The use of each extra. Extras for work on the project itself are last.
EXTRAS = {
    "models": "model folders and the Hugging Face Hub, sessions, the command line",
    "torch": "the PyTorch engine, on a CPU or, with `cuda`, on a GPU",
    "rtx": "building engines with TensorRT for RTX, and running them",
    "rtx-cu12": "the same for a driver of CUDA 12.8 or 12.9 (570 to 575)",
    "tensorrt": "the same with full TensorRT, if the machine does not have it already",
    "tensorrt-cu12": "the same for a driver of CUDA 12",
    "cuda": "the cache in GPU memory, CUDA 13",
    "cuda12": "the cache in GPU memory, CUDA 12",
    "serve": "`trt-kvcache serve`: OpenAI's API over HTTP",
    "ray": "the same over several engines, with Ray Serve",
    "polygraphy": "`trt-kvcache compare`, and runners for `polygraphy run`",
    "gguf": "models in GGUF files",
    "plot": "pictures of a cache and of a session over time",
    "nvtx": "named ranges in NVIDIA's profilers",
    "docs": "building this documentation",
    "dev": "working on the package",
}

#: More packages than these are not listed.
_MAX_PACKAGES = 8

#: Facts by name. A page has them as ``<!-- fact: name -->...<!-- end of fact -->``.
FACTS = {
    "status": "TensorRT engines: built, and their networks computed in NumPy; not yet run on a GPU. "
    "PyTorch engine: measured on an H100 and an H200.",
    "runs": "the engine computes all models of the family that are not refused; tests compare small random ones with transformers",
    "no engine": "None has run on a GPU so far.",
    "rtx capabilities": "8.0, 8.6, 8.9, 12.0 and newer; 7.5 if the build names it",
    "kernel capabilities": "compute capability 8.0 and newer",
    "torch on a GPU": "yes: an H100 and an H200",
    "rtx": "builds: yes, Linux on x86-64; runs: no",
    "full TensorRT": "no; tested with NVIDIA's Python bindings of 10.3 to 11.4 and a stand-in for the libraries",
    "jetson": "no",
}


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # Python 3.10 has no tomllib
    section = text.split("[project.optional-dependencies]\n")[1].split("\n[project.scripts]")[0]
    return {name: ast.literal_eval(value) for name, value in re.findall(r"^([\w-]+) = (\[.*?\])$", section, re.DOTALL | re.MULTILINE)}


def extras_table() -> str:
    """Return the table of the extras."""
    lines = ["| extra | use | installs |", "|---|---|---|", "| (no extra) | the cache in host memory | NumPy, ml_dtypes |"]
    return "\n".join([*lines, *(f"| `{name}` | {EXTRAS[name]} | {_packages(needed)} |" for name, needed in _in_order(extras()))])


def _in_order(found: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    if found.keys() != EXTRAS.keys():
        raise ValueError(f"docs/facts.py: expected the extras of pyproject.toml, got others: {sorted(found.keys() ^ EXTRAS.keys())}.")
    return [(name, found[name]) for name in EXTRAS]


def _packages(requirements: list[str]) -> str:
    """Return the packages of an extra: other extras as code, packages by name; of many packages only the extras."""
    names = []
    for requirement in requirements:
        own = re.match(r"trt-kvcache\[(.*?)\]", requirement)
        names += [f"`{name}`" for name in own[1].split(",")] if own else [re.match(r"[\w.-]+", requirement)[0]]
    return ", ".join(names) if len(names) <= _MAX_PACKAGES else f"{', '.join(name for name in names if '`' in name)}, and tools"


def with_facts(page: str) -> str:
    """Return a page with every fact as it is here."""

    def fact(match: re.Match[str]) -> str:
        return f"<!-- fact: {match[1]} -->{FACTS[match[1]]}<!-- end of fact -->"

    page = re.sub(r"<!-- fact: ([\w ]+) -->.*?<!-- end of fact -->", fact, page, flags=re.DOTALL)
    return re.sub(
        r"<!-- extras -->\n.*?<!-- end of extras -->",
        lambda _: f"<!-- extras -->\n{extras_table()}\n<!-- end of extras -->",
        page,
        flags=re.DOTALL,
    )


def main() -> int:
    """Write the pages, or with ``--check`` say which ones differ."""
    is_same = True
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        new = with_facts(page)
        if new != page:
            is_same = False
            if "--check" in sys.argv:
                print(f"{path.relative_to(ROOT)}: states something else than docs/facts.py. Run: python docs/facts.py")
            else:
                path.write_text(new, encoding="utf-8")
    return 0 if is_same or "--check" not in sys.argv else 1


if __name__ == "__main__":
    raise SystemExit(main())
