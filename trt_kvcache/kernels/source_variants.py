"""Which variants of the attention kernels are compiled: one for each dtype and head dim, with its macros."""

from __future__ import annotations

from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, decode_tiles, few_tiles, prefill_tiles

#: How the macros of each source are chosen.
TILES = {"attention_decode": decode_tiles, "attention_decode_few": few_tiles, "attention_prefill": prefill_tiles}


def variant_names(source: str) -> list[str]:
    """Return the names of all variants of a source: one for each dtype and head dim; the source itself if it is no attention kernel."""
    if source not in TILES:
        return [source]
    return [variant_name(source, dtype, head_dim) for dtype in ELEMENT_TYPES for head_dim in HEAD_DIMS]


def variant_name(source: str, dtype: str, head_dim: int) -> str:
    """Return the name of one variant of a source.

    Examples
    --------
    >>> from trt_kvcache.kernels.source_variants import variant_name
    >>> variant_name("attention_decode", "float16", 128)
    'attention_decode-float16-128'
    """
    return f"{source}-{dtype}-{head_dim}"


def variant_macros(name: str, arch: str) -> dict[str, str]:
    """Return the macros that a variant is compiled with for an architecture; none for a source that is no attention kernel."""
    source, _, variant = name.partition("-")
    if not variant:
        return {}
    dtype, head_dim = variant.split("-")
    tiles = {macro: str(value) for macro, value in TILES[source](int(head_dim), arch).items()}
    return {"ELEMENT": ELEMENT_TYPES[dtype], "HEAD_DIM": head_dim, **tiles}
