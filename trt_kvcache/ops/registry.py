"""The registry of custom operations: from the name in ``config.json`` of an engine folder to the operation."""

from collections.abc import Callable, Mapping

from trt_kvcache.errors import ConfigError
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.custom_op import CustomOp
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.experts_op import ExpertsOp
from trt_kvcache.ops.packed_linear_op import PackedLinearOp

#: The operations of this package.
BUILT_IN_OPERATIONS: Mapping[str, Callable[..., CustomOp]] = {
    AttentionOp.name: AttentionOp,
    EmbeddingOp.name: EmbeddingOp,
    ExpertsOp.name: ExpertsOp,
    PackedLinearOp.name: PackedLinearOp,
}

#: Everything that was registered in this process, the operations of this package included.
OPERATIONS: dict[str, Callable[..., CustomOp]] = {**BUILT_IN_OPERATIONS}


def register_operation(kind: str, factory: Callable[..., CustomOp]) -> None:
    """Make a custom operation known under a name that engine folders may use.

    An engine folder may then name it instead of an operation of this package with the same inputs and outputs. Register it in
    every process that opens such a folder.

    Parameters
    ----------
    kind : str
        The value of ``operation`` in ``config.json``.
    factory : callable
        Called with the ``attributes`` of ``config.json`` as keyword arguments; returns the operation. Usually the class.

    Raises
    ------
    ConfigError
        The name is taken. Nothing was registered.

    Examples
    --------
    >>> from trt_kvcache.ops.attention_op import AttentionOp
    >>> register_operation("windowed_attention", AttentionOp)
    >>> op = create_operation("windowed_attention", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "window": 512})
    >>> op.attributes["window"]
    512
    >>> unregister_operation("windowed_attention")
    """
    if kind in OPERATIONS:
        raise ConfigError(f"kind: expected a name that is not taken, so none of {', '.join(OPERATIONS)}, got {kind!r}.")
    OPERATIONS[kind] = factory


def unregister_operation(kind: str) -> None:
    """Undo :func:`register_operation`.

    Parameters
    ----------
    kind : str
        A name that was registered.

    Raises
    ------
    ConfigError
        The name was not registered, or belongs to an operation of this package.
    """
    if not is_user_operation(kind):
        raise ConfigError(f"kind: expected a name that was registered, got {kind!r}.")
    del OPERATIONS[kind]


def is_user_operation(kind: str) -> bool:
    """Return whether a name was registered with :func:`register_operation`."""
    return kind in OPERATIONS and kind not in BUILT_IN_OPERATIONS


def create_operation(kind: str, attributes: Mapping[str, int | float]) -> CustomOp:
    """Create a registered operation."""
    return OPERATIONS[kind](**attributes)
