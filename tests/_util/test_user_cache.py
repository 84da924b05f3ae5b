"""Where compiled kernels and runtime caches are kept."""

from pathlib import Path

import pytest

from trt_kvcache._util import user_cache
from trt_kvcache._util.user_cache import user_cache_folder


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/caches"}, "/caches"),
        ("darwin", {"XDG_CACHE_HOME": "/caches"}, "/caches"),
        ("linux", {}, "/home/me/.cache"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache"),
        ("darwin", {}, "/home/me/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
        ("win32", {}, "/home/me/AppData/Local"),
    ],
)
def test_folder_of_each_platform(monkeypatch, platform, environment, expected):
    monkeypatch.setattr(user_cache.os, "environ", environment)
    monkeypatch.setattr(user_cache.sys, "platform", platform)
    monkeypatch.setattr(user_cache.Path, "home", lambda: Path("/home/me"))
    assert user_cache_folder() == Path(expected, "trt_kvcache")
