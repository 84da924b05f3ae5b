"""Mixers with states by operations of torch against float64: the cases of the kernels, with padding of any content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.torch_engine.needs_torch import need_torch

need_torch()

import torch  # noqa: E402

from tests.kernels import (  # noqa: E402
    causal_conv1d as convolutions,
    delta_rule as delta_rules,
    mamba2 as state_spaces,
    test_gated_norm_kernels as gated_norms,
)
from tests.kernels.recurrent import DTYPES, Place  # noqa: E402
from tests.kernels.test_gated_norm_kernels import test_outputs as test_gated_norms  # noqa: E402, F401
from trt_kvcache import HostMemory  # noqa: E402
from trt_kvcache.cache.recurrent_states import StateKind  # noqa: E402
from trt_kvcache.torch_engine.device import HostDevice  # noqa: E402
from trt_kvcache.torch_engine.operations import Convolution, DeltaGates, StateSpace  # noqa: E402
from trt_kvcache.torch_engine.states import TorchStates  # noqa: E402

view = HostDevice().view


@pytest.fixture
def memory():
    return HostMemory()


@pytest.fixture
def place(memory):
    return Place(memory, memory.create_stream())


def optional(tensor):
    return None if tensor is None else view(tensor)


def states_of(x, new_lengths, kind=None, past=None, present=None):
    """Return the operations of a step over one layer with one state."""
    states = {} if kind is None else {kind: (view(past), view(present))}
    counts = torch.full(x.shape[:1], x.shape[1], dtype=torch.int32) if new_lengths is None else view(new_lengths)
    return TorchStates(SimpleNamespace(input_ids=torch.empty(x.shape[:2]), new_lengths=counts, states=(states,)))


def causal_conv1d(x, weight, past, *, present, out, bias=None, silu=False, gate_in=None, gate_out=None, new_lengths=None, stream):
    states = states_of(x, new_lengths, StateKind.CONV, past, present)
    gates = {"gate_in": optional(gate_in), "gate_out": optional(gate_out)}
    view(out).copy_(states.convolve(0, view(x), Convolution(weight=view(weight), bias=optional(bias)), silu=silu, **gates))


def mamba2_scan(x, dt, b, c, past, *, a, present, out, d=None, dt_bias=None, dt_limits, new_lengths=None, stream):
    states = states_of(x, new_lengths, StateKind.RECURRENT, past, present)
    d, dt_bias = (torch.zeros(x.shape[2]) if tensor is None else view(tensor) for tensor in (d, dt_bias))
    space = StateSpace(a=view(a), d=d, dt_bias=dt_bias, dt_limits=dt_limits)
    view(out).copy_(states.scan(0, *map(view, (x, dt, b, c)), space))


def gated_delta_rule(q, k, v, a, b, past, *, decay, present, out, dt_bias=None, new_lengths=None, stream):
    states = states_of(q, new_lengths, StateKind.RECURRENT, past, present)
    gates = DeltaGates(decay=view(decay), dt_bias=torch.zeros(v.shape[2]) if dt_bias is None else view(dt_bias))
    view(out).copy_(states.delta_rule(0, *map(view, (q, k, v, a, b)), gates))


def gated_rms_norm(x, gate, weight, *, out, group_size, gate_first, eps, new_lengths=None, stream):
    options = {"group_size": group_size, "gate_first": gate_first, "eps": eps}
    view(out).copy_(states_of(x, new_lengths).gated_norm(*map(view, (x, gate, weight)), **options))


@pytest.fixture(autouse=True)
def _torch_in_the_place_of_kernels(monkeypatch):
    monkeypatch.setattr(convolutions, "causal_conv1d", causal_conv1d)
    monkeypatch.setattr(state_spaces, "mamba2_scan", mamba2_scan)
    monkeypatch.setattr(delta_rules, "gated_delta_rule", gated_delta_rule)
    monkeypatch.setattr(gated_norms, "gated_rms_norm", gated_rms_norm)


@pytest.mark.parametrize("name", list(convolutions.CASES))
def test_convolutions(place, name):
    convolutions.check(place, convolutions.CASES[name])


@pytest.mark.parametrize("name", list(state_spaces.CASES))
def test_state_spaces(place, name):
    state_spaces.check(place, state_spaces.CASES[name])


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_state_spaces_of_every_dtype(place, dtypes):
    case = state_spaces.Case(4, 16, 24, width=150, groups=2, slots=3, new=(150, 0, 67), dtypes=dtypes)
    state_spaces.check(place, case, seed=30)


@pytest.mark.parametrize("name", list(delta_rules.CASES))
def test_delta_rules(place, name):
    delta_rules.check(place, delta_rules.CASES[name])


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_delta_rules_of_every_dtype(place, dtypes):
    case = delta_rules.Case(4, 24, 16, width=150, key_heads=2, slots=3, new=(150, 0, 67), dtypes=dtypes)
    delta_rules.check(place, case, seed=30)
