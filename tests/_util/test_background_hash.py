"""SHA-256 of chunks in a thread of its own."""

import hashlib
import threading

import numpy as np
import pytest

from trt_kvcache._util.background_hash import DIGEST_NBYTES, BackgroundHash

CHUNKS = [b"", b"a", bytes(range(256)) * 300, b"the end"]


def test_of_nothing():
    with BackgroundHash() as sha256:
        assert sha256.digest() == hashlib.sha256().digest()


def test_of_chunks_in_their_order():
    with BackgroundHash() as sha256:
        for chunk in CHUNKS:
            sha256.update(chunk)
        assert sha256.digest() == hashlib.sha256(b"".join(CHUNKS)).digest()


def test_of_memory_that_is_not_copied():
    array = np.arange(1000, dtype=np.uint8)
    with BackgroundHash() as sha256:
        sha256.update(array.data)
        assert sha256.digest() == hashlib.sha256(array.tobytes()).digest()


def test_it_goes_on_after_a_digest():
    with BackgroundHash() as sha256:
        sha256.update(b"one")
        first = sha256.digest()
        sha256.update(b"two")
        assert [first, sha256.digest()] == [hashlib.sha256(data).digest() for data in (b"one", b"onetwo")]


def test_a_digest_has_its_size():
    with BackgroundHash() as sha256:
        assert len(sha256.digest()) == DIGEST_NBYTES == 32


@pytest.mark.parametrize("error", [None, OSError])
def test_its_thread_ends_with_the_block(error):
    before = threading.active_count()
    try:
        with BackgroundHash() as sha256:
            sha256.update(b"data")
            assert threading.active_count() == before + 1
            if error is not None:
                raise error
    except OSError:
        pass
    assert threading.active_count() == before
