"""Pages with a table that is made from the code, between two marks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def with_table(page: str, begin: str, end: str, table: str) -> str:
    """Return a page with the table between its two marks."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def write_tables(pages: Sequence[Path], begin: str, end: str, table: str, *, name: str, script: str) -> int:
    """Write the table into each page; with ``--check`` say which pages have another one. Returns the exit code."""
    is_same = True
    for path in pages:
        page = path.read_text(encoding="utf-8")
        new = with_table(page, begin, end, table)
        if new != page:
            is_same = False
            if "--check" in sys.argv:
                print(f"{path.relative_to(ROOT)}: the table of {name} is not that of the code. Run: python {script}")
            else:
                path.write_text(new, encoding="utf-8")
    return 0 if is_same or "--check" not in sys.argv else 1
