"""Write the table of weight formats into README.md and docs/quantization.md, from the code: ``python docs/formats_table.py``.

``--check`` writes nothing; exit code 1 means that a table differs from the code. Formats, their kinds of quantized values, and the
first GPUs with each of TensorRT's data types come from the package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from table_pages import write_tables  # noqa: E402

from trt_kvcache.builder.capable_gpus import FIRST_CAPABILITY  # noqa: E402
from trt_kvcache.builder.network.packed_weight import CONSTANT_TYPES, NATIVE_TYPES  # noqa: E402
from trt_kvcache.checkpoint.quantized.gguf import GGUF  # noqa: E402
from trt_kvcache.checkpoint.quantized.offset_blocks import MIDDLES  # noqa: E402
from trt_kvcache.checkpoint.quantized.quantization import SCHEMES  # noqa: E402
from trt_kvcache.checkpoint.quantized.registry import FORMATS  # noqa: E402
from trt_kvcache.checkpoint.quantized.super_blocks import SUPER_BLOCK_NBYTES  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "docs" / "quantization.md")
BEGIN, END = "<!-- formats: docs/formats_table.py -->", "<!-- end of formats -->"

#: The first compute capability of TensorRT for RTX; types without an own first one start there.
LOWEST = "7.5"

#: The first compute capability with plugin layers.
PLUGIN_LAYERS = (8, 0)

#: Names of TensorRT's types.
TITLES = {"int4": "INT4", "int8": "INT8", "float8_e4m3fn": "FP8", "float4_e2m1fn": "FP4"}


def table() -> str:
    """Return the table, one line per format."""
    capabilities = sorted({LOWEST, *FIRST_CAPABILITY.values()}, key=_number)
    columns = [
        f"{first} and newer" if after is None else f"from {first}"
        for first, after in zip(capabilities, [*capabilities[1:], None], strict=True)
    ]
    lines = [
        f"| weights | format name | NumPy, PyTorch | TensorRT, compute capability {' | '.join(columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    rounded = sorted({f"int{bits}" for bits, _ in SCHEMES.values()})
    rows = [("rounded to nearest", "`--quantize`", rounded)]
    rows += [(made.name, f"`{method}`", made.kinds) for method, made in FORMATS.items()]
    rows += [(GGUF.name, "a `.gguf` file", GGUF.kinds)]
    for name, method, kinds in rows:
        types = " | ".join(_types(kinds, capability) or "no" for capability in capabilities)
        lines.append(f"| {name} | {method} | yes | {types} |")
    in_layers = " | ".join("16 bits, or packed in plugin layers" if _number(one) >= PLUGIN_LAYERS else "16 bits" for one in capabilities)
    of_kernels = ", ".join((*SUPER_BLOCK_NBYTES, *MIDDLES))
    lines.append(f"| {GGUF.name} {of_kernels} | a `.gguf` file | yes; packed by PyTorch on a GPU | {in_layers} |")
    return "\n".join(lines)


def _types(kinds: Sequence[str], capability: str) -> str:
    """Return the types in a build for one compute capability, for these kinds of quantized values."""
    found = []
    for kind in kinds:
        native = NATIVE_TYPES.get(kind)
        name = native if native is not None and _has(native, capability) else CONSTANT_TYPES[kind]
        if _has(name, capability) and TITLES[name] not in found:
            found.append(TITLES[name])
    return ", ".join(title for title in TITLES.values() if title in found)


def _has(name: str, capability: str) -> bool:
    return _number(capability) >= _number(FIRST_CAPABILITY.get(name, LOWEST))


def _number(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


if __name__ == "__main__":
    raise SystemExit(write_tables(PAGES, BEGIN, END, table(), name="formats", script="docs/formats_table.py"))
