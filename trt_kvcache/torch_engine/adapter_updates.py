"""``AdapterUpdate``: updates of a linear map by adapters, as tensors on the engine's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.model import ModelConfig
from trt_kvcache.torch_engine.upload import Upload

#: Ranks are padded to a multiple of this, which products of 16 bits on a GPU need to be fast.
RANK_MULTIPLE = 8

#: Owner of a rank that pads, and that no token has.
_NOBODY = -1


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """The sum of a linear map with ``b @ a``, of which a token takes the ranks of its adapter. ``owners``: the adapter of each rank."""

    a: torch.Tensor  # [ranks, in]
    b: torch.Tensor  # [out, ranks]
    owners: tuple[int, ...]
    owners_on_device: torch.Tensor  # int32 [ranks]

    def others(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return bool ``[A, 1, ranks]``, True for ranks of other adapters than those of the slots, by number int32 ``[A]``."""
        return (numbers[:, None] != self.owners_on_device)[:, None]

    def add(self, out: torch.Tensor, x: torch.Tensor, others: torch.Tensor) -> None:
        """Add the update of the product of ``x`` ``[A, s, in]`` to ``out`` ``[A, s, out]``: exactly 0 for slots without an adapter."""
        ranks = F.linear(x, self.a).masked_fill_(others, 0)
        out.view(-1, out.shape[-1]).addmm_(ranks.flatten(0, 1), self.b.t())

    def with_outputs(self, order: torch.Tensor) -> AdapterUpdate:
        """Return the update of a map with its outputs in another order."""
        return replace(self, b=self.b[order])

    def with_inputs(self, order: torch.Tensor) -> AdapterUpdate:
        """Return the update of a map with its inputs in another order."""
        return replace(self, a=self.a[:, order])


#: Function of the index of a layer: its updates by role.
LoadUpdates = Callable[[int], Mapping[str, AdapterUpdate]]


def updates_of(adapters: AdapterSet, model: ModelConfig, dtype: str, device: torch.device) -> LoadUpdates:
    """Return a function that reads the updates of a layer."""
    upload = Upload(device)

    def load(index: int) -> dict[str, AdapterUpdate]:
        rounded = {role: update.rounded(dtype) for role, update in adapters.layer_updates(model, index).items()}
        return {role: _update(upload(one.a), upload(one.b), one.owners) for role, one in rounded.items()}

    return load


def fused_updates(updates: Sequence[AdapterUpdate | None], outputs: Sequence[int]) -> AdapterUpdate | None:
    """Return updates of maps of the same input as one of the concatenated outputs; None without any."""
    given = [update for update in updates if update is not None]
    if len(updates) == 1 or not given:
        return updates[0]
    b = given[0].b.new_zeros((sum(outputs), sum(len(update.owners) for update in given)))
    row = column = 0
    for update, count in zip(updates, outputs, strict=True):
        if update is not None:
            b[row : row + count, column : column + len(update.owners)] = update.b
            column += len(update.owners)
        row += count
    return _update(torch.cat([update.a for update in given]), b, tuple(owner for update in given for owner in update.owners))


def _update(a: torch.Tensor, b: torch.Tensor, owners: tuple[int, ...]) -> AdapterUpdate:
    """Return an update with padded ranks."""
    padding = -len(owners) % RANK_MULTIPLE
    padded = (*owners, *(_NOBODY,) * padding)
    on_device = torch.tensor(padded, dtype=torch.int32, device=a.device)
    return AdapterUpdate(a=F.pad(a, (0, 0, 0, padding)), b=F.pad(b, (0, padding)), owners=padded, owners_on_device=on_device)
