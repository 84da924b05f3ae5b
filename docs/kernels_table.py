"""Write the tables of kernels into docs/kernels.md, from the files in benchmarks/results: ``python docs/kernels_table.py``.

``--check`` writes nothing; exit code 1 means that a table differs from the files. ``benchmarks/kernel_resources.py`` records what the
compiler says. Shares of the copy bandwidth come from the benchmarks that ran on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from environment import of_table  # noqa: E402
from table_pages import write_tables  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "kernels.md", ROOT / "benchmarks" / "results"

#: Bytes from which a kernel is compared with a copy, in MB: smaller ones are bound by the latency of a launch.
LEAST_MB = 64

#: The variant of a source that is compiled once.
NO_VARIANT = "-"

Row = dict[str, Any]


def resources_table(arch: str) -> str:
    """Return the kernels of an architecture, one line each."""
    lines = [
        "| kernel | variant | threads | registers | local memory | static shared | dynamic shared | code | blocks | occupancy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in of_table(read("kernel_resources")["kernels"]):
        if row["arch"] != arch:
            continue
        sizes = [f"{row[key]} B" for key in ("local_nbytes", "static_nbytes", "dynamic_nbytes")]
        cells = [
            f"`{row['kernel']}`",
            "" if row["variant"] == NO_VARIANT else row["variant"],
            str(row["threads"]),
            str(row["registers"]),
            *sizes,
        ]
        cells += [f"{row['code_nbytes'] / 1024:.1f} KiB", str(row["blocks"]), f"{row['occupancy']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def copies_table() -> str:
    """Return the measured shares of the copy bandwidth, one line for each kernel and variant."""
    lines = ["| kernel | variant | bytes per second against a plain copy | measured on |", "|---|---|---|---|"]
    for kernel, variant, shares, result in measured_shares():
        content = read(result)
        spread = " to ".join(dict.fromkeys(f"{share:.2f}" for share in (min(shares), max(shares))))
        shapes = "1 shape" if len(shares) == 1 else f"{len(shares)} shapes"
        lines.append(
            f"| {kernel} | {variant} | {spread} ({shapes}) | {content['device']}, {content['date'][:10]}, commit {content['commit'][:8]} |"
        )
    return "\n".join(lines)


def measured_shares() -> Iterator[tuple[str, str, list[float], str]]:
    """Yield kernel, variant, shares of the copy bandwidth and the file of results."""
    decode = [row for row in of_table(read("attention")["decode"]) if row["width"] == 1 and row["kv_mb"] >= LEAST_MB]
    yield "`attention_decode`", "16-bit K/V", [row["of_copy"]["rope_append_attention"] for row in decode], "attention"
    quantized = of_table(read("attention_quantized_decode")["rows"])
    for source, rows in (
        ("`attention_decode`", [row for row in quantized if row["width"] == 1]),
        ("`attention_decode_few`", [row for row in quantized if row["width"] > 1]),
    ):
        for kv_dtype in ("int8", "float8_e4m3fn"):
            shares = [row["of_copy"][f"{kv_dtype} token"] for row in rows if row["kv_mb"][f"{kv_dtype} token"] >= LEAST_MB]
            if shares:
                yield source, f"{kv_dtype} K/V, a scale for each token", shares, "attention_quantized_decode"
    products = [row for row in of_table(read("linear")["products"]) if row["mb"] >= LEAST_MB]
    for variant, rows in (
        ("up to 8 rows", [row for row in products if row["rows"] <= 8]),
        ("16 rows", [row for row in products if row["rows"] > 8]),
    ):
        if rows:
            yield "`linear`", variant, [row["of_copy"]["ours"] for row in rows], "linear"
    experts = [row for row in of_table(read("experts")["rows"]) if row["launch"] == "both" and row["mb"] >= LEAST_MB]
    for stored in dict.fromkeys(row["format"] for row in experts):
        packed = "`linear_super_block_experts`" if stored.endswith("_K") else "`linear_packed_experts`"
        source = "`linear_experts`" if stored == "bfloat16" else packed
        shares = [row["of_copy"]["ours"] for row in experts if row["format"] == stored]
        yield source, f"{stored}, 1 to 8 rows, both products", shares, "experts"
    states = of_table(read("states")["rows"])
    for layer, kernel in (("conv", "causal_conv1d_update"), ("mamba2", "mamba2_update"), ("delta_rule", "delta_rule_update")):
        rows = [row for row in states if row["layer"] == layer and row["width"] == 1 and 2 * row["state_mb"] >= LEAST_MB]
        if rows:
            yield f"`{kernel}`", "a decode step", [row["of_copy"] for row in rows], "states"
    moves = of_table(read("gpu")["stages"]["cache: compaction, capture, restore"]["result"]["cases"])
    for move, kernel in (("compaction", "compact_layers"), ("capture", "save_layers"), ("restore", "instantiate_layers")):
        rows = [row for row in moves if row["move"] == move and not row["launch_bound"]]
        yield f"`{kernel}`", move, [row["of_copy"] for row in rows], "gpu"
    sampling = [row for row in read("sampling_gpu")["gpu_us"] if row["batch"] == 32]
    yield "`choose_tokens`", "greedy, 32 rows", [row["limit"] / row["peaked"]["greedy"] for row in sampling], "sampling_gpu"


def read(name: str) -> Row:
    """Return a file of results."""
    content: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def main() -> int:
    """Write the tables, or with ``--check`` say which ones differ."""
    made = {f"kernels of {arch}": resources_table(arch) for arch in ("sm_90", "sm_86")}
    made["kernels and copies"] = copies_table()
    script = "docs/kernels_table.py"
    codes = [
        write_tables([PAGE], f"<!-- {name}: {script} -->", f"<!-- end of {name} -->", text, name=name, script=script)
        for name, text in made.items()
    ]
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
