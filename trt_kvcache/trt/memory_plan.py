"""Memory planning for the tensors between the stages of an engine: tensors whose lifetimes do not overlap share bytes."""

from collections.abc import Mapping, Sequence

from trt_kvcache.memory.shapes import align_up
from trt_kvcache.ops.segments import Segment, Stage


def assign_offsets(stages: Sequence[Stage], nbytes_by_tensor: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Assign each tensor an offset in one allocation; returns offsets, multiples of 256, and the size.

    Greedy by size: tensors that are live at the same stage do not overlap; a tensor is live from its writer to its last reader.
    """
    lifetimes = _lifetimes(stages)
    offsets: dict[str, int] = {}
    for name in sorted(nbytes_by_tensor, key=lambda name: -nbytes_by_tensor[name]):
        first, last = lifetimes[name]
        occupied = sorted(
            (offsets[other], offsets[other] + nbytes_by_tensor[other])
            for other in offsets
            if lifetimes[other][0] <= last and first <= lifetimes[other][1]
        )
        offset = 0
        for start, end in occupied:
            if offset + nbytes_by_tensor[name] <= start:
                break
            offset = max(offset, align_up(end))
        offsets[name] = offset
    return offsets, max((offsets[name] + nbytes for name, nbytes in nbytes_by_tensor.items()), default=0)


def _lifetimes(stages: Sequence[Stage]) -> dict[str, tuple[int, int]]:
    """Return the indices of the first and the last stage that use each tensor."""
    lifetimes: dict[str, tuple[int, int]] = {}
    for index, stage in enumerate(stages):
        names = [spec.name for spec in stage.tensors] if isinstance(stage, Segment) else [*stage.inputs, *stage.outputs]
        for name in names:
            lifetimes[name] = (lifetimes.get(name, (index, index))[0], index)
    return lifetimes
