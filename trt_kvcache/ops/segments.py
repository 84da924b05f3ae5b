"""The segments of a decoder, and the operations between them: stated once, for builder, folder, engine and inspection.

Segment ``i`` ends where layer ``i`` attends; the last one ends in the logits. The tensors between are wired by their names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.errors import ConfigError
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.ops.embedding_op import EmbeddingOp

#: Tensors that are bound once: stored in one file of the engine folder, whatever reads them.
EMBEDDING, COS_SIN = "model.embed_tokens.weight", "rope.cos_sin"

_OWN: Mapping[str, Callable[..., CustomOp]] = {AttentionOp.name: AttentionOp, EmbeddingOp.name: EmbeddingOp}

#: The operations that an engine folder may name.
OPERATIONS: dict[str, Callable[..., CustomOp]] = {**_OWN}


def register_operation(kind: str, from_record: Callable[..., CustomOp]) -> None:
    """Let engine folders name another operation, where one of this package with the same inputs and outputs stood.

    Parameters
    ----------
    kind : str
        ``operation`` of its steps in ``config.json``.
    from_record : callable
        Called with the ``attributes`` of a step by name; returns the operation.

    Raises
    ------
    ConfigError
        The name is taken.
    """
    if kind in OPERATIONS:
        raise ConfigError(f"kind: expected another name than {', '.join(OPERATIONS)}, got {kind!r}.")
    OPERATIONS[kind] = from_record


@dataclass(frozen=True, kw_only=True)
class SegmentStep:
    """A part of a step that is a TensorRT engine of its own, with its inputs and outputs."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class OperationStep:
    """A part of a step that is a :class:`~trt_kvcache.ops.custom_op.CustomOp`.

    Parameters
    ----------
    operation : str
        One of :data:`OPERATIONS`.
    attributes : mapping of str to number
        What it is made with.
    inputs, outputs : tuple of str
    """

    operation: str
    attributes: Mapping[str, int | float]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def make(self) -> CustomOp:
        """Return the operation."""
        return OPERATIONS[self.operation](**self.attributes)


Step = SegmentStep | OperationStep


def serves(got: Step, wanted: Step) -> bool:
    """Tell whether a step may stand where another is expected: it is the same, or a registered operation on the same tensors."""
    if isinstance(got, OperationStep) and isinstance(wanted, OperationStep) and got.operation in OPERATIONS.keys() - _OWN.keys():
        return (got.inputs, got.outputs) == (wanted.inputs, wanted.outputs)
    return got == wanted


def hidden_name(layer: int) -> str:
    """Return the name of the hidden state ``[B, s, hidden]`` that enters a layer."""
    return f"hidden_{layer}"


def attention_names(layer: int) -> tuple[str, str, str, str]:
    """Return the names of q, k, v and of the result of the attention of a layer, ``[B, s, heads, D]``."""
    return f"q_{layer}", f"k_{layer}", f"v_{layer}", f"attended_{layer}"


def decoder_constants(model: ModelConfig, cache: KVCacheConfig) -> tuple[TensorSpec, ...]:
    """Return the embedding table ``[vocab, hidden]``, and the angles ``[S, 2, D / 2]`` of all positions."""
    table = (model.vocab_size, model.hidden_size)
    angles = (cache.max_sequence_length, 2, model.head_dim // 2)
    return TensorSpec.input(EMBEDDING, table, cache.dtype), TensorSpec.input(COS_SIN, angles, "float32")


def decoder_steps(model: ModelConfig, cache: KVCacheConfig, names: TensorNames) -> tuple[Step, ...]:
    """Return what a step of an engine of ``model`` over the combined ``cache`` is made of, in order."""
    table, _ = decoder_constants(model, cache)
    attributes = {"num_heads": model.num_attention_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    steps: list[Step] = [
        OperationStep(operation=EmbeddingOp.name, attributes={}, inputs=(EMBEDDING, names.input_ids), outputs=(hidden_name(0),))
    ]
    for layer in range(model.num_layers + 1):
        hidden = (-1, -1, model.hidden_size)
        tensors = [TensorSpec.input(hidden_name(max(layer - 1, 0)), hidden, cache.dtype)]
        if layer:
            attended = (-1, -1, model.num_attention_heads, model.head_dim)
            tensors.append(TensorSpec.input(attention_names(layer - 1)[-1], attended, cache.dtype))
        if layer == model.num_layers:
            tensors.append(TensorSpec.input(names.last_token_ids, (-1, 1), "int32"))
            tensors += [table] if model.tie_word_embeddings else []
            tensors.append(TensorSpec.output(names.logits, (-1, model.vocab_size), "float32"))
            steps.append(SegmentStep(tensors=tuple(tensors)))
            break
        *qkv, attended_name = attention_names(layer)
        counts = (model.num_attention_heads, model.num_kv_heads, model.num_kv_heads)
        tensors += [TensorSpec.output(name, (-1, -1, count, model.head_dim), cache.dtype) for name, count in zip(qkv, counts, strict=True)]
        tensors += [TensorSpec.output(hidden_name(layer), hidden, cache.dtype)] if layer else []
        before, after = names.combined_pair(layer)
        inputs = (*qkv, before, names.kvcache_start_index, COS_SIN)
        steps.append(SegmentStep(tensors=tuple(tensors)))
        steps.append(OperationStep(operation=AttentionOp.name, attributes=attributes, inputs=inputs, outputs=(attended_name, after)))
    return tuple(steps)


def intermediates(steps: Sequence[Step], outer: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors that one step makes and a later one reads, by name.

    Parameters
    ----------
    steps : sequence of Step
    outer : iterable of TensorSpec
        Inputs and outputs of the engine, and its constants.

    Raises
    ------
    KeyError
        A step reads what none before it makes.
    """
    known = {spec.name: spec for spec in outer}
    made: dict[str, TensorSpec] = {}
    for step in steps:
        if isinstance(step, SegmentStep):
            outputs = {spec.name: spec for spec in step.tensors if spec.mode is TensorMode.OUTPUT}
        else:
            types = [TensorType(known[name].shape, known[name].dtype) for name in step.inputs]
            results = zip(step.outputs, step.make().outputs(types), strict=True)
            outputs = {name: TensorSpec.output(name, one.shape, one.dtype) for name, one in results}
        made.update({name: spec for name, spec in outputs.items() if name not in known})
        known.update(made)
    return made


def shape_at(shape: Sequence[int], batch: int, width: int) -> tuple[int, ...]:
    """Return a shape in an enqueue of ``batch`` slots by ``width`` new tokens: they take the place of ``-1``, in this order."""
    sizes = iter((batch, width))
    return tuple(next(sizes) if size < 0 else size for size in shape)
