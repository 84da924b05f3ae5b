"""Speculative decoding over the torch engine, by tests of the reference engine: those with drafts that are right half of the time."""

import pytest

from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_drafts_of_models import (  # noqa: E402
    test_a_queue_over_states,  # noqa: F401
    test_generate_over_states,  # noqa: F401
    test_windows_and_quantized_rows,  # noqa: F401
)


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch, request):
    monkeypatch.setitem(OPTIONS, "engine", "torch")
    if request.node.callspec.params["right"] != 0.5:
        pytest.skip("the reference engine runs the others")
