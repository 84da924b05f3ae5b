"""``StepAncestors``: trees of the new tokens of slots as bits, in any memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.models import SMALL
from trt_kvcache.engine.step_ancestors import StepAncestors, ancestor_bits, tree_inputs
from trt_kvcache.model import ModelConfig, NormConfig, QkNormConfig, QueryScaling

LLAMA = ModelConfig.from_dict(SMALL)


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


@pytest.mark.parametrize("is_input", [False, True])
def test_trees_that_kernels_write_run_until_the_next_write(memory, stream, is_input):
    ancestors = StepAncestors(memory, max_slots=3, is_input=is_input)
    tokens, depths = ancestors.written_on_device(2, 3)
    memory.upload(tokens, np.array([1, 3, 5, 1, 2, 4]), stream=stream)
    assert ancestors.in_use
    assert read(ancestors, memory, stream, 2, 3).tolist() == [[1, 3, 5], [1, 2, 4]]
    assert (depths is not None) == is_input
    if depths is not None:
        assert (depths.ptr, depths.shape, depths.dtype) == (ancestors.addresses["tree_depths"], (6,), "int32")
    ancestors.write(None, 0, stream=stream)
    assert not ancestors.in_use
    ancestors.close()


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


@pytest.fixture
def read_always(memory):
    """Of an engine that reads them in each enqueue."""
    found = StepAncestors(memory, max_slots=3, is_input=True)
    yield found
    found.close()


def test_chains_have_all_bits_where_the_engine_reads_them_always(read_always, memory, stream):
    assert (read(read_always, memory, stream, 3, 64) == -1).all()
    assert not read_always.in_use
    read_always.write([[-1, 0, 0], [-1], []], 3, stream=stream)
    assert read(read_always, memory, stream, 3, 3).tolist() == [[1, 3, 5], [1, 2, 4], [1, 2, 4]]
    assert read_always.in_use
    read_always.write(None, 200, stream=stream)
    assert (read(read_always, memory, stream, 3, 64) == -1).all()
    assert not read_always.in_use


@pytest.mark.parametrize("parents", [None, [[-1, 0, 0]]], ids=["chains", "a tree"])
def test_after_a_write_that_fails_the_engine_may_still_read_a_tree(read_always, memory, stream, monkeypatch, parents):
    """So the next step of chains writes chains."""
    read_always.write([[-1, 0, 0]], 3, stream=stream)
    memory.synchronize(stream)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "upload", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read_always.write(parents, 3, stream=stream)
    assert read_always.in_use


def changed_model(**changes):
    [layer, *_] = LLAMA.layers
    return replace(LLAMA, layers=(replace(layer, mixer=replace(layer.mixer, **changes)),))


def test_networks_that_compute_with_positions_read_depths():
    norm = NormConfig(epsilon=1e-5)
    plain = [LLAMA, changed_model(qk_norm=QkNormConfig(norm=norm))]
    reading = [
        changed_model(qk_norm=QkNormConfig(norm=norm, after_rope=True)),
        changed_model(query_scaling=QueryScaling(beta=0.5, period=3)),
    ]
    for model, names in [*((one, ["ancestors"]) for one in plain), *((one, ["ancestors", "tree_depths"]) for one in reading)]:
        assert [spec.name for spec in tree_inputs(model, 3)] == names


def test_depths_follow_the_ancestors(read_always, memory, stream):
    read_always.write([[-1, 0, 0, 2], [-1], []], 4, stream=stream)
    depths = np.zeros(3 * 32, np.int64)
    start = read_always.addresses["tree_depths"] - read_always.addresses["ancestors"]
    assert start == 3 * 64 * 8
    memory.download(depths, read_always._table[start // 8 :], stream=stream)
    memory.synchronize(stream)
    assert depths.view(np.int32)[:12].tolist() == [0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    read_always.write(None, 4, stream=stream)
    memory.download(depths, read_always._table[start // 8 :], stream=stream)
    memory.synchronize(stream)
    assert (depths == -1).all()
