import pytest

from tests.helpers.models import skip_what_is_not_computed
from tests.reference import rig


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Models here are small: threads would only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _only_what_is_computed(request):
    from trt_kvcache.torch_engine.engine import COMPUTED_FEATURES

    skip_what_is_not_computed(request, COMPUTED_FEATURES)


@pytest.fixture(autouse=True)
def _rigs_run_torch(monkeypatch):
    """Rigs of the reference engine's tests open the torch engine."""
    from trt_kvcache.torch_engine import TorchEngine

    monkeypatch.setattr(rig, "open_engine", TorchEngine.open)
