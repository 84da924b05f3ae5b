"""Write the tables of attention choices into docs/engines.md, from ``trt_kvcache/builder/attention_choice.py``.

``python docs/attention_table.py``. ``--check`` writes nothing; exit code 1 means that a table differs from the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from table_pages import write_tables  # noqa: E402

from trt_kvcache.builder.attention_choice import OBSTACLES, RULES  # noqa: E402

ENGINES = ROOT / "docs" / "engines.md"


def choices_table() -> str:
    """Return the rules, in their order."""
    lines = ["| TensorRT | if | order | reason |", "|---|---|---|---|"]
    for rule in RULES:
        order = ", ".join(f"`{variant}`" for variant in rule.order)
        lines.append(f"| {rule.tensorrt} | {rule.condition} | {order} | {rule.reason} |")
    return "\n".join(lines)


def obstacles_table() -> str:
    """Return what each variant does not take."""
    lines = ["| variant | not for |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{one.variant}` | {one.condition} |" for one in OBSTACLES)])


def main() -> int:
    """Write the tables, or with ``--check`` say which ones differ."""
    codes = [
        write_tables(
            (ENGINES,),
            f"<!-- {name}: docs/attention_table.py -->",
            f"<!-- end of {name} -->",
            text,
            name=name,
            script="docs/attention_table.py",
        )
        for name, text in {"attention choices": choices_table(), "attention obstacles": obstacles_table()}.items()
    ]
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
