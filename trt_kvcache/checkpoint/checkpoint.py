"""A Hugging Face model folder: its configuration and its weights, checked against each other and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache.checkpoint.adapters.lora_adapter import LoraAdapter
from trt_kvcache.checkpoint.adapters.merged_weights import check_base, merged_weights, with_untied_head
from trt_kvcache.checkpoint.assistant_files import token_clusters
from trt_kvcache.checkpoint.eagle3_files import draft_tokens, with_shared_tensors
from trt_kvcache.checkpoint.gguf.weights import GGUFWeights
from trt_kvcache.checkpoint.kv_scales import LayerScales, read_kv_scales
from trt_kvcache.checkpoint.model_files import CONFIG_FILE, ModelFiles
from trt_kvcache.checkpoint.quantized.format import QuantizedFormat
from trt_kvcache.checkpoint.quantized.gguf import GGUF
from trt_kvcache.checkpoint.quantized.offset_blocks import MIDDLES, OffsetBlocks
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.checkpoint.quantized.registry import quantized_format
from trt_kvcache.checkpoint.quantized.rounded_weight import RoundedWeight, rounded_weights
from trt_kvcache.checkpoint.quantized.stored_weight import StoredWeight, stored_weight
from trt_kvcache.checkpoint.quantized.super_blocks import SUPER_BLOCK_NBYTES, SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.checkpoint.stacked_experts import split_experts
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, family_names, open_weight_files
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.dtypes import MODEL_DTYPES, dtype_name, itemsize, numpy_dtype
from trt_kvcache.errors import CheckpointError, ClosedError, ConfigError
from trt_kvcache.model.families.eagle3 import HEAD_FAMILY, TOKEN_OFFSETS, read_eagle3_config
from trt_kvcache.model.families.family import DRAFT_HEADS, Family
from trt_kvcache.model.families.gemma4_assistant import TOKEN_ORDERING, read_assistant_config
from trt_kvcache.model.families.registry import FAMILIES, read_config, read_mtp_config, states_dtype
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, looked_up_tensors, merge_names, tensor_shapes
from trt_kvcache.model.weight_parts import exact_tensors, expert_tensors, unread_prefixes

# Optional files of a model folder, copied with it.
COMPANION_FILES = (
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)

# Older exports stored these buffers. They are computed from the configuration instead.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"

_HASH_CHUNK_BYTES = 1 << 22


class Checkpoint:
    """The weights of a model folder. The presence, shape and dtype of every tensor have been checked.

    Create one with :meth:`open`. It is a context manager. The arrays that it returns are read-only views of the memory-mapped files;
    they keep the mapping alive and stay valid after :meth:`close`. A tensor that is stored in another dtype than the model's is
    converted when it is read, and a quantized weight is dequantized: both are new memory, of that tensor alone.

    Parameters
    ----------
    path : Path
        The folder.
    config : ModelConfig
        The model that ``config.json`` describes.
    files : mapping of str to WeightFile
        The file that holds each tensor, by the name that the family has for it.
    quantized : mapping of str to StoredWeight or RoundedWeight, optional
        The weights that are quantized, or are rounded when they are read, by name.
    kv_dtype : str, optional
        Dtype of K and V for which the checkpoint has static scales.
    adapter : LoraAdapter, optional
        The adapter that is merged into weights when they are read.

    Attributes
    ----------
    path : Path
        The folder.
    config : ModelConfig
        The model that ``config.json`` describes.
    kv_dtype : str or None
        ``"float8_e4m3fn"`` or ``"int8"`` if there are static scales of K and V, see :meth:`kv_scales`; else None.
    adapter : LoraAdapter or None
        The merged adapter.
    draft_tokens : ndarray (num_logits,) int64, or None
        Token ids of the logits of an EAGLE-3 head, all different; None where logits are of all token ids.
    token_clusters : ndarray (clusters, n) int64, or None
        Token ids of each cluster of an assistant; None for other models, and without clusters.

    Examples
    --------
    >>> from trt_kvcache import Checkpoint
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     print(checkpoint.config.family, checkpoint.config.num_layers)
    ...     print(checkpoint.tensor("model.norm.weight").shape)
    llama 2
    (32,)
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        files: Mapping[str, WeightFile],
        quantized: Mapping[str, StoredWeight | RoundedWeight] | None = None,
        kv_dtype: str | None = None,
        adapter: LoraAdapter | None = None,
    ) -> None:
        self.path = path
        self.adapter = adapter
        self.kv_dtype = kv_dtype
        self.config = config
        self._shapes = tensor_shapes(config)
        self._exact = exact_tensors(config)
        self._quantized = quantized or {}
        self._merged = {} if adapter is None else merged_weights(adapter, config, files)
        self._files: Mapping[str, WeightFile] | None = files
        self.draft_tokens: npt.NDArray[np.int64] | None = None
        self.token_clusters: npt.NDArray[np.int64] | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, quantize: str | Quantization | None = None, adapter: str | os.PathLike[str] | None = None
    ) -> Checkpoint:
        """Open a model folder and check it.

        Parameters
        ----------
        path : path
            A folder with ``config.json`` and ``model.safetensors`` (or shards and their index), or one GGUF file in their place; or a
            GGUF file, whose metadata replaces ``config.json``.
        quantize : str or Quantization, optional
            Round weights to the nearest multiples of a scale when they are read, such as ``"int8"``, ``"int4"``, ``"int4:128"`` or
            ``"int4,head=int8"``: see ``docs/quantization.md``.
        adapter : path, optional
            A folder of PEFT with a LoRA adapter, which is merged into the weights in float32 when they are read: see ``docs/adapters.md``.

        Returns
        -------
        Checkpoint
            The weights are mapped into memory, not read.

        Raises
        ------
        CheckpointError
            The folder is incomplete, a file is damaged, or the model is not supported. The message names the file. Or its weights are
            quantized already, and ``quantize`` or ``adapter`` is given. Or the adapter is damaged, not supported, or for another model.
        ConfigError
            ``quantize`` is unknown, or does not fit the model.

        Warns
        -----
        UserWarning
            - Weights are stored in another floating-point dtype than ``config.json`` says, such as float32 norms in a bfloat16 model.
              They are converted when they are read, as in transformers. Norms and biases of a GGUF file are converted without a warning.
            - A quantized checkpoint quantizes activations too. This package does not.
            - There are GGUF files next to safetensors. They are not read.
        """
        return cls._open(Path(path), quantize, adapter, read_config, lambda family: family)

    @classmethod
    def open_mtp_head(cls, path: str | Path, *, quantize: str | Quantization | None = None) -> Checkpoint:
        """Open the multi-token prediction head in a model folder and check it.

        Parameters
        ----------
        path : path
            As for :meth:`open`.
        quantize : str or Quantization, optional
            As for :meth:`open`.

        Returns
        -------
        Checkpoint
            A model of one layer, or of one or two of Nemotron-H: ``mtp.layers.0`` is ``model.layers.0``, ``mtp.norm`` the final norm, and
            embedding and head are those of the model. Its :attr:`ModelConfig.merge_norm` is set, for ``mtp.fc`` and the norms of its input.

        Raises
        ------
        CheckpointError
            The folder has no MTP head or an incomplete one, or the family of the model has none that is supported. Or as for :meth:`open`.
        ConfigError
            As for :meth:`open`.

        Warns
        -----
        UserWarning
            As for :meth:`open`.
        """
        return cls._open(Path(path), quantize, None, read_mtp_config, Family.of_mtp_head)

    @classmethod
    def open_eagle3_head(cls, path: str | Path) -> Checkpoint:
        """Open the folder of an EAGLE-3 head and check it.

        Parameters
        ----------
        path : path
            A folder with ``config.json`` and ``model.safetensors`` (or shards and their index).

        Returns
        -------
        Checkpoint
            A model of one layer: ``midlayer`` is ``model.layers.0``. Its :attr:`ModelConfig.eagle3_input` says whether embedding and
            head are in the folder; ``draft_tokens`` are the token ids of its logits.

        Raises
        ------
        CheckpointError
            The folder has another head, such as one of EAGLE 1 or 2, or a variant of EAGLE-3 that is not supported. Or as for :meth:`open`.

        Warns
        -----
        UserWarning
            As for :meth:`open`.
        """
        return cls._open(Path(path), None, None, read_eagle3_config, lambda family: HEAD_FAMILY)

    @staticmethod
    def read_eagle3_config(path: str | Path) -> ModelConfig:
        """Return the EAGLE-3 head that ``config.json`` of a folder describes, without opening its weights.

        Parameters
        ----------
        path : path
            The folder.

        Returns
        -------
        ModelConfig
            As if embedding and head were in the folder.

        Raises
        ------
        CheckpointError
            There is no folder, or its ``config.json`` is damaged or not supported.
        """
        return _read_config(Path(path), read_eagle3_config)[0]

    @classmethod
    def open_assistant(cls, path: str | Path) -> Checkpoint:
        """Open the folder of an assistant and check it.

        Parameters
        ----------
        path : path
            A folder with ``config.json`` and ``model.safetensors`` (or shards and their index).

        Returns
        -------
        Checkpoint
            A model whose layers read K and V of another model: see :attr:`ModelConfig.assistant_input`. ``token_clusters`` are the token
            ids by cluster. Its embedding is its language model head alone.

        Raises
        ------
        CheckpointError
            The folder has another model, or an assistant that is not supported. Or as for :meth:`open`.

        Warns
        -----
        UserWarning
            As for :meth:`open`.
        """
        return cls._open(Path(path), None, None, read_assistant_config, lambda family: family)

    @staticmethod
    def read_assistant_config(path: str | Path) -> ModelConfig:
        """Return the assistant that ``config.json`` of a folder describes, without opening its weights.

        Parameters
        ----------
        path : path
            The folder.

        Returns
        -------
        ModelConfig
            As for :meth:`open_assistant`.

        Raises
        ------
        CheckpointError
            There is no folder, or its ``config.json`` is damaged or not supported.
        """
        return _read_config(Path(path), read_assistant_config)[0]

    @classmethod
    def _open(
        cls,
        folder: Path,
        quantize: str | Quantization | None,
        adapter: str | os.PathLike[str] | None,
        read: Callable[..., ModelConfig],
        names_of: Callable[[Family], Family],
    ) -> Checkpoint:
        """Open a model folder. ``names_of``: the family under whose names the tensors of a family are read."""
        rounding = None if quantize is None else Quantization.parse(quantize)
        config, data, format_, source = _read_config(folder, read)
        family = names_of(FAMILIES[config.family])
        files = split_experts(config, family_names(open_weight_files(folder, family), family, folder), folder)
        offsets = files.pop(TOKEN_OFFSETS, None) if config.eagle3_input is not None else None
        ordering = files.pop(TOKEN_ORDERING, None) if config.assistant_input is not None else None
        config = with_shared_tensors(config, files, folder)
        gguf = next((file for file in files.values() if isinstance(file, GGUFWeights)), None)
        if gguf is not None:
            format_ = GGUF((tensor.dtype for tensor in gguf.tensors.values()), gguf.dequantized.values())
        typed = next((name for name in (embedding_name(config), *(merge_names(config) or ())) if name in files), None)
        if not states_dtype(data) and typed is not None:
            config = _with_stored_dtype(config, typed, files[typed])
        quantized = {} if format_ is None else _quantized_weights(config, format_, files)
        _check(config, files, folder, format_, quantized, source.name)
        lora = None if adapter is None else LoraAdapter.open(adapter)
        if lora is not None:
            check_base(files, next((weight.quantized.title for weight in quantized.values()), None), folder)
            config, files = with_untied_head(lora, config, files)
        rounded = {} if rounding is None else rounded_weights(config, rounding, quantized)
        checkpoint = cls(folder, config, files, {**quantized, **rounded}, None if format_ is None else format_.kv_dtype, lora)
        checkpoint.draft_tokens = draft_tokens(config, offsets, folder)
        checkpoint.token_clusters = token_clusters(config, ordering, folder)
        if source.name == CONFIG_FILE:  # config.json states a dtype; the metadata of GGUF does not
            kept = quantized.keys() | exact_tensors(config)
            converted = [name for name in checkpoint.tensor_names if name not in kept]
            _warn_of_conversion(config, files, converted, folder)
        if format_ is not None and quantized and format_.notes:
            warn_caller(f"{folder}: weights are {format_.title}: {'; '.join(format_.notes)}.", UserWarning)
        if gguf is not None and gguf.dequantized:
            warn_caller(_dequantized(config, gguf), UserWarning)
        return checkpoint

    @staticmethod
    def read_config(path: str | Path) -> ModelConfig:
        """Return the model that ``config.json`` of a folder describes, without opening its weights.

        Parameters
        ----------
        path : path
            The folder.

        Returns
        -------
        ModelConfig
            Its dtype is float32 if only the weights tell the dtype, which are not read here.

        Raises
        ------
        CheckpointError
            There is no folder, or its ``config.json`` is damaged or not supported.
        """
        return _read_config(Path(path), read_config)[0]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the model's tensors, from the embedding to the head. A head that is tied to the embedding is not listed."""
        return tuple(self._shapes)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return one tensor, without copying it unless it must be converted.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        ndarray
            Read-only, in host memory, in the dtype of the model (bfloat16 through ml_dtypes); values of a quantized weight, and of one
            with a merged adapter, in float32, so that an engine rounds them once; those of routers of experts in their stored dtype.

        Raises
        ------
        CheckpointError
            The model has no such tensor, or it is stored in another dtype and holds values that the dtype of the model cannot.
        ClosedError
            The checkpoint is closed.
        """
        files = self._open_files()
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: expected the name of a tensor of the model, got {name!r}.")
        packed = self.quantized_weight(name)
        if packed is None:
            values_file = self._merged.get(name, files[name])
            return _array(values_file, name, self._value_dtype(name, {name: values_file}))
        values = packed.dequantized()
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.path}: expected finite values of {name}, got others. A scale may be damaged: fetch it again.")
        values.flags.writeable = False
        return values

    def _value_dtype(self, name: str, files: Mapping[str, WeightFile]) -> str:
        """Return the dtype in which :meth:`tensor` returns a tensor that is not quantized."""
        keeps_stored = files[name].keeps_stored_dtype or name in self._exact
        return files[name].tensors[name].dtype if keeps_stored else self.config.dtype

    def quantized_weight(self, name: str) -> QuantizedWeight | None:
        """Return a quantized weight as it is stored, over the memory of the files.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        QuantizedWeight or None
            None for a tensor that is stored as it is.

        Raises
        ------
        CheckpointError
            The stored tensors contradict ``config.json``.
        ClosedError
            The checkpoint is closed.
        """
        files = self._open_files()
        return self._quantized[name].read(ChainMap(self._merged, dict(files))) if name in self._quantized else None

    def unrounded(self, name: str) -> tuple[npt.NDArray[Any], str, str] | None:
        """Return the values of a weight that ``quantize`` rounds when it is read, so that a device can round them.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        tuple or None
            Values ``[out, in]``, over the memory of the files; scheme; dtype of the scales. None for a weight that is not rounded.

        Raises
        ------
        ClosedError
            The checkpoint is closed.
        """
        files, rounded = self._open_files(), self._quantized.get(name)
        if not isinstance(rounded, RoundedWeight):
            return None
        return rounded.unrounded(ChainMap(self._merged, dict(files))), rounded.quantized.scheme, rounded.quantized.dtype

    def super_blocks(self, name: str) -> SuperBlocks | None:
        """Return a matrix in Q4_K, Q5_K or Q6_K as a GGUF file stores it: :meth:`tensor` returns its values.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        SuperBlocks or None
            None for other formats, for a tensor that is rounded when it is read, or has a merged adapter, and for one whose values or
            columns change on the way from GGUF to transformers.

        Raises
        ------
        ClosedError
            The checkpoint is closed.
        """
        file = self._gguf_file(name)
        return None if file is None else file.super_blocks(name)

    def block_type(self, name: str) -> str | None:
        """Return the type of a matrix of which :meth:`super_blocks` or :meth:`offset_blocks` returns the blocks. No weights are read.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        str or None
            Such as ``"Q4_K"``; None where both methods return None.

        Raises
        ------
        ClosedError
            The checkpoint is closed.
        """
        file = self._gguf_file(name)
        return None if file is None else file.block_type(name)

    def offset_blocks(self, name: str) -> OffsetBlocks | None:
        """Return a matrix in Q4_1, Q5_0 or Q5_1 as a GGUF file stores it: :meth:`tensor` returns its values.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Returns
        -------
        OffsetBlocks or None
            None for other formats, and where :meth:`super_blocks` returns None.

        Raises
        ------
        ClosedError
            The checkpoint is closed.
        """
        file = self._gguf_file(name)
        return None if file is None else file.offset_blocks(name)

    def _gguf_file(self, name: str) -> GGUFWeights | None:
        """Return the GGUF file of a tensor that is neither quantized otherwise, nor rounded, nor has a merged adapter."""
        file = self._open_files().get(name)
        return file if isinstance(file, GGUFWeights) and name not in self._quantized and name not in self._merged else None

    def kv_scales(self) -> tuple[LayerScales, ...]:
        """Return the static scales of K and V: real value = stored value * scale.

        Returns
        -------
        tuple of pair
            For each attention layer the scale of K and the scale of V: a number, or a tuple with one for each K/V head. Empty if the
            checkpoint has none.

        Raises
        ------
        CheckpointError
            Some layers have none, or a scale is not a finite number above 0, or not one for each head.
        ClosedError
            The checkpoint is closed.
        """
        files = self._open_files()
        return () if self.kv_dtype is None else read_kv_scales(self.config, files, self.path)

    def release(self, name: str) -> None:
        """Let the operating system drop the pages of a tensor from memory. A later access reads the file again.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.

        Raises
        ------
        ClosedError
            The checkpoint is closed.
        """
        files = self._open_files()
        for part in self._quantized[name].tensor_names if name in self._quantized else (name,):
            files[part].release(part)

    def nbytes_of(self, name: str) -> int:
        """Return the size of one tensor in bytes: of a quantized weight as stored, of other tensors in the dtype of the model.

        Parameters
        ----------
        name : str
            One of :attr:`tensor_names`.
        """
        if name in self._quantized:
            return self._quantized[name].nbytes(self._open_files())
        files = self._open_files()
        if name in self._exact and name in files:  # a config.json alone has sizes too
            return files[name].tensors[name].nbytes
        return math.prod(self._shapes[name]) * itemsize(self.config.dtype)

    @property
    def quantized_names(self) -> tuple[str, ...]:
        """Names of the quantized tensors, a subset of :attr:`tensor_names`."""
        return tuple(name for name in self._shapes if name in self._quantized)

    @property
    def value_kinds(self) -> frozenset[str]:
        """Kinds of its quantized values, such as ``"int4"`` and ``"e4m3"``. Empty without quantized weights."""
        files = self._open_files()
        return frozenset(weight.value_kind(files) for weight in self._quantized.values())

    def names_of_kind(self, kind: str) -> tuple[str, ...]:
        """Return the names of the tensors with one kind of quantized value, such as ``"int4"``.

        Parameters
        ----------
        kind : str
            Such as ``"e2m1"``.
        """
        files = self._open_files()
        return tuple(name for name in self.quantized_names if self._quantized[name].value_kind(files) == kind)

    @property
    def nbytes(self) -> int:
        """Size of the model's weights in bytes: quantized ones as stored, others in the dtype of the model."""
        self._open_files()
        return sum(self.nbytes_of(name) for name in self._shapes)

    @property
    def weights(self) -> WeightsSummary:
        """Storage format of the weights, and their size."""
        in_gguf = {name: file for name in self._shapes if (file := self._gguf_file(name)) is not None}
        types = {name: kind for name, file in in_gguf.items() if (kind := file.super_block_type(name)) is not None}
        formats = {weight.quantized.title for weight in self._quantized.values()}
        if types and not formats:
            formats = {f"GGUF {' and '.join(sorted(set(types.values())))}"}
        sizes = {name: in_gguf[name].tensors[name].nbytes if name in types else self.nbytes_of(name) for name in self._shapes}
        nbytes = sum(sizes.values())
        unread = sum(sizes[name] for name in looked_up_tensors(self.config))
        return WeightsSummary(
            format=" and ".join(sorted(formats)) if formats else self.config.dtype,
            is_quantized=bool(formats),
            nbytes=nbytes,
            step_nbytes=nbytes - unread,
            experts_nbytes=sum(map(self.nbytes_of, expert_tensors(self.config))),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that a copy of the model needs: configuration, weights, tokenizer and templates."""
        weights = {path for file in self._open_files().values() for path in file.paths}
        has_index = self.path / SINGLE_FILE not in weights and any(file.suffix == ".safetensors" for file in weights)
        index = (self.path / INDEX_FILE,) if has_index else ()
        companions = (self.path / name for name in COMPANION_FILES)
        config = self.path / CONFIG_FILE
        return (*((config,) if config.is_file() else ()), *index, *sorted(weights), *(file for file in companions if file.is_file()))

    def fingerprint(self, progress: Callable[[int, int], object] | None = None) -> str:
        """Return a hash of the model, equal for equal models wherever the folder is and however it is sharded.

        Parameters
        ----------
        progress : callable, optional
            Called as ``progress(done_bytes, total_bytes)`` while the weights are read; in the last call both are equal.

        Returns
        -------
        str
            SHA-256 in hex over the configuration, the names, dtypes and shapes of the tensors, and their bytes. Of a quantized weight it
            covers the packed tensors, and how they are read; of a merged adapter its own tensors and factors.

        Raises
        ------
        CheckpointError
            As for :meth:`tensor`.
        ClosedError
            The checkpoint is closed.
        """
        files = self._open_files()
        names = sorted(self._shapes)
        index = [(name, self._how_stored(name, files), self._shapes[name]) for name in names]
        adapters = [] if self.adapter is None else [self.adapter.fingerprint()]  # of A and B, whose products differ from CPU to CPU
        digest = hashlib.sha256(json.dumps([self.config.to_description(), index, *adapters], sort_keys=True).encode())
        done, total = 0, sum(self._content_nbytes(name, files) for name in names)
        for content in (content for name in names for content in self._contents(name, files)):
            for start in range(0, content.size, _HASH_CHUNK_BYTES):
                chunk = content[start : start + _HASH_CHUNK_BYTES]
                digest.update(chunk.data)
                done += chunk.size
                if progress is not None:
                    progress(done, total)
        return digest.hexdigest()

    def _how_stored(self, name: str, files: Mapping[str, WeightFile]) -> Any:
        """Return the description of a tensor's bytes for the fingerprint: format, or dtype and shape."""
        if name not in self._quantized:
            return self._value_dtype(name, files)
        weight = self._quantized[name]
        tensors = [(part, files[part].tensors[part]) for part in weight.tensor_names]
        return [weight.quantized.describe(), [(part, tensor.dtype, tensor.shape) for part, tensor in tensors]]

    def _contents(self, name: str, files: Mapping[str, WeightFile]) -> Iterator[npt.NDArray[np.uint8]]:
        """Return the bytes of a tensor, or of all stored tensors of a quantized weight."""
        if name not in self._quantized:
            yield _bytes(_array(files[name], name, self._value_dtype(name, files)))
        else:
            yield from (_bytes(files[part].array(part)) for part in self._quantized[name].tensor_names)
            self.release(name)  # engines keep it packed

    def _content_nbytes(self, name: str, files: Mapping[str, WeightFile]) -> int:
        """Return the number of bytes that :meth:`_contents` returns."""
        if name not in self._quantized:
            return math.prod(self._shapes[name]) * itemsize(self._value_dtype(name, files))
        return sum(files[part].tensors[part].nbytes for part in self._quantized[name].tensor_names)

    def close(self) -> None:
        """Release the files. Arrays that were returned before stay valid. Closing twice is allowed."""
        self._files = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_files(self) -> Mapping[str, WeightFile]:
        if self._files is None:
            raise ClosedError(f"checkpoint {self.path} is closed.")
        return self._files


def _read_config(folder: Path, read: Callable[..., ModelConfig]) -> tuple[ModelConfig, Mapping[str, Any], QuantizedFormat | None, Path]:
    """Return the model, the parsed ``config.json``, the quantized format, and the source file."""
    files = ModelFiles(folder)
    data = files.json(CONFIG_FILE)
    path = files.source(CONFIG_FILE)
    try:
        return read(data, default_dtype="float32"), data, quantized_format(data, folder), path
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _dequantized(config: ModelConfig, gguf: GGUFWeights) -> str:
    kinds, of_kernels = sorted(set(gguf.dequantized.values())), ", ".join((*SUPER_BLOCK_NBYTES, *MIDDLES))
    return (
        f"{gguf.path}: {len(gguf.dequantized)} tensor(s) in {' and '.join(kinds)} are dequantized when they are read, to "
        f"{config.dtype} or the dtype that is asked for, unless PyTorch on a GPU, or a plugin layer of TensorRT (experts, "
        f"and with --packed-kernels others), keeps them packed ({of_kernels}). "
        "TensorRT engines keep Q8_0, Q4_0 and MXFP4 packed, and so does PyTorch on a GPU."
    )


def _with_stored_dtype(config: ModelConfig, name: str, file: WeightFile) -> ModelConfig:
    stored = file.tensors[name].dtype
    if stored not in MODEL_DTYPES:
        raise CheckpointError(
            f"{file.path}: expected weights in one of {', '.join(MODEL_DTYPES)}, got {name} in {stored}. "
            "Convert the checkpoint, or use one that is not quantized."
        )
    return replace(config, dtype=stored)


def _quantized_weights(config: ModelConfig, format_: QuantizedFormat, files: Mapping[str, WeightFile]) -> dict[str, StoredWeight]:
    """Return the quantized weights by name, after checking their tensors."""
    found = {name: stored_weight(format_, name, shape, files) for name, shape in tensor_shapes(config).items()}
    return {name: weight for name, weight in found.items() if weight is not None}


def _check(
    config: ModelConfig,
    files: Mapping[str, WeightFile],
    folder: Path,
    format_: QuantizedFormat | None,
    quantized: Mapping[str, StoredWeight],
    source: str,
) -> None:
    """Compare the tensors that the configuration requires with those in the files, before anything uses either."""
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name not in quantized}
    missing = [name for name in shapes if name not in files]
    if config.merge_norm is not None and not any(name.startswith(DRAFT_HEADS) for name in files):
        raise CheckpointError(f"{folder}: expected an MTP head, tensors whose names begin with {DRAFT_HEADS!r}, got none.")
    if missing:
        hint = " If the head is the embedding, config.json must say `tie_word_embeddings: true`." if missing == [HEAD] else ""
        if format_ is not None and missing[0].endswith(".weight"):
            hint += f" As {format_.title}, it would be there with .{format_.main_part(missing[0].removesuffix('.weight'))} in its place."
        elif f"{missing[0].removesuffix('.weight')}.qweight" in files:
            hint += f" They are quantized, and {source} has no `quantization_config`: it may be in a file of its own."
        raise CheckpointError(f"{folder}: {len(missing)} tensor(s) of a {config.family} model are missing: {_some(missing)}.{hint}")
    for name, shape in shapes.items():
        stored = files[name].tensors[name]
        if stored.shape != shape:
            raise CheckpointError(f"{files[name].path}: expected {name} of shape {shape} by {source}, got {stored.shape}.")
        if stored.dtype not in MODEL_DTYPES:
            raise CheckpointError(
                f"{files[name].path}: expected every tensor in {', '.join(MODEL_DTYPES)}, got {name} in {stored.dtype}. "
                "Quantized weights are read where `quantization_config` says how."
            )
    tied_head = config.tie_word_embeddings and HEAD in files
    used = {*shapes, *(name for weight in quantized.values() for name in weight.tensor_names), *((HEAD,) if tied_head else ())}
    ignored = (_IGNORED_SUFFIX, *(() if format_ is None else format_.ignored))
    left = [name for name in files if name not in used and not name.endswith(ignored) and not name.startswith(unread_prefixes(config))]
    extra = sorted(name for name in left if not _is_empty_bias(name, files, quantized))
    if extra:
        raise CheckpointError(
            f"{files[extra[0]].path}: {len(extra)} tensor(s) that a {config.family} model by {source} does not use: {_some(extra)}. "
            "Leaving them out would run another model."
        )
    if tied_head:
        _check_tied_head(config, files)


def _is_empty_bias(name: str, files: Mapping[str, WeightFile], quantized: Mapping[str, StoredWeight]) -> bool:
    """Return True for the zero bias that AutoGPTQ stores for modules that have none."""
    if not name.endswith(".bias") or f"{name.removesuffix('.bias')}.weight" not in quantized:
        return False
    file = files[name]
    return file.tensors[name].dtype in MODEL_DTYPES and not file.array(name).astype(np.float32).any()


def _check_tied_head(config: ModelConfig, files: Mapping[str, WeightFile]) -> None:
    name = embedding_name(config)
    head, embedding = files[HEAD].tensors[HEAD], files[name].tensors[name]
    same = head.shape == embedding.shape and head.dtype in MODEL_DTYPES
    if same:
        arrays = [_bytes(_array(files[tied], tied, config.dtype)) for tied in (HEAD, name)]
        same = np.array_equal(arrays[0], arrays[1])
    if not same:
        raise CheckpointError(f"{files[HEAD].path}: {CONFIG_FILE} says `tie_word_embeddings`, but {HEAD} differs from {name}.")


def _warn_of_conversion(config: ModelConfig, files: Mapping[str, WeightFile], names: Iterable[str], folder: Path) -> None:
    converted = [name for name in names if files[name].tensors[name].dtype != config.dtype and not _is_usual_in_gguf(files[name], name)]
    if converted:
        stored = sorted({files[name].tensors[name].dtype for name in converted})
        warn_caller(
            f"{folder}: {len(converted)} tensor(s) are stored in {' and '.join(stored)} and are converted to {config.dtype}, "
            f"the dtype of the model by {CONFIG_FILE}: {_some(converted)}.",
            UserWarning,
        )


def _is_usual_in_gguf(file: WeightFile, name: str) -> bool:
    """Return True for tensors that GGUF files have in float32 whatever the dtype of the model: norms, biases, and dequantized ones."""
    return isinstance(file, GGUFWeights) and (len(file.tensors[name].shape) != 2 or name in file.dequantized)


def _array(file: WeightFile, name: str, dtype: str) -> npt.NDArray[Any]:
    """Return a tensor in ``dtype``, as a view of the file if it is stored in that."""
    stored = file.array(name)
    if stored.dtype == numpy_dtype(dtype):
        return stored
    with np.errstate(over="ignore"):
        converted = stored.astype(numpy_dtype(dtype))
    if not np.isfinite(converted).all():
        raise CheckpointError(
            f"{file.path}: {name} is stored in {dtype_name(stored.dtype)} and has values that {dtype}, the dtype of the model by "
            f"{CONFIG_FILE}, cannot hold."
        )
    converted.flags.writeable = False
    return converted


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
