"""Compile the attention kernels for a plugin library, and write the table that it finds them in.

``python plugins/tensorrt/embed_kernels.py --arch sm_89 --variant bfloat16-128 --output build/plugin_library/kernels``. Needs no GPU.

It writes ``kernels.cpp``, the table of ``attention_kernels.hpp`` with the tile sizes of each kernel, and ``kernels.S``, which makes the
assembler include the machine code. So C++ never repeats a tile size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from trt_kvcache.kernels.attention_tiles import (
    DECODE_ROWS,
    ELEMENT_TYPES,
    HEAD_DIMS,
    MIN_PDL_ARCH,
    PREFILL_VARIANTS,
    STORED_TYPES,
    arch_number,
    decode_block_nbytes,
    decode_tiles,
    few_tiles,
    prefill_variant,
    spread_nbytes,
)
from trt_kvcache.kernels.compile import ARCHITECTURES, cubin
from trt_kvcache.kernels.source_variants import TILES, variant_name

#: Dtype of q and head dim of each variant.
VARIANTS = [f"{dtype}-{head_dim}" for dtype in ELEMENT_TYPES for head_dim in HEAD_DIMS]

_TABLE = """// Written by plugins/tensorrt/embed_kernels.py.
#include "attention_kernels.hpp"

extern "C" {{
{declarations}
}}

namespace trt_kvcache {{

AttentionKernels const kAttentionKernels[] = {{
{rows}
    {{}},  // an array has at least one element
}};
size_t const kNumAttentionKernels = {count};

}}  // namespace trt_kvcache
"""

_IMAGE = """    .balign 64
    .globl {symbol}
    .hidden {symbol}
{symbol}:
    .incbin "{path}"
    .byte 0
"""


def embed(archs: Sequence[str], variants: Sequence[str], kv_dtypes: Sequence[str | None], folder: Path, *, jobs: int = 1) -> None:
    """Write the sources of a library with these kernels into a folder. A ``kv_dtype`` of None is a cache in the dtype of q."""
    wanted = [(arch, *variant.rsplit("-", 1), kv_dtype) for arch in archs for variant in variants for kv_dtype in kv_dtypes]
    names = [(variant_name(source, dtype, dim, kv_dtype), arch) for arch, dtype, dim, kv_dtype in wanted for source in TILES]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{arch}.cubin" for name, arch in names]
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            codes = list(pool.map(cubin, *zip(*names, strict=True))) if names else []
    else:
        codes = [cubin(name, arch) for name, arch in names]
    for path, code in zip(paths, codes, strict=True):
        path.write_bytes(code)
    symbols = [f"trt_kvcache_kernels_{index}" for index in range(len(names))]
    images = "".join(_IMAGE.format(symbol=symbol, path=path.resolve()) for symbol, path in zip(symbols, paths, strict=True))
    (folder / "kernels.S").write_text(f'    .section .rodata\n{images}    .section .note.GNU-stack,"",%progbits\n')
    count = len(TILES)
    rows = [_row(*one, symbols[count * index : count * (index + 1)]) for index, one in enumerate(wanted)]
    declarations = "\n".join(f"extern unsigned char const {symbol}[];" for symbol in symbols)
    (folder / "kernels.cpp").write_text(_TABLE.format(declarations=declarations, rows="\n".join(rows), count=len(rows)))


def _row(arch: str, dtype: str, dim: str, kv_dtype: str | None, symbols: Sequence[str]) -> str:
    """Return a row of the table: an ``AttentionKernels``."""
    head_dim, quantized = int(dim), kv_dtype is not None
    decode = _decode_tiles(decode_tiles(head_dim, arch, quantized=quantized), head_dim, quantized)
    few = _decode_tiles(few_tiles(head_dim, arch, quantized=quantized), head_dim, quantized)
    prefill = ", ".join(_prefill_tiles(head_dim, arch, variant, quantized) for variant in PREFILL_VARIANTS)
    kv, early = f'"{kv_dtype}"' if quantized else "nullptr", str(arch_number(arch) >= MIN_PDL_ARCH).lower()
    return f'    {{"{arch}", "{dtype}", {dim}, {kv}, {early},\n     {decode}, {few},\n     {{{prefill}}},\n     {", ".join(symbols)}}},'


def _decode_tiles(tiles: dict[str, int], head_dim: int, quantized: bool) -> str:
    """Return a ``DecodeTiles``; only the kernels for a few new tokens have a limit of rows."""
    sizes = [tiles[name] for name in ("TILE_TOKENS", "MIN_TILES_PER_BLOCK", "BLOCKS_PER_SM", "WARPS")]
    nbytes = [decode_block_nbytes(head_dim, rows, tiles, quantized=quantized) for rows in DECODE_ROWS]
    return _braces(*sizes, tiles.get("MAX_ROWS", 0), _braces(*nbytes))


def _prefill_tiles(head_dim: int, arch: str, name: str, quantized: bool) -> str:
    """Return a ``PrefillTiles``."""
    variant = prefill_variant(head_dim, arch, name, quantized)
    spread = spread_nbytes(arch, variant.blocks_per_sm)
    return _braces(*variant[:-1], spread, str(variant.warpgroups).lower())


def _braces(*values: object) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile and write. See ``--help``."""
    parser = argparse.ArgumentParser(description="Compile the attention kernels for a plugin library.")
    parser.add_argument("--arch", action="append", required=True, help=f"may be repeated; one of {' '.join(ARCHITECTURES)}")
    parser.add_argument("--variant", action="append", required=True, choices=VARIANTS, help="dtype of q and head dim; may be repeated")
    parser.add_argument(
        "--kv-dtype", action="append", choices=["same", *STORED_TYPES], help="dtype of K and V; may be repeated; default: all of them"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile; default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="folder of the sources that it writes")
    options = parser.parse_args(arguments)
    kv_dtypes = [None if one == "same" else one for one in options.kv_dtype or ["same", *STORED_TYPES]]
    embed(options.arch, options.variant, kv_dtypes, options.output, jobs=options.jobs)


if __name__ == "__main__":
    main()
