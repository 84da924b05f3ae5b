"""``StepAncestors``: trees of the new tokens of slots as bits, in any memory."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.engine.step_ancestors import StepAncestors, ancestor_bits


def read(ancestors, memory, stream, slots, width):
    found = np.zeros((slots, width), np.int64)
    memory.download(found, ancestors.of_step(slots, width), stream=stream)
    memory.synchronize(stream)
    return found


@pytest.fixture
def ancestors(memory):
    found = StepAncestors(memory, max_slots=3)
    yield found
    found.close()


def test_bits_of_a_token_are_those_of_its_path():
    assert ancestor_bits([-1, 0, 0, 1, 2, 3]) == [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b101011]
    assert ancestor_bits([-1, -1, 0]) == [0b1, 0b10, 0b101]  # two roots
    assert ancestor_bits([]) == []


def test_a_token_of_padding_sees_itself(ancestors, memory, stream):
    ancestors.write([[-1, 0, 0, 1], [], [-1]], 5, stream=stream)
    assert read(ancestors, memory, stream, 3, 5).tolist() == [
        [0b1, 0b11, 0b101, 0b1011, 0b10000],
        [0b1, 0b10, 0b100, 0b1000, 0b10000],
        [0b1, 0b10, 0b100, 0b1000, 0b10000],
    ]
    assert ancestors.in_use


def test_the_last_of_64_tokens_has_the_sign_bit(ancestors, memory, stream):
    chain = [*range(-1, 63)]
    ancestors.write([chain, [-1] + [0] * 63, chain], 64, stream=stream)
    found = read(ancestors, memory, stream, 3, 64).view(np.uint64)
    assert found[0].tolist() == found[2].tolist() == [(2 << token) - 1 for token in range(64)]
    assert found[1].tolist() == [1] + [1 | 1 << token for token in range(1, 64)]


def test_a_step_of_chains_writes_nothing(ancestors, memory, stream, monkeypatch):
    ancestors.write([[-1, 0, 0]], 3, stream=stream)
    monkeypatch.setattr(memory, "upload", lambda *_, **__: 1 / 0)
    ancestors.write(None, 200, stream=stream)
    assert not ancestors.in_use


def test_a_write_that_fails_leaves_no_tree(ancestors, memory, stream, monkeypatch):
    ancestors.write([[-1, 0, 0]], 3, stream=stream)
    monkeypatch.setattr(memory, "upload", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ancestors.write([[-1, 0, 0]], 3, stream=stream)
    assert not ancestors.in_use
