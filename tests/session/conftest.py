"""A session of three slots over the recording engine."""

from collections.abc import Iterator

import pytest

from tests.helpers.sessions import make
from trt_kvcache import InferenceSession


@pytest.fixture
def session() -> Iterator[InferenceSession]:
    with make() as session:
        yield session
