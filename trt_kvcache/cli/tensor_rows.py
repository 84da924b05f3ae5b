"""Rows of a table of tensors: equal tensors of consecutive layers share a row, ``k_cache_{0..23}``."""

import re
from collections.abc import Iterable, Iterator, Sequence

from trt_kvcache.engine.protocol import TensorSpec

#: Cells of a row: name, mode, dtype, shape, alias.
Row = tuple[str, str, str, str, str]

_OF_A_LAYER = re.compile(r"(.*\D)(\d+)")


def tensor_rows(tensors: Iterable[TensorSpec], *, grouped: bool) -> Iterator[Row]:
    """Yield the rows of a table of tensors."""
    groups: dict[tuple[str, ...], list[tuple[int, TensorSpec]]] = {}
    for spec in tensors:
        stem, layer = _split(spec.name) if grouped else (spec.name, -1)
        alias_stem, alias_layer = _split(spec.alias or "")
        same_layer = layer >= 0 and alias_layer == layer
        key = (stem, spec.mode.value, spec.dtype, str(spec.shape), alias_stem if same_layer else spec.alias or "")
        groups.setdefault(key if layer >= 0 else (spec.name,), []).append((layer, spec))
    for members in groups.values():
        for run in _runs(members):
            yield _row(run)


def _split(name: str) -> tuple[str, int]:
    """Split a name into stem and layer; -1 if it has no layer."""
    match = _OF_A_LAYER.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, -1)


def _runs(members: Sequence[tuple[int, TensorSpec]]) -> Iterator[list[tuple[int, TensorSpec]]]:
    """Yield the members of a group in runs of consecutive layers."""
    run: list[tuple[int, TensorSpec]] = []
    for member in members:
        if run and member[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(member)
    yield run


def _row(run: Sequence[tuple[int, TensorSpec]]) -> Row:
    first, spec = run[0]
    last = run[-1][0]

    def shown(name: str) -> str:
        return name if len(run) == 1 or _split(name)[1] != first else f"{_split(name)[0]}{{{first}..{last}}}"

    return shown(spec.name), spec.mode.value, spec.dtype, str(list(spec.shape)).replace("-1", "?"), shown(spec.alias or "")
