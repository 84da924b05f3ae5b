"""Several processes render one template: a slow text holds up no other, and all end when they are to end."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from trt_kvcache.checkpoint.template_process import TemplateFailure
from trt_kvcache.checkpoint.template_processes import MAX_PROCESSES, TemplateProcesses
from trt_kvcache.errors import ClosedError

#: Ten seconds of work, of which each is stopped.
TEMPLATE = "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}fine"


@pytest.fixture
def processes() -> Iterator[TemplateProcesses]:
    pytest.importorskip("jinja2")
    made = TemplateProcesses(TEMPLATE)
    yield made
    made.close()


class Renders(threading.Thread):
    """Renders a slow text in a thread."""

    def __init__(self, processes: TemplateProcesses) -> None:
        super().__init__()
        self._processes = processes
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._processes.render({"slow": True})
        except (ClosedError, TemplateFailure) as error:
            self.error = error


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_texts_one_after_another_have_one_process(processes):
    for _ in range(5):
        assert processes.render({}) == "fine"
    assert len(processes._idle) == 1


def test_a_slow_text_holds_up_no_other(processes):
    slow = [Renders(processes) for _ in range(MAX_PROCESSES - 1)]
    wait_until(lambda: len(processes._busy) == MAX_PROCESSES - 1)
    assert [processes.render({}) for _ in range(3)] == ["fine"] * 3
    assert all(one.is_alive() for one in slow)
    processes.close()
    for one in slow:
        one.join(30)


def test_there_are_no_more_than_the_most(processes):
    slow = [Renders(processes) for _ in range(MAX_PROCESSES + 3)]
    wait_until(lambda: len(processes._busy) == MAX_PROCESSES)
    time.sleep(0.2)
    assert len(processes._busy) == MAX_PROCESSES
    processes.close()
    for one in slow:
        one.join(30)
    assert {type(one.error) for one in slow} == {ClosedError}


def test_a_close_ends_what_is_rendered_at_once(processes):
    slow = Renders(processes)
    wait_until(lambda: bool(processes._busy) and processes._busy[0]._process is not None)
    processes.close()
    slow.join(5)
    assert isinstance(slow.error, ClosedError)
    with pytest.raises(ClosedError, match="closed"):
        processes.render({})
    assert [one._process is None or one._process.poll() is not None for one in processes._idle] == [True]


def test_a_copy_has_processes_of_its_own(processes):
    copy = pickle.loads(pickle.dumps(processes))
    processes.close()
    assert copy.render({}) == "fine"
    copy.close()


def test_a_template_that_refuses_leaves_its_process(processes):
    with pytest.raises(TemplateFailure):
        TemplateProcesses("{{ 1 // 0 }}").render({})
    assert processes.render({}) == "fine"
