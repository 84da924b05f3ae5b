"""Attacks on ``trt-kvcache serve``, and meanwhile: how long other clients wait, what memory the server takes, whether it goes on.

    python benchmarks/server_attacks.py [--quick] [--only bodies,headers] [--out FILE]

The server runs the shipped model on the NumPy engine, in a process of its own, at 127.0.0.1. Each module of ``attacks/`` attacks servers
that it starts and ends. Linux only: memory and descriptors are read from /proc.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from environment import describe_environment, write_result

HERE = Path(__file__).resolve().parent
MODULES = ("bodies", "headers", "grammars", "fairness")


def main() -> int:
    """Measure, write the result; exit code 1 says that a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "server_attacks.json")
    parser.add_argument("--quick", action="store_true", help="few and small attacks, to see that they run")
    parser.add_argument("--only", default=",".join(MODULES), metavar="MODULES", help="those to run (default: %(default)s)")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.only.split(","):
        found[name] = importlib.import_module(f"attacks.{name}").measure(quick=arguments.quick)
        for row in found[name]["rows"]:
            print(name, json.dumps(row), flush=True)
    write_result(arguments.out, {**describe_environment(), "quick": arguments.quick, **found})
    return int(not all(one["held"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
