"""``AdapterSet``: several adapters of one model, whose updates are computed next to the products with the base weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.adapters.changed_weights import changed_weights
from trt_kvcache.checkpoint.adapters.lora_adapter import LoraAdapter, LowRankUpdate, adapter_folder
from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.errors import CheckpointError, ConfigError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import HEAD, PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, embedding_name
from trt_kvcache.model.weight_parts import WeightPart, exact_tensors, expert_tensors, layer_parts

#: Highest rank of an update of one adapter.
MAX_RANK = 64

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

_MERGE = "adapter= merges it into the weights: one adapter for the session."


def adapter_folders(folders: object) -> dict[str, str]:
    """Return the folders of adapters by name, as an option gives them. Raises ConfigError."""
    if not isinstance(folders, Mapping):
        raise ConfigError(f"adapters: expected folders of PEFT by name, got {short_repr(folders)}.")
    for name in folders:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"adapters: expected names of letters, digits, '_', '.' and '-', 64 at most, got {short_repr(name)}.")
    return {name: adapter_folder(path) for name, path in folders.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class SideUpdate:
    """Updates of a matrix ``[out, in]`` by several adapters: the sum with ``b @ a``, of which a token takes the ranks of its adapter.

    The scales are in ``b``.
    """

    a: npt.NDArray[Any]  # [ranks, in]
    b: npt.NDArray[Any]  # [out, ranks]
    owners: tuple[int, ...]  # number of the adapter of each rank, from 1 on

    def rounded(self, dtype: str) -> SideUpdate:
        """Return the updates in a dtype. Raises CheckpointError for values that it cannot hold."""
        with np.errstate(over="ignore"):
            arrays = [side.astype(numpy_dtype(dtype)) for side in (self.a, self.b)]
        if not all(np.isfinite(side.astype(np.float32)).all() for side in arrays):
            raise CheckpointError(f"adapters: expected values that {dtype} can hold, got larger ones. Choose another dtype.")
        return replace(self, a=arrays[0], b=arrays[1])


class AdapterSet:
    """LoRA adapters by name. Number 0 is the base model, without an adapter; the first adapter has number 1."""

    def __init__(self, model: ModelConfig, adapters: Mapping[str, LoraAdapter]) -> None:
        self.names = tuple(adapters)
        self._adapters = adapters
        #: :meth:`LoraAdapter.fingerprint` of each adapter.
        self.fingerprints = {name: adapter.fingerprint() for name, adapter in adapters.items()}
        self._updates = {name: _updates(name, adapter, model) for name, adapter in adapters.items()}

    @classmethod
    def open(cls, model: ModelConfig, folders: Mapping[str, str | os.PathLike[str]]) -> AdapterSet:
        """Read adapters of a model. Raises CheckpointError for a damaged one, one of another model, and what only a merge supports."""
        return cls(model, {name: LoraAdapter.open(folder) for name, folder in folders.items()})

    def folder(self, name: str) -> Path:
        """Return the folder of an adapter."""
        return self._adapters[name].path

    @property
    def ranks(self) -> dict[str, int]:
        """Highest rank of the updates of each adapter, by name."""
        return {name: max(len(update.right) for update in updates.values()) for name, updates in self._updates.items()}

    def changed(self, name: str) -> tuple[str, ...]:
        """Return the modules that an adapter changes, by their names in the family."""
        return tuple(weight.removesuffix(".weight") for weight in self._updates[name])

    @property
    def modules(self) -> tuple[str, ...]:
        """Name suffixes of the modules that the adapters change, such as ``"q_proj"``, as in PEFT's ``target_modules``."""
        return tuple(dict.fromkeys(module.rpartition(".")[2] for name in self.names for module in self.changed(name)))

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of all updates in a dtype, without those that an engine adds to lay them out."""
        updates = (update for updates in self._updates.values() for update in updates.values())
        return itemsize(dtype) * sum(sum(update.shape) * len(update.right) for update in updates)

    def layer_updates(self, model: ModelConfig, index: int) -> dict[str, SideUpdate]:
        """Return the updates of a layer's weights in float32, by the roles of :func:`~trt_kvcache.model.weight_parts.layer_parts`."""
        found = {}
        for role, part in layer_parts(model, index).items():
            of_part = [
                (number, updates[part.tensor]) for number, updates in enumerate(self._updates.values(), start=1) if part.tensor in updates
            ]
            if of_part:
                found[role] = _side_update(part, of_part)
        return found


def _side_update(part: WeightPart, updates: list[tuple[int, LowRankUpdate]]) -> SideUpdate:
    """Return updates of a tensor, by the number of their adapter, as one of some of its rows."""
    left = [update.left.astype(np.float32)[part.index] * np.float32(update.scale) for _, update in updates]
    return SideUpdate(
        a=np.concatenate([update.right.astype(np.float32) for _, update in updates]),
        b=np.concatenate(left, axis=1),
        owners=tuple(number for number, update in updates for _ in range(len(update.right))),
    )


def _updates(name: str, adapter: LoraAdapter, model: ModelConfig) -> dict[str, LowRankUpdate]:
    """Return the updates of an adapter by the names of the weights in the family, after checking that they can stay out of the weights."""
    label, family = f"adapters[{name!r}]: {adapter.path}", FAMILIES[model.family]
    whole = next(iter(sorted(adapter.replaced)), None)
    if whole is not None:
        raise CheckpointError(f"{label}: expected updates of linear layers, got {whole} in full (modules_to_save, bias). {_MERGE}")
    others = dict.fromkeys(exact_tensors(model), "a router of experts") | dict.fromkeys(expert_tensors(model), "an expert")
    others |= dict.fromkeys((PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION), "a per-layer embedding")
    others |= {embedding_name(model): "the embedding", HEAD: "the language model head"}
    for module, update in adapter.updates.items():
        weight, got = family.own_name(f"{module}.weight"), None
        if weight in others:
            got = f"{module}, {others[weight]}"
        elif update.magnitude is not None:
            got = f"DoRA (use_dora) of {module}"
        elif len(update.right) > MAX_RANK:
            got = f"rank {len(update.right)} of {module}"
        if got is not None:
            raise CheckpointError(
                f"{label}: expected updates of rank {MAX_RANK} or less, of linear layers of attention, recurrent mixers and MLPs, "
                f"got {got}. {_MERGE}"
            )
    return {weight: adapter.updates[stored.removesuffix(".weight")] for weight, stored in changed_weights(adapter, model).items()}
