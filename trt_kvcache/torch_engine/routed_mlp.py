"""``RoutedMlp``: experts, their router, and a shared expert, as a part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_kvcache.model import RoutedMlpConfig
from trt_kvcache.torch_engine.fused_projections import fused
from trt_kvcache.torch_engine.mlp import Mlp
from trt_kvcache.torch_engine.operations import Experts, Operations, RouterWeights, TorchProjection
from trt_kvcache.torch_engine.stored_weights import StoredWeights


@dataclass(frozen=True, kw_only=True)
class RoutedMlp:
    """An MLP of experts. ``latent``: projections of their input and of their sum; ``shared``: the expert of all tokens, and its gate."""

    config: RoutedMlpConfig
    router: RouterWeights
    latent: tuple[TorchProjection, TorchProjection] | None
    experts: Experts
    shared: Mlp | None
    shared_gate: TorchProjection | None

    @property
    def outputs(self) -> int:
        """Outputs of the widest products of one token: with all experts, as steps of few tokens may compute them unless they are packed."""
        widths: list[int] = [*self.experts.inputs.shape[1:]]
        router = self.config.router
        return (router.experts_per_token if self.experts.is_packed else router.num_experts) * max(widths)

    @classmethod
    def of(cls, config: RoutedMlpConfig, stored: StoredWeights) -> RoutedMlp:
        """Return the MLP with stored weights."""
        names = ("gate", "up") if config.expert.gated else ("up",)
        inputs_names, down_names = tuple(f"expert_{name}" for name in names), ("expert_down",)
        inputs, down = stored.stacks(inputs_names, down_names)
        inputs_bias, down_bias = stored.stacked(inputs_names, ".bias"), stored.stacked(down_names, ".bias")
        return cls(
            config=config,
            router=RouterWeights(weight=stored["router.weight"], bias=stored.get("router.bias"), choice_bias=stored.get("choice_bias")),
            latent=None if config.latent_size is None else (fused(stored, "latent_in"), fused(stored, "latent_out")),
            experts=Experts(config=config.expert, inputs=inputs, inputs_bias=inputs_bias, down=down, down_bias=down_bias),
            shared=None if config.shared is None else Mlp.of(config.shared, stored, "shared_"),
            shared_gate=stored.matrix("shared_expert_gate") if config.shared_gate else None,
        )

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the output."""
        rows = normed.flatten(0, 1)
        project = operations.projections.project
        experts, weights = operations.router(self.config.router, self.router, rows)
        taken = rows if self.latent is None else project(self.latent[0], normed).flatten(0, 1)
        mixed = operations.experts(taken, experts, weights, self.experts).unflatten(0, normed.shape[:2])
        if self.latent is not None:
            mixed = project(self.latent[1], mixed)
        if self.shared is None:
            return mixed
        shared = self.shared(normed, operations)
        return mixed + (shared if self.shared_gate is None else shared * project(self.shared_gate, normed).sigmoid())
