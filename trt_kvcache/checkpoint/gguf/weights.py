"""The weights of a GGUF file: its tensors under their names and in the order of transformers, over memory mappings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache._util.mapped_pages import release_pages
from trt_kvcache.checkpoint.gguf.architectures import Architecture
from trt_kvcache.checkpoint.gguf.model import GGUFModel
from trt_kvcache.checkpoint.quantized.gguf import TYPES
from trt_kvcache.checkpoint.safetensors_file import StoredTensor

#: Factors of RoPE, which the configuration has too.
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_ARRAYS = {"F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4")}

#: Types whose blocks stay packed, and those that are left alone: integers of no weight.
_NOT_READ = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


class GGUFWeights:
    """Tensors of one GGUF file, or of the files of a split model, as arrays over memory mappings.

    Blocks that engines keep packed stay as they are; those of other types are dequantized when they are read.

    Parameters
    ----------
    model : GGUFModel
        The files.

    Attributes
    ----------
    path : Path
        The first file.
    paths : tuple of Path
        All files.
    tensors : dict of str to StoredTensor
        The tensors by their names in transformers. The dtype of a packed one is its type in GGUF; its shape that of the weight.
    dequantized : dict of str to str
        The types of those that are dequantized when they are read.
    """

    #: Values are rounded by whoever computes with them, and not to the dtype of the model before: norms are in float32 in all files.
    keeps_values = True

    def __init__(self, model: GGUFModel) -> None:
        self.path, self.paths = model.path, model.paths
        self._model = model
        architecture = model.architecture
        self.tensors: dict[str, StoredTensor] = {}
        self.dequantized: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._heads: dict[str, int] = {}
        for stored_name, blocks in model.tensors.items():
            if stored_name in _IGNORED:
                continue
            name, part = _name(stored_name, architecture)
            dtype = _FLOATS.get(blocks.kind, blocks.kind)
            if dtype == blocks.kind and blocks.kind not in TYPES and blocks.kind not in _NOT_READ:
                self.dequantized[name] = blocks.kind
                dtype = "float32"
            self.tensors[name] = StoredTensor(dtype=dtype, shape=blocks.shape, offset=blocks.offset, nbytes=blocks.nbytes)
            self._sources[name] = stored_name
            if part in architecture.paired_rows:
                self._heads[name] = model.metadata.integer(model.metadata.own(architecture.paired_rows[part]))

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.

        Returns
        -------
        ndarray
            Floats in their dtype; the blocks of a packed tensor as uint8 ``[out, bytes]``.
        """
        source = self._sources[name]
        array = self._stored(source)
        if name in self._heads:
            array = array[_rows_of_halves(len(array), self._heads[name])]
        if name in self.dequantized:
            import gguf

            array = gguf.quants.dequantize(array, gguf.GGMLQuantizationType[self.dequantized[name]])
        array.flags.writeable = False
        return array

    def _stored(self, source: str) -> npt.NDArray[Any]:
        """Return floats, or blocks as uint8 with rows of bytes."""
        blocks = self._model.tensors[source]
        mapping = self._model.mapping_of(source)
        dtype = _ARRAYS.get(blocks.kind, np.dtype(np.uint8))
        array = np.frombuffer(mapping, dtype=dtype, count=blocks.nbytes // dtype.itemsize, offset=blocks.offset)
        return array.reshape(*blocks.shape[:-1], -1)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names.

        Parameters
        ----------
        names : mapping of str to str
            The new name of each tensor that changes its name.
        """
        self.tensors = {names.get(name, name): value for name, value in self.tensors.items()}
        self.dequantized = {names.get(name, name): value for name, value in self.dequantized.items()}
        self._sources = {names.get(name, name): value for name, value in self._sources.items()}
        self._heads = {names.get(name, name): value for name, value in self._heads.items()}

    def release(self, name: str) -> None:
        """Let the operating system take the memory of a tensor. Arrays of it stay valid: they are read from the file again.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.
        """
        source = self._sources[name]
        blocks = self._model.tensors[source]
        release_pages(self._model.mapping_of(source), blocks.offset, blocks.nbytes)


def open_gguf_weights(path: Path) -> GGUFWeights:
    """Open the weights of a GGUF file, or of a split model by its first file."""
    return GGUFWeights(GGUFModel(path))


def _name(name: str, architecture: Architecture) -> tuple[str, str]:
    """Return what transformers calls a tensor, and which part of a layer it is; a name that is not known stays, to be refused under it."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in architecture.layer_names:
        return f"model.layers.{layer[1]}.{architecture.layer_names[layer[2]]}.{kind}", layer[2]
    return (f"{architecture.names[stem]}.{kind}" if stem in architecture.names else name), stem


def _rows_of_halves(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return which row of a file each row of transformers is: GGUF has rows that RoPE pairs beside each other, in every head."""
    if heads < 1 or rows % (2 * heads):
        return np.arange(rows)  # the shape is refused
    pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    order: npt.NDArray[np.int64] = pairs.swapaxes(1, 2).reshape(-1)
    return order
