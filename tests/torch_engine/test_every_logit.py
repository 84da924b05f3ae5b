"""The logits of several new tokens per slot: the tests of the reference engine, on rigs that open the torch engine."""

from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.reference.test_every_logit import *  # noqa: E402, F403
