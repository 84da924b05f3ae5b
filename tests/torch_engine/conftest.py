import pytest

from tests.reference import rig


@pytest.fixture(autouse=True)
def _rigs_run_torch(monkeypatch):
    """Rigs of the reference engine's tests open the torch engine."""
    from trt_kvcache.torch_engine import TorchEngine

    monkeypatch.setattr(rig, "open_engine", TorchEngine.open)
