"""Operations of a decoder layer in one step, with variants for a CPU, a GPU, and a GPU with kernels of this package.

Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.model import ClampedSwiGLU, MlpConfig, RouterConfig
from trt_kvcache.model.mlp_config import Activation
from trt_kvcache.torch_engine.adapter_updates import AdapterUpdate
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix, PackedParts
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack
from trt_kvcache.torch_engine.row_lookup import LookUp

#: A matrix ``[out, in]``.
TorchMatrix: TypeAlias = torch.Tensor | PackedMatrix | PackedParts

#: Function of the index of the attention layer, q, k and v of the new tokens ``[A, s, Hq + 2 * H, D]``, before RoPE, which it may
#: overwrite, and attention sinks float32 ``[Hq]`` or None; returns ``[A, s, Hq, D]``. A layer that reads K and V of another one has q
#: alone.
TorchAttention = Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]

#: Function of the index of an attention layer that applies RoPE before the norms of q and k, and q, k and v of the new tokens; returns
#: them after RoPE.
TorchRotation = Callable[[int, torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class TorchProjection:
    """A linear map: ``weight [out, in]``, ``bias [out]`` or None, and updates of adapters or None."""

    weight: TorchMatrix
    bias: torch.Tensor | None
    update: AdapterUpdate | None = None

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.weight) if isinstance(self.weight, torch.Tensor) else self.weight.outputs


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A depthwise short convolution: ``weight [channels, K]``, the last column for the token itself; ``bias [channels]`` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """Parameters of Mamba-2's state space, float32 ``[heads]``; ``dt_limits``: smallest and largest time step."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DeltaGates:
    """Parameters of the delta rule's gates, float32 ``[heads]``; ``decay`` (negative) multiplies ``softplus(a + dt_bias)``."""

    decay: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The weights of all experts of a layer: ``inputs`` ``[E, width, hidden]``, with the rows of gate, if there is one, then of up, and
    ``down`` ``[E, hidden, intermediate]``, both packed or neither; biases ``[E, out]`` or None.
    """

    config: MlpConfig
    inputs: MatrixStack
    inputs_bias: torch.Tensor | None
    down: MatrixStack
    down_bias: torch.Tensor | None

    @property
    def is_packed(self) -> bool:
        """True if the weights are packed."""
        return isinstance(self.inputs, PackedStack)

    def of(self, expert: int) -> tuple[TorchProjection, TorchProjection]:
        """Return the projections of one expert: into it, and out of it."""
        inputs_bias, down_bias = (None if bias is None else bias[expert] for bias in (self.inputs_bias, self.down_bias))
        return TorchProjection(self.inputs[expert], inputs_bias), TorchProjection(self.down[expert], down_bias)


@dataclass(frozen=True, kw_only=True)
class RouterWeights:
    """Weights of a router in float32: ``weight`` ``[E, hidden]``, times the scale of its normalised input if there is one; ``bias``,
    ``choice_bias`` and ``expert_scale`` ``[E]`` or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    expert_scale: torch.Tensor | None = None


class HeadCounts(NamedTuple):
    """Query heads and K/V heads of a layer."""

    query: int
    kv: int


class Elementwise:
    """Elementwise operations between matrix products, by torch."""

    def add_norm(
        self,
        hidden: torch.Tensor,
        change: torch.Tensor,
        norm: TorchNorm | None,
        change_norm: TorchNorm | None,
        factor: float,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``scale * (hidden + factor * change_norm(change))`` ``[A, s, hidden]``, and its norm. ``hidden`` is no longer needed.

        ``scale``: ``[1]``, or None for 1.
        """
        hidden = hidden + scaled(normalised(change, change_norm), factor)
        if scale is not None:
            hidden = hidden * scale
        return hidden, normalised(hidden, norm)

    def norm_heads(
        self, qkv: torch.Tensor, heads: HeadCounts, q_norm: TorchNorm | None, k_norm: TorchNorm | None, v_epsilon: float | None
    ) -> torch.Tensor:
        """Return ``qkv`` ``[A, s, Hq + 2 * H, D]``, which may be overwritten, with norms of q, k and v; with H = 0, of q alone.

        A norm of q or k covers one head or all of them, by its number of weights. That of v covers one, without a weight; None is no norm.
        """
        if not heads.kv:
            return _norm_of_heads(qkv, q_norm)
        q, k, v = qkv.split((*heads, heads.kv), dim=2)
        if v_epsilon is not None:
            v = F.rms_norm(v.float(), v.shape[3:], None, v_epsilon).to(v.dtype)
        return torch.cat((_norm_of_heads(q, q_norm), _norm_of_heads(k, k_norm), v), dim=2)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return ``activation(gate) * up`` of ``[A, s, 2 * intermediate]``, or clamped SwiGLU of both."""
        gate, up = gate_up.chunk(2, dim=-1)
        if isinstance(activation, ClampedSwiGLU):
            return _clamped_swiglu(activation, gate, up)
        return ACTIVATIONS[activation](gate) * up

    def activated_mul(self, gate: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * factor`` of two tensors ``[A, s, n]``, of which ``gate`` is dense. The activation is rounded."""
        return ACTIVATIONS[activation](gate) * factor

    def inner(self, inputs: torch.Tensor, config: MlpConfig) -> torch.Tensor:
        """Return the inner activations of an MLP, from its products with gate, if there is one, and up."""
        if config.gated:
            return self.gated(inputs, config.activation)
        assert isinstance(config.activation, str)
        return ACTIVATIONS[config.activation](inputs)


class Projections:
    """Matrix products with weights, by operations of torch. ``elementwise``: their epilogues."""

    def __init__(self, elementwise: Elementwise) -> None:
        self._elementwise = elementwise

    def project(self, projection: TorchProjection, x: torch.Tensor) -> torch.Tensor:
        """Return a linear map of ``x`` ``[A, s, in]``."""
        return F.linear(x, dense(projection.weight), projection.bias)

    def activated(self, inputs: TorchProjection, x: torch.Tensor, config: MlpConfig) -> torch.Tensor:
        """Return the inner activations of an MLP. ``inputs``: the rows of gate, if there is one, then of up."""
        return self._elementwise.inner(self.project(inputs, x), config)

    def write_logits(self, rows: torch.Tensor, head: TorchMatrix, logits: torch.Tensor) -> None:
        """Write the products of ``rows`` ``[n, hidden]`` and ``head`` ``[vocab, hidden]`` into ``logits`` float32 ``[n, vocab]``."""
        write_product(rows, dense(head), logits)


class StateOperations(Protocol):
    """Operations of recurrent mixers over the bound states of a step; ``layer`` counts the recurrent layers.

    Tokens past the new ones of a slot are padding: their outputs are zeros. A slot without new tokens keeps its states bit for bit.
    """

    def convolve(
        self,
        layer: int,
        x: torch.Tensor,
        conv: Convolution,
        *,
        silu: bool = False,
        gate_in: torch.Tensor | None = None,
        gate_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``gate_out * conv(gate_in * x)`` of ``x`` ``[A, s, channels]``."""

    def scan(self, layer: int, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, space: StateSpace) -> torch.Tensor:
        """Return the state space's output for ``x`` ``[A, s, heads, head_dim]``.

        ``dt`` is ``[A, s, heads]``, ``b`` and ``c`` are ``[A, s, groups, state_size]``.
        """

    def delta_rule(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
    ) -> torch.Tensor:
        """Return the gated delta rule's output for ``v`` ``[A, s, heads, value_dim]``.

        ``q`` and ``k`` are ``[A, s, key_heads, key_dim]``, ``a`` and ``b`` ``[A, s, heads]``.
        """

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, group_size: int, gate_first: bool, eps: float
    ) -> torch.Tensor:
        """Return the norm of column groups of ``x`` ``[A, s, columns]``, times the SiLU of a gate before or after it."""


class Router(Protocol):
    """The choice of the experts of each row, which is normalised already where a router needs it, with their weights."""

    def __call__(self, router: RouterConfig, weights: RouterWeights, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each row ``[n, hidden]``, int32 or int64 ``[n, k]``, and their weights float32 ``[n, k]``.

        All is computed in float32. Of equal scores, the expert with the lower number is chosen.
        """


class ExpertProducts(Protocol):
    """Products of rows with the experts that a router has chosen for them."""

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Return the sums ``[n, hidden]`` of the outputs of the experts ``chosen`` ``[n, k]`` for ``rows`` ``[n, hidden]``, times
        ``weights`` float32 ``[n, k]``.
        """


@dataclass(frozen=True, kw_only=True)
class Operations:
    """All operations of a decoder's layers in one step, and the inputs that all layers have in common."""

    rotation: TorchRotation
    attention: TorchAttention
    states: StateOperations
    elementwise: Elementwise
    projections: Projections
    router: Router
    experts: ExpertProducts
    look_up: LookUp
    per_layer_inputs: torch.Tensor | None = None  # [layers, A, s, size] of a step, from the per-layer embedding


def dense(matrix: TorchMatrix) -> torch.Tensor:
    """Return a matrix as a tensor."""
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized()


def write_product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``rows @ weight.T`` into ``out``, of the dtype of ``rows`` or float32."""
    if rows.dtype == out.dtype:
        torch.mm(rows, weight.t(), out=out)
    elif out.is_cuda:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
    else:
        out.copy_(F.linear(rows, weight))


def normalised(x: torch.Tensor, norm: TorchNorm | None) -> torch.Tensor:
    """Return the norm of ``x``, or ``x`` itself without a norm."""
    return x if norm is None else norm(x)


def _clamped_swiglu(config: ClampedSwiGLU, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)``, after both are clamped."""
    gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    return gate * torch.sigmoid(config.alpha * gate) * (up + 1)


def _norm_of_heads(heads: torch.Tensor, norm: TorchNorm | None) -> torch.Tensor:
    """Return the norm, if there is one, of ``[A, s, n, D]`` over a head or over all of them, by the number of weights."""
    return heads if norm is None else norm(heads.flatten(2).unflatten(2, (-1, len(norm.weight)))).view(heads.shape)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x * factor``: ``x`` itself for a factor of 1."""
    return x if factor == 1 else x * factor
