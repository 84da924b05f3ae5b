"""Compile the attention kernels for a plugin library, and write the table that it finds them in.

``python plugins/tensorrt/embed_kernels.py --arch sm_89 --variant bfloat16-128 --output build/plugin_library/kernels``. Needs no GPU.

It writes ``kernels.cpp``, the table of ``attention_kernels.hpp`` with the tile sizes of each kernel, and ``kernels.S``, which makes the
assembler include the machine code. So C++ never repeats a tile size. GPUs that have no machine code there take PTX of an older
architecture, which their driver compiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from trt_kvcache.kernels.attention_tiles import (
    DECODE_HEAD_DIMS,
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
from trt_kvcache.kernels.ptx import kernel_ptx
from trt_kvcache.kernels.source_variants import TILES, head_dims_of, variant_name

#: Dtype of q and head dim of each variant.
VARIANTS = [f"{dtype}-{head_dim}" for dtype in ELEMENT_TYPES for head_dim in HEAD_DIMS]

#: The architecture of the PTX: every GPU from it on has the shared memory that its tiles need.
PTX_ARCH = "sm_86"

#: Architectures whose kernels have instructions of their own, so that their PTX is for no other GPU.
_OWN_INSTRUCTIONS = ("sm_90",)

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


class Kernels(NamedTuple):
    """Kernels of one row of the table."""

    arch: str
    dtype: str  # of q
    head_dim: int
    kv_dtype: str | None  # None: as dtype
    is_ptx: bool = False

    @property
    def sources(self) -> list[str]:
        """Names of the compiled sources: of decode steps, of a few new tokens, of prefill; of large heads the last alone."""
        sources = [source for source in TILES if self.head_dim in head_dims_of(source)]
        return [variant_name(source, self.dtype, self.head_dim, self.kv_dtype) for source in sources]


def write(kernels: Sequence[Kernels], code: Sequence[bytes], folder: Path) -> None:
    """Write the sources of a library with these kernels. ``code`` is the machine code, or PTX, of their sources, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder.resolve() / f"{name}.{one.arch}.{'ptx' if one.is_ptx else 'cubin'}" for one in kernels for name in one.sources]
    symbols = [f"trt_kvcache_kernels_{index}" for index in range(len(paths))]
    for path, content in zip(paths, code, strict=True):
        path.write_bytes(content)
    images = "".join(_IMAGE.format(symbol=symbol, path=path) for symbol, path in zip(symbols, paths, strict=True))
    (folder / "kernels.S").write_text(f'    .section .rodata\n{images}    .section .note.GNU-stack,"",%progbits\n')
    rest = iter(symbols)
    rows = [_row(one, list(islice(rest, len(one.sources)))) for one in kernels]
    declarations = "\n".join(f"extern unsigned char const {symbol}[];" for symbol in symbols)
    (folder / "kernels.cpp").write_text(_TABLE.format(declarations=declarations, rows="\n".join(rows), count=len(rows)))


def kernels_of(archs: Iterable[str], variants: Iterable[str], kv_dtypes: Iterable[str | None], *, is_ptx: bool = False) -> list[Kernels]:
    """Return the kernels of all combinations."""
    splits = [(arch, *variant.rsplit("-", 1), kv_dtype) for arch, variant, kv_dtype in product(archs, variants, kv_dtypes)]
    return [Kernels(arch, dtype, int(head_dim), kv_dtype, is_ptx) for arch, dtype, head_dim, kv_dtype in splits]


def compile_all(kernels: Sequence[Kernels], jobs: int = 1) -> list[bytes]:
    """Return the code of the sources of some kernels, in order; compiled before, it comes from the user's cache folder."""
    sources = [(kernel_ptx if one.is_ptx else cubin, name, one.arch) for one in kernels for name in one.sources]
    if jobs == 1:
        return [compile_source(name, arch) for compile_source, name, arch in sources]
    with ProcessPoolExecutor(jobs) as pool:
        return [one.result() for one in [pool.submit(*source) for source in sources]]


def _row(kernels: Kernels, symbols: Sequence[str]) -> str:
    """Return a row of the table: an ``AttentionKernels``."""
    arch, dtype, head_dim, kv_dtype, is_ptx = kernels
    quantized = kv_dtype is not None
    decode = few = "{}"
    if head_dim in DECODE_HEAD_DIMS:
        decode = _decode_tiles(decode_tiles(head_dim, arch, quantized=quantized), head_dim, quantized)
        few = _decode_tiles(few_tiles(head_dim, arch, quantized=quantized), head_dim, quantized)
    images = [*["nullptr"] * (len(TILES) - len(symbols)), *symbols]
    prefill = _braces(*(_prefill_tiles(head_dim, arch, variant, quantized) for variant in PREFILL_VARIANTS))
    names = f'{arch_number(arch)}, {_bool(is_ptx)}, "{dtype}", {head_dim}, ' + (f'"{kv_dtype}"' if quantized else "nullptr")
    early = _bool(arch_number(arch) >= MIN_PDL_ARCH)
    return f"    {{{names}, {early},\n     {decode}, {few},\n     {prefill},\n     {', '.join(images)}}},"


def _decode_tiles(tiles: dict[str, int], head_dim: int, quantized: bool) -> str:
    """Return a ``DecodeTiles``; only the kernels for a few new tokens have a limit of rows."""
    sizes = [tiles[name] for name in ("TILE_TOKENS", "MIN_TILES_PER_BLOCK", "BLOCKS_PER_SM", "WARPS")]
    nbytes = [decode_block_nbytes(head_dim, rows, tiles, quantized=quantized) for rows in DECODE_ROWS]
    return _braces(*sizes, tiles.get("MAX_ROWS", 0), _braces(*nbytes))


def _prefill_tiles(head_dim: int, arch: str, name: str, quantized: bool) -> str:
    """Return a ``PrefillTiles``."""
    variant = prefill_variant(head_dim, arch, name, quantized)
    spread = spread_nbytes(arch, variant.blocks_per_sm)
    return _braces(*variant[:-1], spread, _bool(variant.warpgroups))


def _braces(*values: object) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def _bool(value: bool) -> str:
    return str(value).lower()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile and write. See ``--help``."""
    parser = argparse.ArgumentParser(description="Compile the attention kernels for a plugin library.")
    parser.add_argument("--arch", action="append", required=True, help=f"may be repeated; one of {' '.join(ARCHITECTURES)}")
    parser.add_argument("--variant", action="append", required=True, choices=VARIANTS, help="dtype of q and head dim; may be repeated")
    parser.add_argument(
        "--kv-dtype", action="append", choices=["same", *STORED_TYPES], help="dtype of K and V; may be repeated; default: all of them"
    )
    parser.add_argument(
        "--ptx",
        default=PTX_ARCH,
        choices=["none", *(arch for arch in ARCHITECTURES if arch not in _OWN_INSTRUCTIONS)],
        help="architecture of the PTX, for GPUs from it on that have no machine code here; default: %(default)s",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile; default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="folder of the sources that it writes")
    options = parser.parse_args(arguments)
    kv_dtypes = [None if one == "same" else one for one in options.kv_dtype or ["same", *STORED_TYPES]]
    kernels = kernels_of(options.arch, options.variant, kv_dtypes)
    kernels += kernels_of([] if options.ptx == "none" else [options.ptx], options.variant, kv_dtypes, is_ptx=True)
    write(kernels, compile_all(kernels, options.jobs), options.output)


if __name__ == "__main__":
    main()
