"""``one_blas_thread``: small products run on one thread of BLAS, and BLAS gets its threads back."""

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from trt_kvcache import InferenceSession
from trt_kvcache.reference import model
from trt_kvcache.reference.blas_threads import one_blas_thread


def blas_threads():
    """Return the threads of the BLAS of NumPy: PyTorch and SciPy bring others."""
    found = [one for one in threadpool_info() if one["user_api"] == "blas" and "numpy" in one["filepath"]]
    return {one["num_threads"] for one in found}


@pytest.fixture(autouse=True)
def two_threads():
    """BLAS with two threads, whatever the machine has."""
    np.ones((2, 2), np.float32) @ np.ones((2, 2), np.float32)
    with threadpool_limits(2, user_api="blas"):
        if blas_threads() != {2}:
            pytest.skip("the BLAS of this NumPy has no threads that can be set")
        yield
        assert blas_threads() == {2}


@pytest.mark.parametrize(("rows", "elements", "threads"), [(512, 4096, 1), (1, 2**18, 1), (1, 2**19, 2), (64, 2**18, 2)])
def test_only_small_products_are_limited(rows, elements, threads):
    with one_blas_thread(rows, elements):
        assert blas_threads() == {threads}


def test_threads_come_back_after_an_error():
    with pytest.raises(ZeroDivisionError), one_blas_thread(1, 1):
        raise ZeroDivisionError


def test_a_thread_inside_the_limit_of_another_one_does_not_restore_it_later():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with one_blas_thread(1, 1):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with one_blas_thread(1, 1):
        thread.start()
        assert inside.wait(10)
    assert blas_threads() == {2}
    leave.set()
    thread.join()


def test_the_layers_of_a_small_model_run_on_one_thread(monkeypatch):
    seen, decoder_layer = [], model.decoder_layer
    monkeypatch.setattr(model, "decoder_layer", lambda *arguments: seen.append(blas_threads()) or decoder_layer(*arguments))
    with InferenceSession.from_model("examples/tiny-llama", engine="reference", max_batch_size=1) as session:
        assert len(list(session.generate([list(range(40))], max_new_tokens=2))) == 2
    assert seen
    assert all(threads == {1} for threads in seen)
