"""``Closable`` and ``Uncopyable``: what every owner of memory has in common."""

import copy
import pickle

import pytest

from trt_kvcache._util.lifetime import Closable, Uncopyable
from trt_kvcache.errors import ClosedError


class Thing(Closable):
    """Counts how often it is released."""

    def __init__(self, *, cache=None):
        super().__init__(cache=cache)
        self.released = 0

    def _release(self):
        self.released += 1

    def use(self):
        self._check_open()
        return "used"


def test_it_is_closed_at_the_end_of_the_block():
    with Thing() as thing:
        assert (thing.use(), thing.closed, thing.released) == ("used", False, 0)
    assert (thing.closed, thing.released) == (True, 1)


def test_it_is_closed_if_the_block_raises():
    thing = Thing()
    with pytest.raises(KeyError), thing:
        raise KeyError
    assert (thing.closed, thing.released) == (True, 1)


@pytest.mark.parametrize("use", [Thing.use, Thing.__enter__])
def test_what_is_closed_cannot_be_used(use):
    thing = Thing()
    thing.close()
    thing.close()
    with pytest.raises(ClosedError, match=r"^this Thing is closed\.$"):
        use(thing)


def test_what_works_on_a_closed_cache_cannot_be_used_and_can_be_closed():
    cache = Thing()
    thing = Thing(cache=cache)
    cache.close()
    assert not thing.closed
    with pytest.raises(ClosedError, match=r"^this Thing's cache is closed\.$"):
        thing.use()
    thing.close()
    with pytest.raises(ClosedError, match=r"^this Thing is closed\.$"):
        thing.use()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_owner_is_not_copied(make):
    with pytest.raises(TypeError, match=r"^a Uncopyable owns device memory and cannot be copied or pickled\.$"):
        make(Uncopyable())
