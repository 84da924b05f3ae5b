"""A server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.needs_libraries import need_libraries

need_libraries("httpx", "openai")

from tests.server.http.running import Running, chat_model, serving  # noqa: E402


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over the shipped model with a chat template, with a prompt cache."""
    folder = chat_model(tmp_path_factory.mktemp("model") / "tiny")
    with serving(4, folder=folder, prompt_cache_bytes=1 << 22) as server:
        yield server
