"""Networks of the golden models, made once per combination."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.builder.network.parts import Part
from tests.builder.network.resolved import resolved
from tests.helpers.models import attentions_of, skip_what_is_not_computed
from tests.paths import GOLDEN
from tests.reference.rig import MODELS
from trt_kvcache.builder import resolved_options
from trt_kvcache.builder.definition import DecoderDefinition, define_decoder
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.resolved_options import COMPUTED_FEATURES, ResolvedOptions
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.protocol import TensorMode
from trt_kvcache.trt.module import TensorRT, load

#: The network of every test here: B, S and P all different, and different from the models' sizes.
MAX_BATCH_SIZE, MAX_SEQUENCE_LENGTH, MAX_PREFILL_LENGTH = 3, 38, 11

#: Golden models with each variant of TensorRT's own attention that computes them.
MODELS_AND_ATTENTIONS = [(model, attention) for model in MODELS for attention in attentions_of(model, MAX_SEQUENCE_LENGTH)]
SIZES = {"max_batch_size": MAX_BATCH_SIZE, "max_sequence_length": MAX_SEQUENCE_LENGTH, "max_prefill_length": MAX_PREFILL_LENGTH}


@dataclass(frozen=True)
class Defined:
    """A defined network, and the arrays behind its constants."""

    tensorrt: TensorRT
    definition: DecoderDefinition
    options: ResolvedOptions
    constants: dict[str, np.ndarray[Any, Any]]


@contextmanager
def recording(rtx, model):
    """Yield the checkpoint of a golden model, the arrays of constants that are added meanwhile, and messages."""
    constants, original = {}, Graph.constant
    with pytest.MonkeyPatch.context() as patch, Checkpoint.open(GOLDEN / model) as checkpoint:
        patch.setattr(Graph, "constant", lambda self, name, array: original(self, name, constants.setdefault(name, array)))
        with rtx.log.collect(ignore_missing_driver=True) as messages:
            yield checkpoint, constants, messages


def declared(rtx, network):
    """Return mode, dtype and shape of each input and output by name."""
    tensors = [(TensorMode.INPUT, network.get_input(index)) for index in range(network.num_inputs)]
    tensors += [(TensorMode.OUTPUT, network.get_output(index)) for index in range(network.num_outputs)]
    return {one.name: (mode, rtx.dtype_name(one.dtype), tuple(one.shape)) for mode, one in tensors}


@pytest.fixture(autouse=True)
def _only_what_is_computed(request):
    skip_what_is_not_computed(request, COMPUTED_FEATURES)


@pytest.fixture(autouse=True)
def _any_head_dim(monkeypatch):
    """Networks are interpreted here, and heads of golden models may be smaller than TensorRT has kernels for."""
    monkeypatch.setattr(resolved_options, "HEAD_DIM_MIN", 8)


@pytest.fixture(scope="session")
def rtx():
    return load("tensorrt_rtx")


@pytest.fixture(scope="session")
def define(rtx):
    """Return ``define(model, dtype="float32", attention="native", logits=1)``: the network of a golden model."""

    @cache
    def make(model, *, dtype="float32", attention="native", logits=1):
        with recording(rtx, model) as (checkpoint, constants, messages):
            options = resolved(checkpoint.config, **SIZES, dtype=dtype, attention=attention, max_logits_per_slot=logits)
            return Defined(
                rtx, define_decoder(checkpoint, options, options.cache_for(checkpoint.config), rtx, messages), options, constants
            )

    yield make
    make.cache_clear()


@pytest.fixture
def part(rtx):
    """Return ``part(dtype="float32")``: an empty network for one part of a decoder."""
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        yield lambda dtype="float32": Part(rtx, messages, dtype)
