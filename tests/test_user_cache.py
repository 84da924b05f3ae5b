"""Where compiled kernels and runtime caches are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_kvcache import user_cache
from trt_kvcache.user_cache import user_cache_folder


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/caches"}, "/caches/trt_kvcache"),
        ("linux", {}, "/home/me/.cache/trt_kvcache"),
        ("darwin", {}, "/home/me/Library/Caches/trt_kvcache"),
        ("darwin", {"XDG_CACHE_HOME": "/caches"}, "/caches/trt_kvcache"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/trt_kvcache"),
        ("win32", {}, "/home/me/AppData/Local/trt_kvcache"),
    ],
)
def test_folder_of_each_platform(monkeypatch: pytest.MonkeyPatch, platform: str, environment: dict[str, str], expected: str) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(user_cache.sys, "platform", platform)
    monkeypatch.setattr(user_cache.Path, "home", lambda: Path("/home/me"))
    assert user_cache_folder() == Path(expected)
