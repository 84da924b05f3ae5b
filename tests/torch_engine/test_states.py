"""Sessions of models with states over the torch engine, by the tests of the reference engine, against what that one gives.

One model of each family: the others differ in sizes and biases, which test_golden.py compares.
"""

import pytest

from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_states import *  # noqa: E402, F403
from tests.session.test_states import open_model  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch):
    monkeypatch.setitem(OPTIONS, "engine", "torch")


@pytest.fixture(autouse=True)
def _one_model_of_each_family(request):
    name = request.node.callspec.params.get("name", "") if hasattr(request.node, "callspec") else ""
    if name.endswith("-bias"):
        pytest.skip("a second model of its family")


def test_that_torch_runs():
    with open_model("lfm2") as session:
        assert isinstance(session.engine, TorchEngine)
