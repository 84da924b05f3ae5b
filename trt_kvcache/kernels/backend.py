"""What both backends of the kernels offer, and which backend a memory uses. The caller has checked all arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trt_kvcache.kernels import host
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_workspace import AttentionWorkspace
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan
from trt_kvcache.kernels.layer_infos import KVLayerInfos
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams, DeltaRuleParams, GatedNormParams, Mamba2Params
from trt_kvcache.kernels.sampling_rows import SamplingRows
from trt_kvcache.kernels.sampling_workspace import SamplingWorkspace
from trt_kvcache.kernels.state_infos import StateInfos
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor


class Backend(Protocol):
    """The kernels for one kind of memory: ``kernels.host`` (NumPy) or ``kernels.cuda`` (``plugins/``).

    Every method is ordered on ``stream`` and neither waits nor allocates.
    """

    def attend(self, params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
        """Apply RoPE to q and k, append k and v to the cache, and compute attention."""

    def choose_tokens(
        self, logits: DeviceTensor, rows: SamplingRows, tokens: DeviceTensor, workspace: SamplingWorkspace, stream: Any
    ) -> None:
        """Choose a token for each row of logits, and advance the rows."""

    def token_logprobs(
        self, logits: DeviceTensor, rows: SamplingRows, out: DeviceTensor, workspace: SamplingWorkspace, stream: Any
    ) -> None:
        """Compute log-probabilities of the tokens that were chosen, and of the most likely ones."""

    def set_row(self, rows: SamplingRows, row: int, words: Sequence[int], stream: Any) -> None:
        """Store the parameters of a row: eight words of 64 bits."""

    def count_tokens(self, uses: DeviceTensor, tokens: DeviceTensor, in_prompt: bool, more: int, stream: Any) -> None:
        """Mark tokens as those of a prompt, or add to the uses of each."""

    def set_bias(self, bias: DeviceTensor, tokens: DeviceTensor, values: DeviceTensor, stream: Any) -> None:
        """Store the bias of tokens."""

    def embed(self, table: DeviceTensor, ids: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
        """Gather rows of a table ``[vocab, hidden]`` by ids ``[B, s]``; zeros for an id that is out of range."""

    def add_rms_norm(
        self,
        hidden: DeviceTensor,
        change: DeviceTensor,
        weight: DeviceTensor | None,
        out: DeviceTensor | None,
        eps: float,
        weight_offset: float,
        change_weight: DeviceTensor | None,
        change_factor: float,
        stream: Any,
    ) -> None:
        """Add rows to the residual stream, and norm the sum."""

    def qk_rms_norm(
        self,
        qkv: DeviceTensor,
        q_weight: DeviceTensor,
        k_weight: DeviceTensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        weight_offset: float,
        stream: Any,
    ) -> None:
        """Norm q and k in place: their heads, or all heads of a row."""

    def gated_mul(self, activation: str, gate_up: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
        """Multiply the activation (``silu``, ``gelu_tanh``) of the first half of each row with its second half."""

    def linear(
        self,
        x: DeviceTensor,
        weight: DeviceTensor,
        bias: DeviceTensor | None,
        out: DeviceTensor,
        stream: Any,
    ) -> None:
        """Multiply a few rows with a matrix of weights."""

    def linear_gated_mul(
        self, activation: str, x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any
    ) -> None:
        """The same, and what :meth:`gated_mul` does."""

    def causal_conv1d(self, params: CausalConv1dParams, stream: Any) -> None:
        """Convolve the new tokens of each slot, and move its conv state on."""

    def mamba2_scan(self, params: Mamba2Params, stream: Any) -> None:
        """Run the new tokens of each slot through the state space of Mamba-2."""

    def gated_delta_rule(self, params: DeltaRuleParams, stream: Any) -> None:
        """Run the new tokens of each slot through the gated delta rule."""

    def gated_rms_norm(self, params: GatedNormParams, stream: Any) -> None:
        """Norm groups of columns of the new tokens, with a gate before or after."""

    def increment_scalar(self, lengths: DeviceTensor, increment: int, stream: Any) -> None:
        """Add the same number to all lengths."""

    def increment_tensor(self, lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
        """Add a number to each length."""

    def store_values(self, lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
        """Store the values, or with ``accumulate`` add them."""

    def copy_layer(self, destination: DeviceTensor, source: DeviceTensor, tokens: int, stream: Any) -> None:
        """Copy the first tokens of K and V from one view ``[2, H, n, D]`` to another."""

    def save_layers(self, cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
        """Copy the first rows of a slot of all layers into saved tensors."""

    def instantiate_layers(self, cache: KVLayerInfos, saved: KVLayerInfos, slot: int, rows: int, stream: Any) -> None:
        """Copy the first rows of saved tensors into a slot of all layers."""

    def compact_layers(self, layers: KVLayerInfos, plan: AnyCompactionPlan, stream: Any) -> None:
        """Move the live tokens of the slots of all layers."""

    def compact_rows(self, states: StateInfos, plan: AnyCompactionPlan, stream: Any) -> None:
        """Move the states of the slots of all layers."""

    def compact_lengths(self, lengths: DeviceTensor, plan: AnyCompactionPlan, stream: Any) -> None:
        """Move the lengths of the slots."""

    def zero_rows(self, states: StateInfos, slot: int, count: int, stream: Any) -> None:
        """Zero the states of ``count`` slots from ``slot`` on."""

    def copy_rows(self, destination: StateInfos, source: StateInfos, slot: int, count: int, stream: Any) -> None:
        """Copy the states of ``count`` slots from ``slot`` on, to the same slots."""

    def save_rows(self, states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
        """Copy the states of a slot into saved tensors."""

    def instantiate_rows(self, states: StateInfos, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
        """Copy saved tensors into the states of a slot."""


def backend_of(memory: Memory) -> Backend:
    """Return the backend that serves ``memory``."""
    if memory.is_host:
        return host
    from trt_kvcache.kernels import cuda

    return cuda
