"""Operations by the names that engine folders use."""

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError
from trt_kvcache.ops import registry
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.registry import create_operation, is_user_operation, register_operation, unregister_operation

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "OPERATIONS", dict(registry.OPERATIONS))


@pytest.mark.parametrize(("kind", "attributes", "expected"), [("attention", HEADS, AttentionOp), ("embedding", {}, EmbeddingOp)])
def test_operations_of_this_package(kind, attributes, expected):
    op = create_operation(kind, attributes)
    assert type(op) is expected
    assert attributes.items() <= op.attributes.items()
    assert not is_user_operation(kind)


def test_a_registered_operation_is_created_with_its_attributes():
    register_operation("windowed", AttentionOp)
    assert create_operation("windowed", {**HEADS, "window": 5}).attributes["window"] == 5
    assert is_user_operation("windowed")


@pytest.mark.parametrize("kind", ["attention", "windowed"])
def test_a_name_is_registered_once(kind):
    register_operation("windowed", AttentionOp)
    before = dict(registry.OPERATIONS)
    with raises(ConfigError, "kind", expected="name that is not taken", got=f"'{kind}'"):
        register_operation(kind, EmbeddingOp)
    assert before == registry.OPERATIONS


def test_an_unregistered_name_is_free_again():
    register_operation("windowed", AttentionOp)
    unregister_operation("windowed")
    with pytest.raises(KeyError):
        create_operation("windowed", HEADS)
    register_operation("windowed", AttentionOp)


@pytest.mark.parametrize("kind", ["attention", "embedding", "unknown"])
def test_only_registered_names_can_be_unregistered(kind):
    with raises(ConfigError, "kind", expected="name that was registered", got=f"'{kind}'"):
        unregister_operation(kind)
    assert set(registry.OPERATIONS) == {"attention", "embedding", "experts", "packed_linear"}
