"""Where the tensors between the steps of an engine lie: in one block, in which those share bytes that never live together."""

from collections.abc import Mapping, Sequence

from trt_kvcache.memory.shapes import align_up
from trt_kvcache.ops.segments import SegmentStep, Step


def place(steps: Sequence[Step], sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Give each tensor a place. It lives from the step that writes it to the last one that reads it, both included.

    Parameters
    ----------
    steps : sequence of Step
    sizes : mapping of str to int
        Bytes of the tensors to place.

    Returns
    -------
    offsets : dict of str to int
        First byte of each, a multiple of 256.
    nbytes : int
        Of the block.
    """
    lives: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        names = [spec.name for spec in step.tensors] if isinstance(step, SegmentStep) else [*step.inputs, *step.outputs]
        for name in names:
            lives[name] = (lives.get(name, (index, index))[0], index)
    offsets: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        first, last = lives[name]
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other]) for other in offsets if lives[other][0] <= last and first <= lives[other][1]
        )
        offset = 0
        for start, end in taken:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, align_up(end))
        offsets[name] = offset
    return offsets, max((offsets[name] + sizes[name] for name in sizes), default=0)
