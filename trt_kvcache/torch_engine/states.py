"""Recurrent mixers by operations of torch, on any device. Shapes: A slots, s new tokens per slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.torch_engine.operations import Convolution, DeltaGates, StateSpace
from trt_kvcache.torch_engine.scans import gated_delta_rule, mamba2_scan
from trt_kvcache.torch_engine.step import TorchStep


class TorchStates:
    """Implements :class:`~trt_kvcache.torch_engine.operations.StateOperations`. Everything is computed in float32."""

    def __init__(self, step: TorchStep) -> None:
        self._states = step.states
        width, counts = step.input_ids.shape[1], step.new_lengths
        self._counts = self._is_new = None  # [A] and [A, s], unless all tokens are new
        if counts is not None and (counts.is_cuda or bool((counts != width).any())):
            self._counts = counts.clamp(0, width)
            self._is_new = torch.arange(width, device=counts.device) < counts[:, None]

    def convolved(
        self,
        layer: int,
        x: torch.Tensor,
        conv: Convolution,
        *,
        silu: bool = False,
        gate_in: torch.Tensor | None = None,
        gate_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.convolved`."""
        past, present = self._states[layer][StateKind.CONV]
        width, kernel = x.shape[1], past.shape[2]
        inputs = torch.cat((past.mT, x if gate_in is None else x * gate_in), dim=1)  # [A, K + s, channels]
        self._write(present, past, self._last(inputs, kernel).mT)
        wide, columns = inputs.float(), conv.weight.float().t().contiguous()
        sums = wide[:, kernel:] * columns[-1]
        for index, column in enumerate(columns[:-1], start=1):
            sums.addcmul_(wide[:, index : index + width], column)
        if conv.bias is not None:
            sums += conv.bias
        if silu:
            sums = F.silu(sums, inplace=True)
        if gate_out is not None:
            sums *= gate_out
        return self._new_only(sums).to(x.dtype)

    def scanned(self, layer: int, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, space: StateSpace) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.scanned`."""
        past, present = self._states[layer][StateKind.RECURRENT]
        steps = self._new_only(F.softplus(dt + space.dt_bias).clamp_(*space.dt_limits))
        wide, b, c = (self._new_only(part.float()) for part in (x, b, c))
        out, state = mamba2_scan(wide * steps.unsqueeze(-1), steps * space.a, b, c, past.float())
        self._write(present, past, state)
        return self._new_only(out.addcmul_(wide, space.d.unsqueeze(-1))).to(x.dtype)

    def ruled(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
    ) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.ruled`."""
        past, present = self._states[layer][StateKind.RECURRENT]
        log_decays = self._new_only(F.softplus(a + gates.dt_bias) * gates.decay)
        strengths = self._new_only(b.float().sigmoid())
        queries, keys, values = (self._new_only(part.float()) for part in (q, k, v))
        out, state = gated_delta_rule(queries, keys, values, log_decays, strengths, past.float())
        self._write(present, past, state)
        return self._new_only(out).to(v.dtype)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, group_size: int, gate_first: bool, eps: float
    ) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.gated_norm`."""
        values, factor = x.float(), F.silu(gate.float())
        if gate_first:
            values = values * factor
        normed = F.rms_norm(values.unflatten(2, (-1, group_size)), (group_size,), eps=eps)
        normed = (normed * weight.float().view(-1, group_size)).flatten(2)
        return self._new_only(normed if gate_first else normed * factor).to(x.dtype)

    def _last(self, inputs: torch.Tensor, kernel: int) -> torch.Tensor:
        """Return the last K of the inputs ``[A, K + s, channels]`` up to the last new token of each slot."""
        if self._counts is None:
            return inputs[:, -kernel:]
        index = self._counts[:, None] + torch.arange(kernel, device=inputs.device)
        return inputs.gather(1, index.long().unsqueeze(-1).expand(-1, -1, inputs.shape[2]))

    def _new_only(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` ``[A, s, ...]`` with zeros after the new tokens."""
        return x if self._is_new is None else x.masked_fill(~_unsqueezed(self._is_new, x.ndim), 0)

    def _write(self, present: torch.Tensor, past: torch.Tensor, state: torch.Tensor) -> None:
        """Write a state ``[A, ...]``; slots without new tokens keep their state bit for bit."""
        if self._is_new is not None:
            state = torch.where(_unsqueezed(self._is_new[:, 0], past.ndim), state.to(past.dtype), past)
        present.copy_(state)


def _unsqueezed(x: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return ``x`` with trailing dimensions of size 1."""
    return x.view(*x.shape, *[1] * (ndim - x.ndim))
