"""Sessions over the torch engine: scores, drafts, the prompt cache, snapshots and sampling, by the tests of the reference engine."""

import pytest

from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.conftest import opened, reference_model  # noqa: E402, F401
from tests.session.test_resume_snapshots import *  # noqa: E402, F403
from tests.session.test_session_prompt_cache import *  # noqa: E402, F403
from tests.session.test_session_sampling import *  # noqa: E402, F403
from tests.session.test_session_score import *  # noqa: E402, F403
from tests.session.test_session_verify import *  # noqa: E402, F403
from trt_kvcache.torch_engine import TorchEngine  # noqa: E402


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch):
    monkeypatch.setitem(OPTIONS, "engine", "torch")


def test_that_torch_runs(opened):  # noqa: F811
    assert isinstance(opened().engine, TorchEngine)
