"""The kernels of recurrent layers at one shape each, for ``states.py``: our calls, those of others, and the bytes that must move."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from trt_kvcache.kernels import causal_conv1d, gated_delta_rule, mamba2_scan
from trt_kvcache.memory.shapes import dense_nbytes

Call = Callable[[], object]

_SEED = 1


class Shape(NamedTuple):
    """What is measured: slots, new tokens of each, the sizes of a model's layer, and the dtypes."""

    layer: str
    batch: int
    width: int
    sizes: tuple[int, ...]
    dtype: str = "bfloat16"
    state: str = "float32"


class Layer:
    """One shape: tensors of ours and torch's views of them; states are rotated, so that none of them is in the L2.

    Parameters
    ----------
    gpu : Gpu
        Of ``attention.py``.
    shape : Shape
        What is measured.
    copies : int
        Of the state.
    """

    state_shape: ClassVar[Callable[[tuple[int, ...]], tuple[int, ...]]]

    def __init__(self, gpu: Any, shape: Shape, copies: int) -> None:
        self.gpu, self.shape = gpu, shape
        torch.manual_seed(_SEED)
        made = [gpu.tensor((shape.batch, *type(self).state_shape(shape.sizes)), shape.state) for _ in range(copies)]
        self.mine, self.states = [one for one, _ in made], [view for _, view in made]
        self.nbytes = 2 * self.mine[0].nbytes
        self.make()
        self.calls = [self.ours(state) for state in self.mine]

    def tensor(self, *shape: int, dtype: str | None = None, counted: bool = True) -> Any:
        """Return a tensor of ours and torch's view of it; what is ``counted`` must be read or written in a call."""
        dtype = dtype or self.shape.dtype
        self.nbytes += dense_nbytes(shape, dtype) if counted else 0
        return self.gpu.tensor(shape, dtype)

    def make(self) -> None:
        """Make the activations and parameters."""
        raise NotImplementedError

    def ours(self, state: Any) -> Callable[[Any], object]:
        """Return our call, in place."""
        raise NotImplementedError

    def reference(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and the present state of the first slot, in float64, token by token."""
        raise NotImplementedError

    def others(self) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
        """Yield names of others, and what makes their calls: it raises where they are not installed. The last one is always there."""
        raise NotImplementedError

    def error(self) -> float:
        """Return max|error| / max|reference| of outputs and of the present state of the first slot."""
        before = self.states[0][0].double()
        out, present = self.reference(before)
        self.calls[0](self.gpu.stream)
        torch.cuda.synchronize()
        pairs = ((self.out[0].double(), out), (self.states[0][0].double(), present))
        errors = [float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs]
        return max(one if one == one else float("inf") for one in errors)

    out: torch.Tensor


class CausalConv1d(Layer):
    """Sizes: channels, width of the kernel."""

    state_shape = staticmethod(lambda sizes: sizes)

    def make(self) -> None:
        """Make what enters a call."""
        batch, width, (channels, kernel) = self.shape.batch, self.shape.width, self.shape.sizes
        (self.x_, self.x), (self.out_, self.out) = (self.tensor(batch, width, channels) for _ in range(2))
        (self.weight_, self.weight), (self.bias_, self.bias) = self.tensor(channels, kernel), self.tensor(channels)

    def ours(self, state: Any) -> Callable[[Any], object]:
        """Return our call."""
        options = {"present": state, "out": self.out_, "bias": self.bias_, "silu": True}
        return lambda stream: causal_conv1d(self.x_, self.weight_, state, **options, stream=stream)

    def reference(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the first slot in float64."""
        inputs = torch.cat([state, self.x[0].double().T], dim=1)
        sums = torch.nn.functional.conv1d(inputs[None, :, 1:], self.weight.double()[:, None], self.bias.double(), groups=len(inputs))
        return torch.nn.functional.silu(sums[0]).T, inputs[:, -state.shape[1] :]

    def others(self) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
        """Yield the calls of others."""

        def torch_conv() -> list[Call]:
            weight, bias = self.weight[:, None].float(), self.bias.float()

            def call(state: torch.Tensor) -> None:
                inputs = torch.cat([state.float(), self.x.mT.float()], dim=2)
                torch.nn.functional.silu(torch.nn.functional.conv1d(inputs[:, :, 1:], weight, bias, groups=len(weight)))

            return [lambda s=state: call(s) for state in self.states]

        def dao() -> list[Call]:
            module = importlib.import_module("causal_conv1d")
            if self.shape.width == 1:
                x = self.x[:, 0]
                return [
                    lambda s=state: module.causal_conv1d_update(x, s, self.weight, self.bias, activation="silu") for state in self.states
                ]
            return [lambda: module.causal_conv1d_fn(self.x.mT, self.weight, self.bias, activation="silu")]

        def fla() -> list[Call]:
            module, weights = importlib.import_module("fla.modules.causal_conv1d"), {"weight": self.weight, "bias": self.bias}
            if self.shape.width == 1:
                return [lambda s=state: module.causal_conv1d_update(self.x, s, activation="silu", **weights) for state in self.states]
            options = {"output_final_state": True, "activation": "silu", **weights}
            return [lambda s=state: module.causal_conv1d(self.x, initial_state=s, **options) for state in self.states]

        yield "fla", fla
        yield "causal_conv1d", dao
        yield "torch", torch_conv


class Mamba2(Layer):
    """Sizes: heads, head dim, state size, groups."""

    state_shape = staticmethod(lambda sizes: sizes[:3])

    def make(self) -> None:
        """Make what enters a call."""
        batch, width, (heads, head_dim, state_size, groups) = self.shape.batch, self.shape.width, self.shape.sizes
        (self.x_, self.x), (self.out_, self.out) = (self.tensor(batch, width, heads, head_dim) for _ in range(2))
        (self.b_, self.b), (self.c_, self.c) = (self.tensor(batch, width, groups, state_size) for _ in range(2))
        self.dt_, self.dt = self.tensor(batch, width, heads)
        (self.a_, self.a), (self.d_, self.d), (self.bias_, self.bias) = (self.tensor(heads, dtype="float32") for _ in range(3))
        self.a.exp_().neg_()

    def ours(self, state: Any) -> Callable[[Any], object]:
        """Return our call."""
        options = {"a": self.a_, "present": state, "out": self.out_, "d": self.d_, "dt_bias": self.bias_}
        return lambda stream: mamba2_scan(self.x_, self.dt_, self.b_, self.c_, state, **options, stream=stream)

    def reference(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the first slot in float64."""
        heads, groups = self.shape.sizes[0], self.shape.sizes[3]
        x, dt = self.x[0].double(), torch.nn.functional.softplus(self.dt[0].double() + self.bias.double())
        b, c = (one[0].double().repeat_interleave(heads // groups, 1) for one in (self.b, self.c))
        decay, out = (dt * self.a.double()).exp(), []
        for token in range(len(x)):
            state = state * decay[token, :, None, None] + (dt[token, :, None] * x[token])[:, :, None] * b[token, :, None]
            out.append((state @ c[token, :, :, None])[..., 0] + self.d.double()[:, None] * x[token])
        return torch.stack(out), state

    def others(self) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
        """Yield the calls of others."""
        heads, head_dim, state_size, _ = self.shape.sizes
        options = {"D": self.d, "dt_bias": self.bias, "dt_softplus": True}

        def step(function: Any) -> list[Call]:
            a = self.a[:, None, None].expand(heads, head_dim, state_size)
            wide = {name: one[:, None].expand(heads, head_dim) for name, one in (("D", self.d), ("dt_bias", self.bias))}
            dt = self.dt[:, 0, :, None].expand(-1, heads, head_dim)
            return [
                lambda s=state: function(s, self.x[:, 0], dt, a, self.b[:, 0], self.c[:, 0], **wide, dt_softplus=True)
                for state in self.states
            ]

        def chunks(function: Any) -> list[Call]:
            given = {"chunk_size": 256, "return_final_states": True, **options}
            return [lambda s=state: function(self.x, self.dt, self.a, self.b, self.c, initial_states=s, **given) for state in self.states]

        def ssm() -> list[Call]:
            package = "mamba_ssm.ops.triton"
            if self.shape.width == 1:
                return step(importlib.import_module(f"{package}.selective_state_update").selective_state_update)
            return chunks(importlib.import_module(f"{package}.ssd_combined").mamba_chunk_scan_combined)

        def transformers() -> list[Call]:
            module = importlib.import_module("transformers.models.bamba.modeling_bamba")
            return step(module.mamba2_selective_state_update) if self.shape.width == 1 else chunks(module.mamba2_chunk_scan)

        yield "mamba_ssm", ssm
        yield "transformers", transformers


class DeltaRule(Layer):
    """Sizes: heads, key dim, value dim, key heads."""

    state_shape = staticmethod(lambda sizes: sizes[:3])

    def make(self) -> None:
        """Make what enters a call."""
        batch, width, (heads, key_dim, value_dim, key_heads) = self.shape.batch, self.shape.width, self.shape.sizes
        (self.q_, self.q), (self.k_, self.k) = (self.tensor(batch, width, key_heads, key_dim) for _ in range(2))
        (self.v_, self.v), (self.out_, self.out) = (self.tensor(batch, width, heads, value_dim) for _ in range(2))
        (self.a_, self.a), (self.b_, self.b) = (self.tensor(batch, width, heads) for _ in range(2))
        (self.decay_, self.decay), (self.bias_, self.bias) = (self.tensor(heads, dtype="float32") for _ in range(2))
        self.decay.exp_().neg_()

    def ours(self, state: Any) -> Callable[[Any], object]:
        """Return our call."""
        options = {"decay": self.decay_, "present": state, "out": self.out_, "dt_bias": self.bias_}
        return lambda stream: gated_delta_rule(self.q_, self.k_, self.v_, self.a_, self.b_, state, **options, stream=stream)

    def reference(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the first slot in float64."""
        heads, key_heads, key_dim = self.v.shape[2], *self.q.shape[2:]
        q, k = (one[0].double().repeat_interleave(heads // key_heads, 1) for one in (self.q, self.k))
        q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
        decay = (torch.nn.functional.softplus(self.a[0].double() + self.bias.double()) * self.decay.double()).exp()
        beta, out = self.b[0].double().sigmoid(), []
        for token in range(len(q)):
            state = state * decay[token, :, None, None]
            change = beta[token, :, None] * (self.v[0, token].double() - (k[token, :, None] @ state)[:, 0])
            state = state + k[token, :, :, None] * change[:, None]
            out.append((q[token, :, None] @ state)[:, 0] / key_dim**0.5)
        return torch.stack(out), state

    def others(self) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
        """Yield the calls of others. They leave the state after the tokens in a tensor of its own."""

        def fla() -> list[Call]:
            module = importlib.import_module("fla.ops.gated_delta_rule")
            function = module.fused_recurrent_gated_delta_rule if self.shape.width == 1 else module.chunk_gated_delta_rule
            in_kernel = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
            options = {"A_log": (-self.decay).log(), "dt_bias": self.bias, "output_final_state": True, **in_kernel}
            return [lambda s=state: function(self.q, self.k, self.v, self.a, self.b, initial_state=s, **options) for state in self.states]

        def transformers() -> list[Call]:
            module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
            function = getattr(module, f"torch_{'recurrent' if self.shape.width == 1 else 'chunk'}_gated_delta_rule")
            log_decay, beta = torch.nn.functional.softplus(self.a.float() + self.bias) * self.decay, self.b.sigmoid()
            options = {"g": log_decay, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            q, k = (one.repeat_interleave(self.v.shape[2] // self.q.shape[2], 2) for one in (self.q, self.k))
            return [lambda s=state: function(q, k, self.v, initial_state=s, **options) for state in self.states]

        yield "fla", fla
        yield "transformers", transformers


LAYERS = {"conv": CausalConv1d, "mamba2": Mamba2, "delta_rule": DeltaRule}


def make_layer(gpu: Any, shape: Shape, copies: int) -> Layer:
    """Return the tensors and calls of a shape."""
    return LAYERS[shape.layer](gpu, shape, copies)


def state_nbytes(shape: Shape) -> int:
    """Return the bytes of the states of all slots."""
    return dense_nbytes((shape.batch, *LAYERS[shape.layer].state_shape(shape.sizes)), shape.state)
