"""One GGUF file, memory-mapped: its tensors under their names in transformers, with the rows of q and k in their order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._util.mapped_pages import release_pages
from trt_kvcache._util.regular_file import open_regular
from trt_kvcache._util.shown import shown
from trt_kvcache.checkpoint.safetensors_file import StoredTensor
from trt_kvcache.errors import CheckpointError

#: Architectures whose weights are those of transformers, but for the order of rows; Mistral is a ``llama`` there.
ARCHITECTURES = ("llama", "qwen2", "qwen3")

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: Factors of RoPE, which ``config.json`` has too.
_IGNORED = ("rope_freqs.weight",)

_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class GGUFFile:
    """A GGUF file whose tensors are arrays over one memory mapping; q and k of Llama are copied when they are read.

    Parameters
    ----------
    path : Path
        The file.

    Attributes
    ----------
    path : Path
        The file.
    tensors : dict of str to StoredTensor
        The tensors by their names in transformers. The dtype of a quantized one is its type in GGUF; its shape that of the weight.

    Raises
    ------
    CheckpointError
        The file is damaged, or of a model whose weights are stored otherwise than in transformers.
    """

    def __init__(self, path: Path) -> None:
        with naming_the_extra():
            from gguf import GGUFReader

        self.path = path
        try:
            with open_regular(path):
                reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{path}: expected a whole GGUF file, got one that cannot be read: {error}. Fetch or copy it again."
            ) from error
        self._fields = reader.fields
        self._mapping = reader.data.base
        architecture = self._text("general.architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {shown(architecture)}. "
                "Take the safetensors of the model."
            )
        self._permuted = {"q_proj": "head_count", "k_proj": "head_count_kv"} if architecture == "llama" else {}
        self._heads = {name: self._number(f"{architecture}.attention.{count}") for name, count in self._permuted.items()}
        self._data: dict[str, npt.NDArray[Any]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for tensor in reader.tensors:
            if tensor.name not in _IGNORED:
                name, kind = _name(tensor.name), tensor.tensor_type.name
                shape = tuple(int(size) for size in reversed(tensor.shape))
                self._data[name] = tensor.data
                self.tensors[name] = StoredTensor(
                    dtype=_FLOATS.get(kind, kind), shape=shape, offset=int(tensor.data_offset), nbytes=int(tensor.n_bytes)
                )

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.

        Returns
        -------
        ndarray
            Floats in their dtype; the blocks of a quantized tensor as uint8 ``[out, bytes]``.
        """
        stored, data = self.tensors[name], self._data[name]
        array: npt.NDArray[Any] = np.asarray(data)
        if stored.dtype == "bfloat16":
            array = array.view(ml_dtypes.bfloat16)
        module = name.split(".")[-2]
        if module in self._heads:
            array = array[_rows_of_halves(len(array), self._heads[module])]
            array.flags.writeable = False
        return array

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names.

        Parameters
        ----------
        names : mapping of str to str
            The new name of each tensor that changes its name.
        """
        self.tensors = {names.get(name, name): stored for name, stored in self.tensors.items()}
        self._data = {names.get(name, name): data for name, data in self._data.items()}

    def release(self, name: str) -> None:
        """Let the operating system take the memory of a tensor. Arrays of it stay valid: they are read from the file again.

        Parameters
        ----------
        name : str
            One of :attr:`tensors`.
        """
        stored = self.tensors[name]
        release_pages(self._mapping, stored.offset, stored.nbytes)

    def _number(self, key: str) -> int:
        field = self._fields.get(key)
        value = field.parts[field.data[0]] if field is not None and len(field.data) == 1 else None
        if value is None or value.dtype.kind not in "iu" or value[0] < 1:
            raise CheckpointError(f"{self.path}: {key}: expected a positive integer, got {shown(value)}.")
        return int(value[0])

    def _text(self, key: str) -> str | None:
        field = self._fields.get(key)
        return None if field is None or not field.data else bytes(field.parts[field.data[0]]).decode("utf-8", "replace")


def _name(name: str) -> str:
    """Return what transformers calls a tensor; a name that is not known stays, so that it is refused under it."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _rows_of_halves(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return which row of a file each row of transformers is: GGUF has rows that RoPE pairs beside each other, in every head."""
    if rows % (2 * heads):
        return np.arange(rows)  # the shape is refused
    pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    order: npt.NDArray[np.int64] = pairs.swapaxes(1, 2).reshape(-1)
    return order
