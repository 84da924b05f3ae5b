"""Experts as a custom operation: the router's choice for each token, and the weighted sum of the chosen experts' outputs.

Inputs, in order: rows of the router ``[B, s, hidden]`` and of the experts ``[B, s, width]``, in one dtype; the router's weight float32
``[E, hidden]`` and, if the attributes say so, its ``router_bias``, ``choice_bias`` and ``expert_scale`` float32 ``[E]``; the weights into
the experts ``[E, rows, width]``, with the rows of gate first, and their bias ``[E, rows]`` if there is one; the weights out of them
``[E, width, intermediate_size]``, and their bias. Packed weights are int32 bytes instead: see ``PackedFormat``. Output: ``[B, s, width]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.expert_kernels import MAX_EXPERT_PAIRS, MAX_EXPERT_ROWS, ExpertWeights, expert_down_kernel, expert_up_kernel
from trt_kvcache.kernels.expert_order_kernels import ROW_TILE_WIDTH, count_row_tiles, sort_by_expert_kernel, weighted_sums_kernel
from trt_kvcache.kernels.expert_tile_kernels import expert_tiles_down_kernel, expert_tiles_up_kernel
from trt_kvcache.kernels.router_kernels import choose_experts_kernel, router_logits_kernel
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.ops.expert_attributes import DOWN, UP, ExpertAttributes
from trt_kvcache.ops.packed_format import PackedFormat

#: Rows of a prompt whose outputs of experts are in the workspace at once.
_MAX_TILED_ROWS = 2048

#: Bytes that parts of the workspace are a multiple of.
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an enqueue: slots, new tokens of each, elements of a row for the router, and for the experts; and the dtype of rows."""

    batch: int
    tokens: int
    hidden: int
    width: int
    dtype: str


class ExpertsOp:
    """Choose experts for each token, and add up their outputs (implements :class:`~trt_kvcache.ops.custom_op.CustomOp`).

    Padding is computed, too. A step of up to 8 tokens reads each chosen expert once, a wider one once for each 64 rows that it has.
    """

    name = "experts"

    def __init__(self, **attributes: int | float) -> None:
        self._of = ExpertAttributes.from_attributes(attributes)
        self._formats = {prefix: PackedFormat.from_attributes(attributes, prefix) for prefix in (UP, DOWN)}
        self.attributes: dict[str, int | float] = self._of.attributes()
        for prefix, packed in self._formats.items():
            self.attributes |= {} if packed is None else packed.attributes(prefix)

    def input_types(self, hidden: int, width: int, dtype: str, *, batch: int = -1, tokens: int = -1) -> dict[str, TensorType]:
        """Return the inputs in order, by name."""
        of, experts = self._of, self._of.num_experts
        types = {
            "router_rows": TensorType((batch, tokens, hidden), dtype),
            "rows": TensorType((batch, tokens, width), dtype),
            "router": TensorType((experts, hidden), "float32"),
        }
        types |= {name: TensorType((experts,), "float32") for name in ("router_bias", "choice_bias", "expert_scale") if getattr(of, name)}
        for prefix, outputs, inputs in self._matrices(width):
            packed = self._formats[prefix]
            if packed is None:
                types[prefix] = TensorType((experts, outputs, inputs), dtype)
            else:
                types |= {f"{prefix}_{name}": one for name, one in packed.input_types(experts, outputs, inputs).items()}
            if of.bias:
                types[f"{prefix}_bias"] = TensorType((experts, outputs), dtype)
        return types

    def _matrices(self, width: int) -> tuple[tuple[str, int, int], ...]:
        """Return prefix, outputs and inputs of the matrices of an expert."""
        inner = self._of.intermediate_size
        return (UP, inner * (2 if self._of.gated else 1), width), (DOWN, width, inner)

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """See :meth:`CustomOp.outputs <trt_kvcache.ops.custom_op.CustomOp.outputs>`."""
        sizes = self._sizes(inputs)
        expected = self._types_of(sizes)
        if [*inputs] != [*expected.values()]:
            raise ShapeError(f"experts: expected inputs {_described(expected.values())} ({', '.join(expected)}), got {_described(inputs)}.")
        return (TensorType((sizes.batch, sizes.tokens, sizes.width), sizes.dtype),)

    def _sizes(self, inputs: Sequence[TensorType]) -> _Sizes:
        """Return the sizes that the first two inputs have."""
        if len(inputs) < 2 or len(inputs[0].shape) != 3 or len(inputs[1].shape) != 3:
            raise ShapeError(f"experts: expected rows [B, s, hidden] of router and experts first, got {_described(inputs[:2])}.")
        (batch, tokens, hidden), width = inputs[0].shape, inputs[1].shape[2]
        return _Sizes(batch, tokens, hidden, width, inputs[0].dtype)

    def _types_of(self, sizes: _Sizes) -> dict[str, TensorType]:
        return self.input_types(sizes.hidden, sizes.width, sizes.dtype, batch=sizes.batch, tokens=sizes.tokens)

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """See :meth:`CustomOp.workspace_nbytes <trt_kvcache.ops.custom_op.CustomOp.workspace_nbytes>`.

        Room for the router's results of all rows, and for inner activations, order and outputs of up to 2048 rows.
        """
        sizes = self._sizes(inputs)
        return sum(_padded(one) for one in self._scratch_types(sizes))

    def _scratch_types(self, sizes: _Sizes) -> tuple[TensorType, ...]:
        """Return logits, chosen experts, their weights, inner activations, order, row tiles and products."""
        of, choices, rows = self._of, self._of.experts_per_token, sizes.batch * sizes.tokens
        pairs = min(rows, _MAX_TILED_ROWS) * choices
        tiled = pairs if self._is_tiled(rows) else 0
        return (
            TensorType((rows, of.num_experts), "float32"),
            TensorType((rows, choices), "int32"),
            TensorType((rows, choices), "float32"),
            TensorType((pairs, of.intermediate_size), sizes.dtype),
            TensorType((tiled,), "int32"),
            TensorType((count_row_tiles(tiled, of.num_experts) if tiled else 0, ROW_TILE_WIDTH), "int32"),
            TensorType((tiled, sizes.width), sizes.dtype),
        )

    def _is_tiled(self, rows: int) -> bool:
        return rows > min(MAX_EXPERT_ROWS, MAX_EXPERT_PAIRS // self._of.experts_per_token)

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """See :meth:`CustomOp.enqueue <trt_kvcache.ops.custom_op.CustomOp.enqueue>`. Four launches, or six for each 2048 rows."""
        sizes = self._sizes([TensorType(one.shape, one.dtype) for one in inputs[:2]])
        count = sizes.batch * sizes.tokens
        if not count:
            return
        named = dict(zip(self._types_of(sizes), inputs, strict=True))
        router_rows, rows = (named[name].reshape(count, named[name].shape[2]) for name in ("router_rows", "rows"))
        logits, chosen, factors, *scratch = _parts(workspace, self._scratch_types(sizes))
        optional = (named.get(name) for name in ("router_bias", "choice_bias", "expert_scale"))
        router_bias, choice_bias, expert_scale = optional
        router_logits_kernel(router_rows, named["router"], router_bias, logits, stream)
        choose_experts_kernel(logits, choice_bias, expert_scale, chosen, factors, self._of.router, stream)
        matrices = [(self._weights(named, prefix, *shape), named.get(f"{prefix}_bias")) for prefix, *shape in self._matrices(sizes.width)]
        out = outputs[0].reshape(count, sizes.width)
        if not self._is_tiled(count):
            inner = scratch[0].reshape(*chosen.shape, self._of.intermediate_size)
            expert_up_kernel(rows, *matrices[0], chosen, inner, self._of.epilogue, stream)
            expert_down_kernel(inner, *matrices[1], chosen, factors, out, stream)
            return
        for first in range(0, count, _MAX_TILED_ROWS):
            some = slice(first, min(first + _MAX_TILED_ROWS, count))
            self._run_tiles(rows[some], chosen[some], factors[some], out[some], matrices, scratch, stream)

    def _run_tiles(
        self,
        rows: DeviceTensor,
        chosen: DeviceTensor,
        factors: DeviceTensor,
        out: DeviceTensor,
        matrices: Sequence[tuple[ExpertWeights, DeviceTensor | None]],
        scratch: Sequence[DeviceTensor],
        stream: Any,
    ) -> None:
        """Sort the rows by expert, multiply them, and add up their products."""
        pairs = len(rows) * self._of.experts_per_token
        inner, order, row_tiles, products = scratch
        inner, order, products = inner[:pairs], order[:pairs], products[:pairs]
        row_tiles = row_tiles[: count_row_tiles(pairs, self._of.num_experts)]
        sort_by_expert_kernel(chosen, order, row_tiles, self._of.num_experts, stream)
        expert_tiles_up_kernel(rows, *matrices[0], order, row_tiles, inner, self._of.epilogue, stream)
        expert_tiles_down_kernel(inner, *matrices[1], order, row_tiles, products, stream)
        weighted_sums_kernel(products.reshape(*chosen.shape, out.shape[1]), factors, out, stream)

    def _weights(self, named: Mapping[str, DeviceTensor], prefix: str, outputs: int, inputs: int) -> ExpertWeights:
        packed, experts = self._formats[prefix], self._of.num_experts
        if packed is None:
            return named[prefix]
        stored = [named[f"{prefix}_{name}"] for name in packed.input_types(experts, outputs, inputs)]
        return packed.tensors(stored, experts, outputs, inputs)


def _parts(workspace: DeviceTensor, types: Sequence[TensorType]) -> Iterator[DeviceTensor]:
    """Yield consecutive parts of a workspace."""
    offset = workspace.offset
    for one in types:
        yield DeviceTensor(workspace.allocation, shape=one.shape, dtype=one.dtype, offset=offset)
        offset += _padded(one)


def _padded(one: TensorType) -> int:
    return -(-dense_nbytes(one.shape, one.dtype) // _ALIGNMENT) * _ALIGNMENT


def _described(types: Any) -> str:
    return ", ".join(f"{one.dtype}{list(one.shape)}" for one in types)
