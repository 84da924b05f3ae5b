"""Trees of drafts of an EAGLE-3 head with the torch engine, by the tests of the reference engine."""

from __future__ import annotations

import pytest

from tests.session.conftest import choice_of_drafts  # noqa: F401
from tests.session.reference_sessions import OPTIONS
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.session.test_eagle3_trees import *  # noqa: E402, F403


@pytest.fixture(autouse=True)
def _sessions_run_torch(monkeypatch):
    monkeypatch.setitem(OPTIONS, "engine", "torch")
