"""``AdapterBuffers``: device tensors of the inputs for adapters of an engine, which it binds itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.engine.adapter_inputs import RANK_ADAPTERS, SLOT_ADAPTERS, AdapterInputs, spread_update, update_names
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine.slot_adapters import SlotAdapters
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.model import ModelConfig
from trt_kvcache.trt.engine_resources import EngineResources


class AdapterBuffers:
    """The updates of adapters as ``specs`` say, uploaded once, and the adapter of each slot.

    Without adapters, all inputs are one tensor of zeros: every slot has adapter 0, whose update is 0.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        inputs: AdapterInputs,
        model: ModelConfig,
        adapters: AdapterSet | None,
        *,
        dtype: str,
        resources: EngineResources,
        stream: Any,
    ) -> None:
        #: Device addresses of the inputs, by name.
        self.addresses: dict[str, int] = {}
        #: The adapters of the slots of the next enqueue; None without adapters.
        self.slot_adapters: SlotAdapters | None = None
        if adapters is None:
            largest = max(dense_nbytes(spec.shape, spec.dtype) for spec in specs)
            zeros = resources.allocate(largest, stream=stream, zeroed=True)
            self.addresses = {spec.name: zeros.ptr for spec in specs}
            return
        owners = inputs.owners(adapters)
        [slots] = next(spec.shape for spec in specs if spec.name == SLOT_ADAPTERS)
        self.slot_adapters = SlotAdapters(resources.memory, adapters, max_slots=slots, dtype=dtype)
        resources.callback(self.slot_adapters.close)
        self.addresses[SLOT_ADAPTERS] = self.slot_adapters.table.ptr
        for name, array in _arrays(inputs, model, adapters, owners, dtype):
            tensor = resources.memory.to_device(array, stream=stream)
            resources.callback(tensor.allocation.close)
            self.addresses[name] = tensor.ptr


def _arrays(
    inputs: AdapterInputs, model: ModelConfig, adapters: AdapterSet, owners: tuple[int, ...], dtype: str
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the inputs, without the slots, by name: zeros for linear layers that no adapter changes."""
    yield RANK_ADAPTERS, np.array(owners, np.int32)
    for layer in range(model.num_layers):
        updates = adapters.layer_updates(model, layer)
        for role, part in inputs.roles(model, layer).items():
            update = spread_update(updates.get(f"{role}.weight"), part.shape, owners).rounded(dtype)
            yield from zip(update_names(layer, role), (update.a[None], update.b[None]), strict=True)
