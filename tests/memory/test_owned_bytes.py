"""``OwnedBytes``: bytes of an owner, counted until they are closed."""

import gc
import weakref

import numpy as np
import pytest

from trt_kvcache.errors import ClosedError
from trt_kvcache.memory.owned_bytes import OwnedBytes


class Counter:
    """A memory that counts its live bytes."""

    def __init__(self):
        self.live_nbytes = 30

    def count_live(self, nbytes):
        self.live_nbytes += nbytes


@pytest.fixture
def counter():
    return Counter()


def test_what_it_knows(counter):
    owner = np.zeros(30, np.uint8)
    owned = OwnedBytes(counter, owner, 30)
    assert (owned.memory, owned.nbytes, owned.closed) == (counter, 30, False)
    assert owned.storage is owner


def test_close_counts_once(counter):
    owned = OwnedBytes(counter, np.zeros(30, np.uint8), 30)
    for _ in range(2):
        owned.close()
        assert (owned.closed, counter.live_nbytes) == (True, 0)


def test_close_lets_go_of_the_owner(counter):
    owner = np.zeros(30, np.uint8)
    alive, owned = weakref.ref(owner), OwnedBytes(counter, owner, 30)
    del owner
    owned.close()
    gc.collect()
    assert alive() is None


def test_what_is_forgotten_is_counted_too(counter):
    owned = OwnedBytes(counter, np.zeros(30, np.uint8), 30)
    del owned
    gc.collect()
    assert counter.live_nbytes == 0


def test_the_size_is_known_after_close(counter):
    owned = OwnedBytes(counter, np.zeros(30, np.uint8), 30)
    owned.close()
    assert owned.nbytes == 30


def test_the_owner_is_not_given_after_close(counter):
    owned = OwnedBytes(counter, np.zeros(30, np.uint8), 30)
    owned.close()
    with pytest.raises(ClosedError) as caught:
        _ = owned.storage
    assert str(caught.value) == "the memory of this tensor is closed. Keep its cache open, or copy with .numpy() before."
