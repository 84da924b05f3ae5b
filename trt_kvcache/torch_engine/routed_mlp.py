"""``RoutedMlp``: experts, their router, and a shared expert, as a part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.model import RoutedMlpConfig
from trt_kvcache.torch_engine.fused_projections import fused
from trt_kvcache.torch_engine.mlp import Mlp
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.operations import Experts, Operations, RouterWeights, TorchProjection, normalised
from trt_kvcache.torch_engine.stored_weights import StoredWeights
from trt_kvcache.torch_engine.tiled_experts import fits_tiles


@dataclass(frozen=True)
class BranchNorms:
    """Norms of the input and of the output of the experts, or of the shared expert; None for none."""

    before: TorchNorm | None
    after: TorchNorm | None

    @classmethod
    def of(cls, config: RoutedMlpConfig, stored: StoredWeights, branch: str) -> BranchNorms:
        """Return the norms of a branch with stored weights. ``branch``: beginning of their names."""
        weights = [stored.norm(f"{branch}_norm"), stored.norm(f"{branch}_output_norm")]
        return cls(*(None if one is None or config.branch_norm is None else TorchNorm.of(config.branch_norm, one) for one in weights))


@dataclass(frozen=True, kw_only=True)
class RoutedMlp:
    """An MLP of experts. ``latent``: projections of their input and of their sum; ``shared``: the expert of all tokens, and its gate."""

    config: RoutedMlpConfig
    router: RouterWeights
    latent: tuple[TorchProjection, TorchProjection] | None
    experts: Experts
    experts_norms: BranchNorms
    shared: Mlp | None
    shared_norms: BranchNorms
    shared_gate: TorchProjection | None

    @property
    def outputs(self) -> int:
        """Outputs of the widest products of one token: with all experts, as steps of few tokens may compute them without our kernels."""
        widths: list[int] = [*self.experts.inputs.shape[1:]]
        router = self.config.router
        has_few = self.experts.is_packed or fits_tiles(self.experts)
        return (router.experts_per_token if has_few else router.num_experts) * max(widths)

    @classmethod
    def of(cls, config: RoutedMlpConfig, stored: StoredWeights) -> RoutedMlp:
        """Return the MLP with stored weights."""
        names = ("gate", "up") if config.expert.gated else ("up",)
        inputs_names, down_names = tuple(f"expert_{name}" for name in names), ("expert_down",)
        inputs, down = stored.stacks(inputs_names, down_names)
        inputs_bias, down_bias = stored.stacked(inputs_names, ".bias"), stored.stacked(down_names, ".bias")
        return cls(
            config=config,
            router=_router(config, stored),
            latent=None if config.latent_size is None else (fused(stored, "latent_in"), fused(stored, "latent_out")),
            experts=Experts(config=config.expert, inputs=inputs, inputs_bias=inputs_bias, down=down, down_bias=down_bias),
            experts_norms=BranchNorms.of(config, stored, "experts"),
            shared=None if config.shared is None else Mlp.of(config.shared, stored, "shared_"),
            shared_norms=BranchNorms.of(config, stored, "shared"),
            shared_gate=stored.matrix("shared_expert_gate") if config.shared_gate else None,
        )

    def __call__(self, hidden: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the output."""
        experts, weights = operations.router(self.config.router, self.router, self._router_rows(hidden))
        mixed = self._of_experts(normalised(hidden, self.experts_norms.before), experts, weights, operations)
        mixed = normalised(mixed, self.experts_norms.after)
        if self.shared is None:
            return mixed
        shared = normalised(self.shared(normalised(hidden, self.shared_norms.before), operations), self.shared_norms.after)
        return mixed + (shared if self.shared_gate is None else shared * operations.projections.project(self.shared_gate, hidden).sigmoid())

    def _router_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input ``[n, hidden]`` of the router, whose scale is a factor of its weights."""
        epsilon, rows = self.config.router.norm_epsilon, hidden.flatten(0, 1)
        return rows if epsilon is None else F.rms_norm(rows, rows.shape[1:], None, epsilon)

    def _of_experts(self, normed: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the weighted sums ``[A, s, hidden]`` of the chosen experts."""
        project = operations.projections.project
        taken = normed if self.latent is None else project(self.latent[0], normed)
        mixed = operations.experts(taken.flatten(0, 1), chosen, weights, self.experts).unflatten(0, normed.shape[:2])
        return mixed if self.latent is None else project(self.latent[1], mixed)


def _router(config: RoutedMlpConfig, stored: StoredWeights) -> RouterWeights:
    """Return the weights of a router. The scale of its input is multiplied into them, in float32."""
    weight = stored["router.weight"]
    if config.router.norm_epsilon is not None:
        weight = weight * (stored["router_scale"] * weight.shape[1] ** -0.5)
    optional = {name: stored.get(name) for name in ("choice_bias", "expert_scale")}
    return RouterWeights(weight=weight, bias=stored.get("router.bias"), **optional)
