"""Weights of the layers with updates of adapters, of which each row takes those of its own adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet, SideUpdate
from trt_kvcache.model import ModelConfig
from trt_kvcache.reference.weights import DecoderLayerWeights, DecoderWeights, Float32, Projection

#: Updates of a layer by role.
LayerUpdates = Mapping[str, SideUpdate]


def load_updates(adapters: AdapterSet, model: ModelConfig, dtype: str) -> tuple[LayerUpdates, ...]:
    """Return the updates of each layer as float32, rounded to ``dtype``."""
    return tuple(
        {role: update.rounded(dtype).rounded("float32") for role, update in adapters.layer_updates(model, index).items()}
        for index in range(model.num_layers)
    )


@dataclass(frozen=True)
class AdaptedProjection(Projection):
    """A linear map with an update, for rows with the adapters of these ``numbers [n]``."""

    update: SideUpdate
    numbers: npt.NDArray[np.int32]

    def change(self, rows: Float32) -> Float32:
        """Return the update of the product of ``rows [n, in]``: exactly 0 for rows without an adapter."""
        own = self.numbers[:, None] == np.asarray(self.update.owners)
        changed: Float32 = np.where(own, rows @ self.update.a.T, np.float32(0)) @ self.update.b.T
        return changed


@dataclass(frozen=True)
class AdaptedLayerWeights(DecoderLayerWeights):
    """Weights of a layer in a step, some of them with updates."""

    updates: LayerUpdates
    numbers: npt.NDArray[np.int32]

    def projection(self, name: str) -> Projection:
        """Return a linear map that the layer has."""
        found, update = super().projection(name), self.updates.get(f"{name}.weight")
        return found if update is None else AdaptedProjection(found.weight, found.bias, update, self.numbers)


def adapted(weights: DecoderWeights, updates: Sequence[LayerUpdates], slots: npt.NDArray[np.int32], width: int) -> DecoderWeights:
    """Return the weights of a step of ``width`` tokens in slots with the adapters of these numbers."""
    numbers = np.repeat(slots, width)
    layers = (AdaptedLayerWeights(layer.parts, of_layer, numbers) for layer, of_layer in zip(weights.layers, updates, strict=True))
    return replace(weights, layers=tuple(layers))
