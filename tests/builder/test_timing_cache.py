"""The timing cache of a build with full TensorRT. TensorRT for RTX has none, so a stand-in shows what the calls are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.assertions import raises
from tests.helpers.fake_tensorrt import FakeLogger, fake_module
from trt_kvcache.builder.timing_cache import check_timing_cache, read_timing_cache, write_timing_cache
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.trt.log import TensorRTLog


class Cache:
    """``ITimingCache``."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data + b"+"


class Config:
    """``IBuilderConfig``, of a GPU whose caches begin with ``ours``; it warns of what is no cache, as TensorRT does."""

    def __init__(self, log: TensorRTLog) -> None:
        self.cache: Cache | None = None
        self._log = log

    def create_timing_cache(self, data: bytes) -> Cache:
        if data == b"damaged":
            self._log.logger.log(FakeLogger.Severity.WARNING, "Failed to deserialize timing cache. Returning an empty timing cache.")
            return Cache(b"")
        return Cache(data)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache.data and not cache.data.startswith(b"ours"):
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Cache | None:
        return self.cache


@pytest.fixture
def log() -> TensorRTLog:
    return TensorRTLog(fake_module("11.0"))


def test_a_build_starts_from_the_file_and_adds_to_it(log: TensorRTLog, tmp_path: Path) -> None:
    path, config = tmp_path / "timings", Config(log)
    path.write_bytes(b"ours")
    with log.collect() as messages:
        read_timing_cache(config, path, messages)
    write_timing_cache(config, path)
    assert path.read_bytes() == b"ours+"


def test_the_file_need_not_exist(log: TensorRTLog, tmp_path: Path) -> None:
    config = Config(log)
    with log.collect() as messages:
        read_timing_cache(config, tmp_path / "timings", messages)
    write_timing_cache(config, tmp_path / "timings")
    assert (tmp_path / "timings").read_bytes() == b"+"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"theirs", "timings: the timing cache is of another GPU or release of TensorRT. Give each its own file."),
        (b"damaged", "timings: expected a timing cache of this TensorRT. TensorRT says: Failed to deserialize timing cache."),
    ],
)
def test_a_file_that_cannot_be_used_is_left_alone(log: TensorRTLog, tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "timings"
    path.write_bytes(content)
    with log.collect() as messages, pytest.raises(BuildError) as raised:
        read_timing_cache(Config(log), path, messages)
    assert complaint in str(raised.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["none/timings", "."])
def test_what_cannot_be_written_is_refused_before_the_build(tmp_path: Path, name: str) -> None:
    with raises(ConfigError, "timing_cache", expected="file in a folder that exists"):
        check_timing_cache(tmp_path / name)
