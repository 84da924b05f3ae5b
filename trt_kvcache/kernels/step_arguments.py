"""Steps of a compaction as arguments of launches."""

from collections.abc import Sequence
from dataclasses import dataclass

from trt_kvcache.kernels.arguments import STEP_COUNTS
from trt_kvcache.kernels.steps import REGISTER, Step

_DESTINATION_BIT, _SOURCE_BIT = 31, 47


@dataclass(frozen=True)
class StepArguments:
    """One launch of a compaction: ``form`` is the number at the end of the kernel's name, and of arguments for steps."""

    form: int
    longest: int
    count: int
    packed: tuple[int, ...]


def pack_steps(steps: Sequence[Step]) -> StepArguments:
    """Return the arguments of a launch that does these steps, one after another."""
    form = next(form for form in STEP_COUNTS if form >= len(steps))
    packed = [source << _SOURCE_BIT | destination << _DESTINATION_BIT | tokens for source, destination, tokens in steps]
    longest = max(tokens for _, _, tokens in steps)
    return StepArguments(form, longest, len(steps), (*packed, *[0] * (form - len(packed))))


def pack_direct_steps(steps: Sequence[Step]) -> StepArguments:
    """Return the same for a kernel that does all steps of a launch at once, and so needs no register."""
    held = REGISTER
    direct = []
    for step in steps:
        if step.destination == REGISTER:
            held = step.source
        else:
            direct.append(step._replace(source=held) if step.source == REGISTER else step)
    return pack_steps(direct)
