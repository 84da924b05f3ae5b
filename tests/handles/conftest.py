from functools import partial

import pytest

from tests.handles.sequences import make_sequences


@pytest.fixture
def make(memory, stream):
    """A function that makes a cache and the sequences over it: see ``make_sequences``."""
    return partial(make_sequences, memory, stream)
