"""Sessions over the recording engine, and over the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import write_model
from tests.helpers.sessions import make
from tests.session.reference_sessions import OPTIONS
from trt_kvcache import InferenceSession
from trt_kvcache.session.decode_steps import DecodeSteps
from trt_kvcache.session.draft_steps import DraftSteps
from trt_kvcache.session.draft_tree_steps import DraftTreeSteps


@pytest.fixture
def session() -> Iterator[InferenceSession]:
    """A session of three slots over the recording engine."""
    with make() as session:
        yield session


@pytest.fixture(scope="module")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of one layer."""
    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def opened(reference_model: Path) -> Iterator[Callable[..., InferenceSession]]:
    """Return a function that opens sessions of the reference engine, which are closed after the test."""
    sessions: list[InferenceSession] = []

    def open_one(**options: Any) -> InferenceSession:
        sessions.append(InferenceSession.from_model(reference_model, **{**OPTIONS, "max_batch_size": 3, **options}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


@pytest.fixture(params=["host", "device", "all on the device"])
def choice_of_drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models for drafts choose their tokens on the host, or where the logits are; and then the large model too."""
    for kind in {"host": (), "device": (DraftSteps, DraftTreeSteps), "all on the device": (DraftSteps, DraftTreeSteps, DecodeSteps)}[
        request.param
    ]:
        monkeypatch.setattr(kind, "__init__", _on_device(kind.__init__))


def _on_device(init: Callable[..., None]) -> Callable[..., None]:
    def init_on_device(self: DraftSteps | DraftTreeSteps | DecodeSteps, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.on_device = self.can_be_on_device

    return init_on_device
