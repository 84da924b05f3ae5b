"""The n-th allocation fails, for every n of every operation: nothing is held that was not held before, and the session goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.sessions import MODEL, OPERATIONS, answers, check_goes_on, check_usable, every_model, live_nbytes, prepared
from tests.helpers.adapters import write_two_adapters
from tests.helpers.caches import FailingMemory
from tests.helpers.eagle3 import write_head, write_model
from tests.helpers.mtp import write_mtp_model
from trt_kvcache import Checkpoint, InferenceSession
from trt_kvcache.errors import CapacityError, ClosedError
from trt_kvcache.session import open_model


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[FailingMemory]:
    """The memories of the sessions that are opened."""
    made: list[FailingMemory] = []

    def make() -> FailingMemory:
        made.append(FailingMemory())
        return made[-1]

    monkeypatch.setattr(open_model, "HostMemory", make)
    return made


@every_model
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_in_an_operation(tmp_path: Path, memories: list[FailingMemory], name: str, model: Path, stride: int) -> None:
    with prepared(tmp_path, model) as session:
        memory = memories[-1]
        OPERATIONS[name](session, tmp_path)
        expected = answers(session)
        for n in range(0, 10_000, stride if model == MODEL else 9 * stride):  # the twins of kernels of layers with states allocate much
            session.prompt_cache.clear()
            list(session.generate([[5, 6, 7, 8, 9], [10, 11]], temperature=0.0, ignore_eos=True, max_new_tokens=3))
            session.prompt_cache.clear()
            before = live_nbytes(session)
            memory.left, memory.failures = n, 1
            with suppress(CapacityError):  # the prompt cache does without a copy that it has no room for
                OPERATIONS[name](session, tmp_path)
            done, memory.failures = memory.failures == 1, 0
            session.prompt_cache.clear()
            assert live_nbytes(session) == before
            if model != MODEL:
                check_goes_on(session)
            check_usable(session, expected)
            if done:  # the operation has no n-th allocation
                return
    pytest.fail("thousands of allocations")


@pytest.mark.parametrize("with_", [None, "mtp", "eagle3", "adapters"])
def test_while_a_session_is_opened(tmp_path: Path, memories: list[FailingMemory], with_: str | None) -> None:
    options = {"engine": "reference", "max_batch_size": 2, "max_sequence_length": 32, "prompt_cache_bytes": 1 << 16}
    model = MODEL if with_ is None else (write_mtp_model if with_ == "mtp" else write_model)(tmp_path / "model")
    if with_ == "mtp":
        options["draft"] = "mtp"
    elif with_ == "eagle3":
        options["draft"] = write_head(tmp_path / "head", model)
    elif with_ == "adapters":
        options["adapters"] = write_two_adapters(tmp_path, Checkpoint.read_config(model))
    for n in range(1000):
        FailingMemory.left, FailingMemory.failures = n, 1  # of the memory that is made next
        try:
            with InferenceSession.from_model(model, **options) as session:  # type: ignore[arg-type]
                memories[-1].failures = 0
                assert n
                session.close()
                with pytest.raises(ClosedError):
                    session.prefill([[1]])
                break
        except CapacityError:
            assert memories[-1].live_nbytes == 0
        finally:
            FailingMemory.left, FailingMemory.failures = 0, 0
    assert memories[-1].live_nbytes == 0
