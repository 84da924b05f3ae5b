"""Memory planning for the tensors between the stages of an engine: tensors whose lifetimes do not overlap share bytes."""

from collections.abc import Mapping, Sequence

from trt_kvcache.memory.shapes import align_up
from trt_kvcache.ops.segments import Segment, Stage


def assign_offsets(stages: Sequence[Stage], nbytes_by_tensor: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Assign each tensor an offset in one allocation.

    A tensor is live from the stage that writes it to the last stage that reads it, both included. Two tensors that are live at the
    same stage never overlap.

    Parameters
    ----------
    stages : sequence of Segment or CustomOpNode
        In the order in which they run.
    nbytes_by_tensor : mapping of str to int
        Sizes of the tensors to place. Other tensors of the stages are left out.

    Returns
    -------
    offsets : dict of str to int
        Offset of each tensor in bytes, a multiple of 256.
    nbytes : int
        Size of the allocation.

    Notes
    -----
    Greedy by size: the largest tensor is placed first, each at the lowest offset that is free during its lifetime.

    Examples
    --------
    ``a`` is dead once ``b`` is written, so ``c`` takes its place.

    >>> from trt_kvcache.ops.segments import CustomOpNode
    >>> def op(before, after):
    ...     return CustomOpNode(operation="embedding", attributes={}, inputs=(before,), outputs=(after,))
    >>> assign_offsets([op("a", "b"), op("b", "c")], {"a": 512, "b": 256, "c": 512})
    ({'a': 0, 'c': 0, 'b': 512}, 768)
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
