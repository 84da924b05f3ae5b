"""The weights of GGUF files over memory mappings, under the names and in the row order of transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache._util.mapped_pages import release_pages
from trt_kvcache.checkpoint.gguf.architectures import EXPERT, GATE_UP, PROJECTION, Architecture
from trt_kvcache.checkpoint.gguf.header import StoredBlocks
from trt_kvcache.checkpoint.gguf.model import GGUFModel
from trt_kvcache.checkpoint.gguf.model_config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, num_layers
from trt_kvcache.checkpoint.quantized.gguf import TYPES
from trt_kvcache.checkpoint.quantized.offset_blocks import PLANES as OFFSET_PLANES, OffsetBlocks
from trt_kvcache.checkpoint.quantized.super_blocks import SUPER_BLOCK_NBYTES, SuperBlocks
from trt_kvcache.checkpoint.safetensors_file import StoredTensor
from trt_kvcache.errors import CheckpointError

#: RoPE factors, which are a part of the configuration.
_IGNORED = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)

_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_ARRAYS = {"F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4")}

#: Types that are not weights, or that no library dequantizes.
_NOT_READ = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"})

#: Values that are dequantized at a time: few enough for the cache of a CPU core.
_CHUNK = 1 << 18

_A, _CONVOLUTIONS, _FLAT = "ssm_a", ("ssm_conv1d", "shortconv.conv"), ("ssm_a", "ssm_d", "ssm_norm")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Source of a tensor of transformers: stored tensors and the changes to them."""

    part: str
    names: tuple[str, ...]
    blocks: tuple[StoredBlocks, ...]
    shape: tuple[int, ...]
    rows: npt.NDArray[np.int64] | None
    columns: npt.NDArray[np.int64] | None
    is_plus_one: bool

    @property
    def changes_values(self) -> bool:
        """True if blocks must be dequantized for it."""
        return self.is_plus_one or self.part == _A or self.columns is not None or len({one.kind for one in self.blocks}) > 1


class GGUFWeights:
    """A :class:`~trt_kvcache.checkpoint.weight_file.WeightFile` of GGUF files.

    Blocks that engines keep packed are uint8 ``[out, bytes]``; other block types are dequantized to float32 when read.
    """

    #: Not rounded to the dtype of the model before use: norms are float32 in all files.
    keeps_stored_dtype = True

    def __init__(self, model: GGUFModel) -> None:
        self.path, self.paths = model.path, model.paths
        self.tensors: dict[str, StoredTensor] = {}
        self.dequantized: dict[str, str] = {}
        self._sources = _sources(model)
        for name, source in self._sources.items():
            first = source.blocks[0]
            dtype = _FLOATS.get(first.kind, first.kind)
            is_packed = first.kind in TYPES and len(source.shape) == 2 and not source.changes_values
            if first.kind not in _FLOATS and first.kind not in _NOT_READ and not is_packed:
                self.dequantized[name] = " and ".join(sorted({one.kind for one in source.blocks}))
            if name in self.dequantized or (source.changes_values and first.kind in _FLOATS):
                dtype = "float32"
            nbytes = sum(one.nbytes for one in source.blocks)
            self.tensors[name] = StoredTensor(dtype=dtype, shape=source.shape, offset=first.offset, nbytes=nbytes)

    def array(self, name: str) -> npt.NDArray[Any]:
        """See :meth:`WeightFile.array <trt_kvcache.checkpoint.weight_file.WeightFile.array>`."""
        source, stored = self._sources[name], self.tensors[name]
        keeps_blocks = stored.dtype not in _ARRAYS.keys() | set(_FLOATS.values())
        parts = [_stored(one) if keeps_blocks or one.kind in _FLOATS else _dequantized(one) for one in source.blocks]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if source.rows is not None:
            array = array[source.rows]
        if source.columns is not None:
            array = array[:, source.columns]
        if source.is_plus_one:
            array = array.astype(np.float32) - np.float32(1)
        if source.part == _A:
            array = self._log_of_a(array.astype(np.float32), name)
        array = array if keeps_blocks else array.reshape(source.shape)
        array.flags.writeable = False
        return array

    def block_type(self, name: str) -> str | None:
        """Return the type of a matrix of :meth:`super_blocks` or :meth:`offset_blocks`; None for others."""
        return self._type_of_matrix(name, (*SUPER_BLOCK_NBYTES, *OFFSET_PLANES))

    def super_block_type(self, name: str) -> str | None:
        """Return Q4_K, Q5_K or Q6_K of a matrix; None for other types, and where values or columns are changed."""
        return self._type_of_matrix(name, SUPER_BLOCK_NBYTES)

    def super_blocks(self, name: str) -> SuperBlocks | None:
        """Return a matrix that has a :meth:`super_block_type` as it is stored; None for others."""
        kind = self.super_block_type(name)
        return None if kind is None else SuperBlocks(kind=kind, stored=self._stored_matrix(name))

    def offset_blocks(self, name: str) -> OffsetBlocks | None:
        """Return a matrix in Q4_1, Q5_0 or Q5_1 as it is stored; None for others, and where values or columns are changed."""
        kind = self._type_of_matrix(name, OFFSET_PLANES)
        return None if kind is None else OffsetBlocks(kind=kind, stored=self._stored_matrix(name))

    def _type_of_matrix(self, name: str, types: Collection[str]) -> str | None:
        source = self._sources[name]
        kind = source.blocks[0].kind
        return kind if kind in types and len(source.shape) == 2 and not source.changes_values else None

    def _stored_matrix(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of the rows of a matrix in transformers' order."""
        source = self._sources[name]
        parts = [_stored(one) for one in source.blocks]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return array if source.rows is None else array[source.rows]

    def _log_of_a(self, a: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        if not (a < 0).all():
            raise CheckpointError(f"{self.path}: expected negative numbers in {_A}, which is {name}, got others. Fetch it again.")
        found: npt.NDArray[Any] = np.log(-a)
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """See :meth:`WeightFile.rename <trt_kvcache.checkpoint.weight_file.WeightFile.rename>`."""
        self.tensors = {names.get(name, name): value for name, value in self.tensors.items()}
        self.dequantized = {names.get(name, name): value for name, value in self.dequantized.items()}
        self._sources = {names.get(name, name): value for name, value in self._sources.items()}

    def release(self, name: str) -> None:
        """See :meth:`WeightFile.release <trt_kvcache.checkpoint.weight_file.WeightFile.release>`."""
        for one in self._sources[name].blocks:
            release_pages(one.mapping, one.offset, one.nbytes)


def _stored(blocks: StoredBlocks) -> npt.NDArray[Any]:
    """Return a stored tensor: floats, or blocks as uint8 with rows of bytes."""
    dtype = _ARRAYS.get(blocks.kind, np.dtype(np.uint8))
    array = np.frombuffer(blocks.mapping, dtype=dtype, count=blocks.nbytes // dtype.itemsize, offset=blocks.offset)
    return array.reshape(*blocks.shape[:-1], -1)


def _dequantized(blocks: StoredBlocks) -> npt.NDArray[np.float32]:
    import gguf

    kind, stored = gguf.GGMLQuantizationType[blocks.kind], _stored(blocks)
    values = np.empty(blocks.shape, np.float32)
    rows, stored_rows = values.reshape(-1, blocks.shape[-1]), stored.reshape(-1, stored.shape[-1])

    def dequantize(some: slice) -> None:
        rows[some] = gguf.quants.dequantize(stored_rows[some], kind)

    for_each(dequantize, row_slices(*rows.shape, _CHUNK))
    return values


def _sources(model: GGUFModel) -> dict[str, _Source]:
    """Return the source of each tensor of transformers. An unknown tensor keeps its name, and is refused under it."""
    architecture, metadata = model.architecture, model.metadata
    has_drafts = metadata.integer(metadata.own("nextn_predict_layers"), 0) > 0
    found: dict[str, list[tuple[str, str, StoredBlocks]]] = {}
    for stored in model.tensors:
        layer = re.match(r"blk\.(\d+)\.", stored)
        if stored in _IGNORED or (has_drafts and layer and int(layer[1]) >= num_layers(metadata)):
            continue
        name, part = _name(stored, architecture)
        for one, blocks in _of_experts(model, name, stored) if EXPERT in name else ((name, model.tensors[stored]),):
            found.setdefault(one, []).append((part, stored, blocks))
    order = list(architecture.layer_names)
    return {
        name: _source(model, sorted(parts, key=lambda one: order.index(one[0]) if one[0] in order else 0)) for name, parts in found.items()
    }


def _of_experts(model: GGUFModel, name: str, stored: str) -> Iterator[tuple[str, StoredBlocks]]:
    """Yield the tensors of each expert in a tensor ``[experts, rows, ...]``, whose rows are of one projection or of several."""
    whole, experts = model.tensors[stored], model.metadata.integer(model.metadata.own("expert_count"), 0)
    projections = GATE_UP if PROJECTION in name else ("",)
    if len(whole.shape) < 2 or not 0 < experts == whole.shape[0] <= whole.nbytes or whole.shape[1] % len(projections):
        raise CheckpointError(f"{model.path}: expected {stored} of {experts} experts, got the shape {whole.shape}.")
    shape, nbytes = (whole.shape[1] // len(projections), *whole.shape[2:]), whole.nbytes // (experts * len(projections))
    for place, (expert, projection) in enumerate(product(range(experts), projections)):
        one = replace(whole, shape=shape, offset=whole.offset + place * nbytes, nbytes=nbytes)
        yield name.replace(EXPERT, str(expert)).replace(PROJECTION, projection), one


def _source(model: GGUFModel, parts: list[tuple[str, str, StoredBlocks]]) -> _Source:
    architecture, metadata = model.architecture, model.metadata
    names = tuple(stored for _, stored, _ in parts)
    blocks = tuple(one for _, _, one in parts)
    if len({one.shape[1:] for one in blocks}) > 1:
        raise CheckpointError(f"{model.path}: expected rows of one width in {' and '.join(names)}, got {[one.shape for one in blocks]}.")
    part = parts[0][0]
    length = sum(one.shape[0] for one in blocks)
    shape = (length, *blocks[0].shape[1:])
    rows, columns = architecture.rows.get(part), architecture.columns.get(part)
    orders = (None if rows is None else rows(metadata, length)), (None if columns is None else columns(metadata, shape[-1]))
    if part in _FLAT:
        shape = (math.prod(shape),)
    if part in _CONVOLUTIONS and names[0].endswith(".weight") and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    return _Source(
        part=part,
        names=names,
        blocks=blocks,
        shape=shape,
        rows=_unless_identity(orders[0]),
        columns=_unless_identity(orders[1]),
        is_plus_one=part in architecture.norms_plus_one,
    )


def _unless_identity(order: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64] | None:
    return None if order is None or np.array_equal(order, np.arange(len(order))) else order


def _name(name: str, architecture: Architecture) -> tuple[str, str]:
    """Return the transformers name of a tensor, and the name of its role in a layer."""
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    names = architecture.layer_names if layer else architecture.names
    tail, prefix = (layer[2], f"{architecture.layers}.{layer[1]}.") if layer else (name, "")
    stem, dot, kind = tail.rpartition(".")
    if tail in names:  # tensors without a suffix, and a bias that is none in transformers
        return f"{prefix}{names[tail]}", stem or tail
    return (f"{prefix}{names[stem]}{dot}{kind}", stem) if stem in names else (name, stem or tail)
