"""``Kernel``: a call runs in the memory of its first argument."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trt_kvcache.kernels.kernel import Kernel


@pytest.mark.parametrize(("is_host", "ran"), [(True, "host"), (False, "device")])
def test_the_memory_of_the_first_argument_decides(is_host, ran):
    calls = []
    kernel = Kernel(*(lambda *given, name=name, **named: calls.append((name, *given, named)) for name in ("host", "device")))
    first, second = (SimpleNamespace(memory=SimpleNamespace(is_host=one)) for one in (is_host, not is_host))
    kernel(first, second, 3, stream="stream")
    assert calls == [(ran, first, second, 3, {"stream": "stream"})]
