"""``PackedFormat``: the format of packed matrices as attributes of an operation, and their bytes as inputs of it.

TensorRT sees the bytes as int32: plugin layers take no uint8, and TensorRT would give other types a meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.linear_tiles import EXPONENTS, NVFP4_SCALES, PACKED_BITS
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_NBYTES, FRAGMENT_OUTPUTS, MIDDLES, count_groups, count_tiles
from trt_kvcache.kernels.packed_tensors import PackedMatrix, PackedTensors, SuperBlockTensors
from trt_kvcache.kernels.super_block_layout import FACTORS, HIGH_BITS, SUPER_BLOCK, fragment_nbytes
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import TensorType

#: Kinds of values and dtypes of scales. Attributes are numbers: indices of these, from 1 on for kinds, so that 0 means 16-bit weights.
KINDS = (*MIDDLES, *HIGH_BITS)
SCALE_DTYPES = ("float16", "bfloat16", "float32", EXPONENTS, NVFP4_SCALES)

_INT32_NBYTES = 4


@dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """The format of one matrix, or of a stack of matrices in whole tiles: see ``PackedTensors``. Super-blocks have a kind alone."""

    kind: int  # index in KINDS, plus 1
    group_shift: int = 0
    scales: int = 0  # index in SCALE_DTYPES
    shared_scales: int = 0  # 1 if the outputs of a tile share their scales
    zero_points: int = 0  # 1 if there are some

    def __post_init__(self) -> None:
        limits = {"kind": (1, len(KINDS)), "scales": (0, len(SCALE_DTYPES) - 1), "shared_scales": (0, 1), "zero_points": (0, 1)}
        for name, (low, high) in limits.items():
            if getattr(self, name) not in range(low, high + 1):
                raise ConfigError(f"packed weights, {name}: expected {low} to {high}, got {getattr(self, name)!r}.")

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, int | float], prefix: str) -> PackedFormat | None:
        """Read the attributes with a prefix; None if there are none, for 16-bit weights."""
        own = {one.name: int(attributes[name]) for one in fields(cls) if (name := f"{prefix}_{one.name}") in attributes}
        return cls(**own) if own else None

    def attributes(self, prefix: str) -> dict[str, int | float]:
        """Return the format as attributes with a prefix."""
        return {f"{prefix}_{one.name}": getattr(self, one.name) for one in fields(self)}

    @property
    def kind_name(self) -> str:
        """Key of ``PACKED_BITS``."""
        return KINDS[self.kind - 1]

    @property
    def scales_dtype(self) -> str:
        """The dtype of the scales."""
        return SCALE_DTYPES[self.scales]

    @property
    def has_super_blocks(self) -> bool:
        """True of Q4_K, Q5_K and Q6_K: see ``SuperBlockTensors``."""
        return self.kind_name in HIGH_BITS

    @property
    def has_factors(self) -> bool:
        """True of NVFP4: each tile has a factor."""
        return self.scales_dtype == NVFP4_SCALES and not self.has_super_blocks

    def input_types(self, matrices: int, outputs: int, inputs: int) -> dict[str, TensorType]:
        """Return the inputs for ``matrices`` matrices ``[outputs, inputs]``: by name: values, scales, then zero points or factors."""
        return {
            name: TensorType((dense_nbytes(one.shape, one.dtype) // _INT32_NBYTES,), "int32")
            for name, one in self._types(matrices, outputs, inputs).items()
        }

    def _types(self, matrices: int, outputs: int, inputs: int) -> dict[str, TensorType]:
        """Return the tensors as the kernels read them."""
        tiles, fragments, rows = matrices * count_tiles(outputs), -(-inputs // FRAGMENT_INPUTS), FRAGMENT_OUTPUTS // 2
        if self.has_super_blocks:
            return {
                "values": TensorType((tiles, fragments * fragment_nbytes(self.kind_name)), "uint8"),
                "scales": TensorType((tiles, fragments, rows, 8), "uint8"),
                "factors": TensorType((tiles, inputs // SUPER_BLOCK, rows, 2, FACTORS[self.kind_name]), "float16"),
            }
        groups = count_groups(inputs, self.group_shift)
        types = {
            "values": TensorType((tiles, fragments * FRAGMENT_NBYTES[self.kind_name]), "uint8"),
            "scales": TensorType((tiles, groups, 1 if self.shared_scales else rows, 2), self.scales_dtype),
        }
        zero_points = TensorType((tiles, groups, rows, 2), "uint8" if PACKED_BITS[self.kind_name] < 8 else "int8")
        types |= {"zero_points": zero_points} if self.zero_points else {}
        return types | ({"factors": TensorType((2 * tiles, 2), "float32")} if self.has_factors else {})

    def tensors(self, stored: Sequence[DeviceTensor], matrices: int, outputs: int, inputs: int) -> PackedMatrix:
        """Return the matrices over the bytes of an operation's inputs, in the order of :meth:`input_types`."""
        types = self._types(matrices, outputs, inputs)
        views = {
            name: DeviceTensor(bytes_.allocation, shape=one.shape, dtype=one.dtype, offset=bytes_.offset)
            for (name, one), bytes_ in zip(types.items(), stored, strict=True)
        }
        if self.has_super_blocks:
            return SuperBlockTensors(kind=self.kind_name, outputs=outputs, inputs=inputs, **views)
        tiles, factors = len(views["values"]), views.get("factors")
        return PackedTensors(
            kind=self.kind_name,
            outputs=outputs,
            inputs=inputs,
            group_shift=self.group_shift,
            values=views["values"],
            scales=views["scales"],
            zero_points=views.get("zero_points"),
            factors=None if factors is None else factors[:tiles],
            kernel_factors=None if factors is None else factors[tiles:],
        )
