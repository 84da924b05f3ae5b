"""The names under which engine folders find custom operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trt_kvcache.errors import ConfigError
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.registry import OPERATIONS, create_operation, is_user_operation, register_operation, unregister_operation

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@pytest.fixture
def registered() -> Iterator[None]:
    """An operation of a user, called ``mine``."""
    register_operation("mine", AttentionOp)
    yield
    unregister_operation("mine")


def test_the_operations_of_this_package_are_there() -> None:
    assert isinstance(create_operation("attention", HEADS), AttentionOp)
    assert isinstance(create_operation("embedding", {}), EmbeddingOp)
    assert not is_user_operation("attention")


@pytest.mark.usefixtures("registered")
def test_an_operation_is_created_with_its_attributes() -> None:
    op = create_operation("mine", {**HEADS, "window": 5})
    assert isinstance(op, AttentionOp)
    assert op.attributes["window"] == 5
    assert is_user_operation("mine")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["mine", "attention"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    before = dict(OPERATIONS)
    with pytest.raises(ConfigError, match=rf"^kind: expected another name than attention, embedding, mine, got '{name}'\.$"):
        register_operation(name, EmbeddingOp)
    assert before == OPERATIONS


def test_an_operation_can_be_unregistered() -> None:
    register_operation("short-lived", EmbeddingOp)
    unregister_operation("short-lived")
    assert not is_user_operation("short-lived")
    with pytest.raises(KeyError):
        create_operation("short-lived", {})


@pytest.mark.parametrize("name", ["attention", "unknown"])
def test_only_registered_names_can_be_unregistered(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^kind: expected a name that was registered, got '{name}'\.$"):
        unregister_operation(name)
    assert "attention" in OPERATIONS
