"""``AdapterInputs``: inputs of an engine for adapters, which are exchanged without a build, and of which each slot has its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet, SideUpdate
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.errors import ConfigError, KVCacheError
from trt_kvcache.memory.shapes import MAX_DIMENSION, align_up, dense_nbytes
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import EXACT_ROLES, WeightPart, layer_parts, split_role

#: Input int32 ``[slots]``: number of the adapter of each slot of an enqueue, from 1 on; 0 for none.
SLOT_ADAPTERS = "slot_adapters"

#: Input int32 ``[rank]``: number of the adapter of each rank; :data:`NOBODY` for a rank that pads.
RANK_ADAPTERS = "rank_adapters"

#: Ranks are padded to a multiple of this, which products of 16 bits need to be fast.
_RANK_MULTIPLE = 8

#: Owner of a rank that no slot has.
NOBODY = -1


def update_names(layer: int, role: str) -> tuple[str, str]:
    """Return the names of A ``[1, rank, in]`` and B ``[1, out, rank]`` of a linear layer, by its role, such as ``"q"``."""
    return f"lora_a_{role}_{layer}", f"lora_b_{role}_{layer}"


@dataclass(frozen=True, kw_only=True)
class AdapterInputs:
    """Ranks of all adapters together, and the linear layers that they may change, by the ends of their names: ``"q_proj"``."""

    rank: int
    modules: tuple[str, ...]

    @classmethod
    def of(
        cls, model: ModelConfig, *, rank: int, modules: Sequence[str] | None = None, error: type[KVCacheError] = ConfigError
    ) -> AdapterInputs:
        """Return the inputs for some linear layers of a model, in the model's order; for all of them if ``modules`` is None."""
        int_in_range("adapters_rank", rank, 1, MAX_DIMENSION, error=error)
        known = dict.fromkeys(_module(part) for layer in range(model.num_layers) for part in _linear_parts(model, layer).values())
        wanted = known if modules is None else modules
        for one in wanted:
            if one not in known:
                raise error(f"adapters_modules: expected some of {', '.join(known)}, got {short_repr(one)}.")
        return cls(rank=rank, modules=tuple(one for one in known if one in wanted))

    def roles(self, model: ModelConfig, layer: int) -> dict[str, WeightPart]:
        """Return the weights of a layer that adapters may change, by role, such as ``"q"``."""
        return {role: part for role, part in _linear_parts(model, layer).items() if _module(part) in self.modules}

    def tensors(self, model: ModelConfig, *, slots: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Return the inputs. ``slots``: most slots of an enqueue."""
        specs = [TensorSpec.input(SLOT_ADAPTERS, (slots,), "int32"), TensorSpec.input(RANK_ADAPTERS, (self.rank,), "int32")]
        for layer in range(model.num_layers):
            for role, part in self.roles(model, layer).items():
                (a, b), (outputs, inputs) = update_names(layer, role), part.shape
                specs += [TensorSpec.input(a, (1, self.rank, inputs), dtype), TensorSpec.input(b, (1, outputs, self.rank), dtype)]
        return tuple(specs)

    def nbytes(self, model: ModelConfig, dtype: str) -> int:
        """Return the bytes of A and B of all linear layers."""
        return sum(dense_nbytes(spec.shape, spec.dtype) for spec in self.tensors(model, slots=0, dtype=dtype)[2:])

    def owners(self, adapters: AdapterSet) -> tuple[int, ...]:
        """Return the number of the adapter of each rank. Raises ConfigError for more ranks, or for updates of other linear layers."""
        ranks = adapters.ranks
        if sum(ranks.values()) > self.rank:
            got = " + ".join(map(str, ranks.values()))
            raise ConfigError(
                f"adapters: expected ranks of {self.rank} in all, for which the engine was built (adapters_rank), got {got} "
                f"({', '.join(ranks)})."
            )
        for name in ranks:
            for module in adapters.changed(name):
                if module.rpartition(".")[2] not in self.modules:
                    raise ConfigError(
                        f"adapters[{name!r}]: expected updates of {', '.join(self.modules)}, for which the engine was built "
                        f"(adapters_modules), got {module}."
                    )
        owners = [number for number, rank in enumerate(ranks.values(), start=1) for _ in range(rank)]
        return (*owners, *(NOBODY,) * (self.rank - len(owners)))


def padded_rank(rank: int) -> int:
    """Return the ranks that an engine has for this number of ranks of adapters."""
    return align_up(rank, _RANK_MULTIPLE)


def spread_update(update: SideUpdate | None, shape: tuple[int, ...], owners: Sequence[int]) -> SideUpdate:
    """Return an update of a matrix of a shape with the ranks of each adapter at its places in ``owners``, and zeros at the others."""
    outputs, inputs = shape
    a, b = np.zeros((len(owners), inputs), np.float32), np.zeros((outputs, len(owners)), np.float32)
    if update is not None:
        first = {number: owners.index(number) for number in dict.fromkeys(update.owners)}
        before = [update.owners[:rank].count(number) for rank, number in enumerate(update.owners)]
        places = [first[number] + count for number, count in zip(update.owners, before, strict=True)]
        a[places], b[:, places] = update.a, update.b
    return SideUpdate(a=a, b=b, owners=tuple(owners))


def most_slots(profiles: Sequence[EngineProfile]) -> int:
    """Return the most slots of an enqueue."""
    return max(profile.max_batch for profile in profiles)


def _linear_parts(model: ModelConfig, layer: int) -> dict[str, WeightPart]:
    """Return the weights of the linear layers of a layer by role, but for those of a router and of experts."""
    found = {}
    for role, part in layer_parts(model, layer).items():
        name, expert, kind = split_role(role)
        if kind == ".weight" and len(part.shape) == 2 and not expert and role not in EXACT_ROLES:
            found[name] = part
    return found


def _module(part: WeightPart) -> str:
    """Return the end of the name of a module, as ``target_modules`` of PEFT has it."""
    return part.tensor.removesuffix(".weight").rpartition(".")[2]
