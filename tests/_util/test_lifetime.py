"""Owners of memory: they cannot be copied, and they can be closed."""

import copy
import pickle

import pytest

from trt_kvcache._util.lifetime import Closable
from trt_kvcache.errors import ClosedError


class Owner(Closable):
    """Counts how often it was released."""

    released = 0

    def _release(self):
        self.released += 1

    def use(self):
        self._check_open()


@pytest.mark.parametrize("operation", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_owner_is_never_copied(operation):
    with pytest.raises(TypeError) as caught:
        operation(Owner())
    assert str(caught.value) == "an Owner owns memory, or shares it, and cannot be copied or pickled."


def test_close_releases():
    owner = Owner()
    owner.close()
    assert (owner.closed, owner.released) == (True, 1)


def test_close_may_be_called_again():
    owner = Owner()
    owner.close()
    owner.close()
    assert owner.closed


def test_an_open_owner_is_used():
    Owner().use()


@pytest.mark.parametrize("use", [Owner.use, Owner.__enter__])
def test_a_closed_owner_is_refused(use):
    owner = Owner()
    owner.close()
    with pytest.raises(ClosedError, match=r"^this Owner is closed\.$"):
        use(owner)


def test_a_block_closes():
    with Owner() as owner:
        assert not owner.closed
    assert owner.closed


def test_an_error_in_the_block_closes_and_passes():
    owner = Owner()
    with pytest.raises(ZeroDivisionError), owner:
        _ = 1 / 0
    assert owner.closed


def test_an_owner_over_a_closed_cache_is_refused():
    cache = Owner()
    owner = Owner(cache=cache)
    owner.use()
    cache.close()
    with pytest.raises(ClosedError, match=r"^this Owner's cache is closed\.$"):
        owner.use()


def test_an_owner_over_a_closed_cache_can_be_closed():
    cache = Owner()
    owner = Owner(cache=cache)
    cache.close()
    owner.close()
    assert owner.released == 1
