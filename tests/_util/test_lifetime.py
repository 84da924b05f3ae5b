"""Objects that own memory can be used until they, or the cache they work on, are closed."""

import copy
import pickle

import pytest

from trt_kvcache._util.lifetime import Closable
from trt_kvcache.errors import ClosedError


class Owner(Closable):
    def __init__(self, *, cache=None):
        super().__init__(cache=cache)
        self.num_releases = 0

    def _release(self):
        self.num_releases += 1


def test_a_with_block_closes_it():
    with Owner() as owner:
        assert not owner.closed
    assert owner.closed
    assert owner.num_releases == 1


def test_a_closed_object_is_refused():
    owner = Owner()
    owner.close()
    with pytest.raises(ClosedError, match=r"^this Owner is closed\.$"), owner:
        pass


def test_an_object_whose_cache_is_closed_is_refused():
    cache = Owner()
    owner = Owner(cache=cache)
    cache.close()
    with pytest.raises(ClosedError, match=r"^this Owner's cache is closed\.$"), owner:
        pass


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(duplicate):
    with pytest.raises(TypeError, match="owns device memory and cannot be copied or pickled"):
        duplicate(Owner())
