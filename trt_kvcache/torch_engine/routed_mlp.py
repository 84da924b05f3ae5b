"""``RoutedMlp``: experts, their router, and a shared expert, as a part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_kvcache.model import RoutedMlpConfig
from trt_kvcache.torch_engine.mlp import Mlp
from trt_kvcache.torch_engine.operations import Experts, Operations, TorchProjection
from trt_kvcache.torch_engine.router import route
from trt_kvcache.torch_engine.stored_weights import StoredWeights


@dataclass(frozen=True, kw_only=True)
class RoutedMlp:
    """An MLP of experts. ``shared``: the expert of all tokens, and ``shared_gate`` its gate, or None."""

    config: RoutedMlpConfig
    router: TorchProjection
    choice_bias: torch.Tensor | None
    experts: Experts
    shared: Mlp | None
    shared_gate: TorchProjection | None

    @property
    def outputs(self) -> int:
        """Outputs of the widest products with the experts of a token."""
        widths: list[int] = [*self.experts.inputs.shape[1:]]
        return self.config.router.experts_per_token * max(widths)

    @classmethod
    def of(cls, config: RoutedMlpConfig, stored: StoredWeights) -> RoutedMlp:
        """Return the MLP with stored weights."""
        names = ("gate", "up") if config.expert.gated else ("up",)
        inputs, inputs_bias = stored.stacked(*(f"expert_{name}" for name in names))
        down, down_bias = stored.stacked("expert_down")
        bias = stored.get("choice_bias")
        return cls(
            config=config,
            router=stored.matrix("router"),
            choice_bias=None if bias is None else bias.float(),
            experts=Experts(config=config.expert, inputs=inputs, inputs_bias=inputs_bias, down=down, down_bias=down_bias),
            shared=None if config.shared is None else Mlp.of(config.shared, stored, "shared_"),
            shared_gate=stored.matrix("shared_expert_gate") if config.shared_gate else None,
        )

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the output."""
        rows = normed.flatten(0, 1)
        experts, weights = route(self.config.router, self._logits(rows, operations), self.choice_bias)
        outputs = operations.experts(rows, experts, self.experts)
        mixed = (outputs.float() * weights[:, :, None]).sum(dim=1).to(rows.dtype).view(normed.shape)
        if self.shared is None:
            return mixed
        shared = self.shared(normed, operations)
        return mixed + (shared if self.shared_gate is None else shared * operations.projections.project(self.shared_gate, normed).sigmoid())

    def _logits(self, rows: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the router's logits in float32: not rounded to 16 bits, which would change the choice of experts."""
        logits = rows.new_empty((len(rows), self.config.router.num_experts), dtype=torch.float32)
        operations.projections.write_logits(rows, self.router.weight, logits)
        return logits if self.router.bias is None else logits + self.router.bias.float()
