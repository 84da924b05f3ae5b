"""``AdapterUpdate``: updates of a linear map by adapters, as tensors on the engine's device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.kernels.adapter_kernels import RANK_GRANULE
from trt_kvcache.model import ModelConfig
from trt_kvcache.torch_engine.upload import Upload


class UpdatedOutputs(NamedTuple):
    """Some outputs of a linear map, and the ranks that update them by ``b`` ``[outputs, ranks]``."""

    outputs: slice
    ranks: slice
    b: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """The sum of a linear map with ``b @ a``, of which a token takes the ranks of its adapter. ``owners``: the adapter of each rank."""

    # The ranks of an adapter are padded to a multiple of 8, by zeros. Tensors are as in kernels.adapter_kernels.UpdateTensors.
    a: torch.Tensor  # [ranks, in]
    products: tuple[UpdatedOutputs, ...]  # views of b
    owners: tuple[int, ...]
    owners_on_device: torch.Tensor
    b: torch.Tensor
    parts: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, products: Sequence[UpdatedOutputs], owners: tuple[int, ...], num_adapters: int) -> AdapterUpdate:
        """Return updates of some outputs each, by ranks of their own."""
        b, first, views, parts, starts = torch.cat([one.b.flatten() for one in products]), 0, [], [], []
        for one in products:
            outputs, ranks = one.b.shape
            views.append(one._replace(b=b[first : first + one.b.numel()].view(outputs, ranks)))
            parts.append((one.outputs.start, outputs, first, ranks))
            counts = Counter(owners[one.ranks])
            starts.append([*accumulate((counts[number] for number in range(num_adapters + 1)), initial=one.ranks.start)])
            first += one.b.numel()
        owned, places, begins = (
            torch.tensor(values, dtype=dtype, device=a.device)
            for values, dtype in ((owners, torch.int32), (parts, torch.int64), (starts, torch.int32))
        )
        return cls(a=a, products=tuple(views), owners=owners, owners_on_device=owned, b=b, parts=places, starts=begins)

    @property
    def num_adapters(self) -> int:
        """Number of adapters of the session."""
        return int(self.starts.shape[1]) - 2

    @property
    def max_outputs(self) -> int:
        """Largest number of outputs of a product."""
        return max(len(product.b) for product in self.products)

    def others(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return bool ``[A, 1, ranks]``, True for ranks of other adapters than those of the slots, by number int32 ``[A]``."""
        return (numbers[:, None] != self.owners_on_device)[:, None]

    def add(self, out: torch.Tensor, x: torch.Tensor, others: torch.Tensor) -> None:
        """Add the update of the product of ``x`` ``[A, s, in]`` to ``out`` ``[A, s, out]``: exactly 0 for slots without an adapter."""
        ranks, rows = F.linear(x, self.a).masked_fill_(others, 0).flatten(0, 1), out.view(-1, out.shape[-1])
        for product in self.products:
            rows[:, product.outputs].addmm_(ranks[:, product.ranks], product.b.t())

    def with_outputs(self, order: torch.Tensor) -> AdapterUpdate:
        """Return the update of a map, which is not fused, with its outputs in another order."""
        [product] = self.products
        return AdapterUpdate.of(self.a, [product._replace(b=product.b[order])], self.owners, self.num_adapters)

    def with_inputs(self, order: torch.Tensor) -> AdapterUpdate:
        """Return the update of a map with its inputs in another order."""
        return replace(self, a=self.a[:, order])


#: Function of the index of a layer: its updates by role.
LoadUpdates = Callable[[int], Mapping[str, AdapterUpdate]]


def updates_of(adapters: AdapterSet, model: ModelConfig, dtype: str, device: torch.device) -> LoadUpdates:
    """Return a function that reads the updates of a layer."""
    upload, count = Upload(device), len(adapters.names)

    def load(index: int) -> dict[str, AdapterUpdate]:
        rounded = {role: update.rounded(dtype) for role, update in adapters.layer_updates(model, index).items()}
        return {role: _update(upload(one.a), upload(one.b), one.owners, count) for role, one in rounded.items()}

    return load


def fused_updates(updates: Sequence[AdapterUpdate | None], outputs: Sequence[int]) -> AdapterUpdate | None:
    """Return updates of maps of the same input as one of the concatenated outputs; None without any."""
    given = [update for update in updates if update is not None]
    if len(updates) == 1 or not given:
        return updates[0]
    products, first_output, first_rank = [], 0, 0
    for update, count in zip(updates, outputs, strict=True):
        if update is not None:
            [product] = update.products
            width = len(update.owners)
            products.append(UpdatedOutputs(slice(first_output, first_output + count), slice(first_rank, first_rank + width), product.b))
            first_rank += width
        first_output += count
    owners = tuple(owner for update in given for owner in update.owners)
    return AdapterUpdate.of(torch.cat([update.a for update in given]), products, owners, given[0].num_adapters)


def _update(a: torch.Tensor, b: torch.Tensor, owners: tuple[int, ...], num_adapters: int) -> AdapterUpdate:
    """Return an update, with the ranks of each adapter padded."""
    padded: list[int] = []
    places: list[int] = []
    for owner, count in Counter(owners).items():
        places += range(len(padded), len(padded) + count)
        padded += [owner] * (count + -count % RANK_GRANULE)
    wide_a, wide_b = a.new_zeros((len(padded), a.shape[1])), b.new_zeros((len(b), len(padded)))
    wide_a[places], wide_b[:, places] = a, b
    return AdapterUpdate.of(wide_a, [UpdatedOutputs(slice(0, len(b)), slice(0, len(padded)), wide_b)], tuple(padded), num_adapters)
