"""A disk that is full at any byte: an old file or folder is as it was, and no part of a new one is left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.sequences.snapshots import host_cache, save
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.sequences.snapshot import Snapshot


@contextmanager
def full_after(nbytes: int) -> Iterator[None]:
    """No file becomes larger than this, as on a disk that is full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("there", [False, True], ids=["no old file", "an old file"])
def test_of_a_snapshot(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "a.kv"
    with host_cache("hybrid", 5, 3) as cache:
        save(path, cache, 1, tokens=[1, 2, 3])
        old = path.read_bytes()
        save(tmp_path / "whole.kv", cache)
        size = (tmp_path / "whole.kv").stat().st_size
        if not there:
            path.unlink()
        for nbytes in (0, 1, 8, 100, size // 2, size - 33, size - 32, size - 1):
            with full_after(nbytes), pytest.raises(OSError, match=r"File too large: '.*/a\.kv'"):
                save(path, cache)
            assert sorted(os.listdir(tmp_path)) == (["a.kv", "whole.kv"] if there else ["whole.kv"])
            assert not there or path.read_bytes() == old
        with full_after(size):
            save(path, cache)
        assert len(Snapshot.read(path).tokens) == 5


@pytest.mark.parametrize("segmented", [False, True], ids=["in one piece", "in segments"])
def test_of_an_engine_folder(tmp_path: Path, segmented: bool) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=2, **({"head_dim": 64} if segmented else {}))
    old = make_engine_folder(model, tmp_path / "engine", plan=b"an old engine").config
    for nbytes in (0, 1, 20, 1000):
        with full_after(nbytes), pytest.raises(OSError, match=r"File too large: '.*/engine'"):
            make_engine_folder(model, tmp_path / "engine", segmented=segmented)
        assert sorted(os.listdir(tmp_path)) == ["engine", "model"]
        assert EngineFolder.open(tmp_path / "engine").config == old
