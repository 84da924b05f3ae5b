"""A session with a planted mistake in the place of an engine."""

import pytest

from trt_kvcache.doctor.cases import CaseLog
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import Subject, open_reference


class Changed:
    """A session, some of whose methods are others."""

    def __init__(self, session, **methods):
        self._session, self._methods = session, methods

    def __getattr__(self, name):
        if name in self._methods:
            return lambda *arguments, **options: self._methods[name](self._session, *arguments, **options)
        return getattr(self._session, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._session.close()


@pytest.fixture
def settings(tmp_path):
    return Settings(scratch=str(tmp_path), dry_run=True)


@pytest.fixture
def log(tmp_path):
    return CaseLog(tmp_path / "cases.jsonl")


@pytest.fixture
def plant(monkeypatch):
    """Let every engine be the NumPy engine, with these methods of its session."""

    def plant(**methods):
        def open_(self, settings, model, dtype, *, cuda_graphs=True):
            return Changed(open_reference(model, dtype), **methods)

        monkeypatch.setattr(Subject, "open", open_)
        return Subject("torch", "torch")

    return plant
