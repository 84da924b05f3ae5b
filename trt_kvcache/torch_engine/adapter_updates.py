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

#: Bytes of zeros that one product of fused maps may read, in place of a launch for each map. An H100 reads 4 MiB in 1.3 us.
MAX_ZEROS_NBYTES = 4 << 20

#: Owner of a rank that pads, and that no token has.
_NOBODY = -1


@dataclass(frozen=True, kw_only=True)
class UpdatedOutputs:
    """Some outputs of a linear map, and the ranks that update them by ``b`` ``[outputs, ranks]``."""

    outputs: slice
    ranks: slice
    b: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """The sum of a linear map with ``b @ a``, of which a token takes the ranks of its adapter. ``owners``: the adapter of each rank."""

    a: torch.Tensor  # [ranks, in]
    products: tuple[UpdatedOutputs, ...]
    owners: tuple[int, ...]
    owners_on_device: torch.Tensor  # int32 [ranks]

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
        return replace(self, products=(replace(product, b=product.b[order]),))

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
    products, first_output, first_rank = [], 0, 0
    for update, count in zip(updates, outputs, strict=True):
        if update is not None:
            [product] = update.products
            width = len(update.owners)
            places = slice(first_output, first_output + count), slice(first_rank, first_rank + width)
            products.append(UpdatedOutputs(outputs=places[0], ranks=places[1], b=product.b))
            first_rank += width
        first_output += count
    owners, b = tuple(owner for update in given for owner in update.owners), given[0].products[0].b
    zeros = first_output * first_rank - sum(product.b.numel() for product in products)
    if zeros * b.element_size() <= MAX_ZEROS_NBYTES:
        whole = b.new_zeros((first_output, first_rank))
        for product in products:
            whole[product.outputs, product.ranks] = product.b
        products = [UpdatedOutputs(outputs=slice(None), ranks=slice(None), b=whole)]
    return AdapterUpdate(
        a=torch.cat([update.a for update in given]),
        products=tuple(products),
        owners=owners,
        owners_on_device=torch.cat([update.owners_on_device for update in given]),
    )


def _update(a: torch.Tensor, b: torch.Tensor, owners: tuple[int, ...]) -> AdapterUpdate:
    """Return an update with padded ranks."""
    padding = -len(owners) % RANK_MULTIPLE
    padded = (*owners, *(_NOBODY,) * padding)
    return AdapterUpdate(
        a=F.pad(a, (0, 0, 0, padding)),
        products=(UpdatedOutputs(outputs=slice(None), ranks=slice(None), b=F.pad(b, (0, padding))),),
        owners=padded,
        owners_on_device=torch.tensor(padded, dtype=torch.int32, device=a.device),
    )
