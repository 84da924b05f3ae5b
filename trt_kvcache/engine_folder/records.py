"""What ``config.json`` says of an engine in segments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.memory.shapes import align_up
from trt_kvcache.ops.segments import OperationStep, SegmentStep, Step

#: Plans lie one after another in one file, each at a multiple of this: a page.
PLAN_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of an engine folder: its bytes, and their SHA-256 in hex."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, chunks: Iterable[Any]) -> FileRecord:
        """Return the record of a file of these buffers."""
        nbytes, digest = 0, hashlib.sha256()
        for chunk in chunks:
            nbytes += memoryview(chunk).nbytes
            digest.update(memoryview(chunk))
        return cls(nbytes=nbytes, sha256=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class SegmentsRecord:
    """An engine in segments.

    Parameters
    ----------
    steps : tuple of Step
        Segments and operations, in order.
    plans : tuple of int
        Bytes of the plan of each segment.
    constants : FileRecord
        Of the file of tensors that are bound once.
    """

    steps: tuple[Step, ...]
    plans: tuple[int, ...]
    constants: FileRecord

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of each plan in the file of plans."""
        spans: list[tuple[int, int]] = []
        for nbytes in self.plans:
            start = align_up(spans[-1][1], PLAN_ALIGNMENT) if spans else 0
            spans.append((start, start + nbytes))
        return tuple(spans)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        plans = iter(self.plans)
        steps = [
            {"plan_nbytes": next(plans), "tensors": [{**asdict(spec), "mode": spec.mode.value} for spec in step.tensors]}
            if isinstance(step, SegmentStep)
            else {**asdict(step), "attributes": dict(step.attributes)}
            for step in self.steps
        ]
        return {"steps": steps, "constants": asdict(self.constants)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SegmentsRecord:
        """Read what :meth:`to_dict` wrote. Raises what a missing or wrong value raises: KeyError, TypeError, ValueError."""
        segments = [step for step in data["steps"] if "tensors" in step]
        return cls(
            steps=tuple(map(_step, data["steps"])),
            plans=tuple(segment["plan_nbytes"] for segment in segments),
            constants=FileRecord(**data["constants"]),
        )


def tensor_from_dict(data: Mapping[str, Any]) -> TensorSpec:
    """Read one tensor."""
    return TensorSpec(**{**data, "shape": tuple(data["shape"]), "mode": TensorMode(data["mode"])})


def _step(data: Mapping[str, Any]) -> Step:
    if "tensors" in data:
        return SegmentStep(tensors=tuple(map(tensor_from_dict, data["tensors"])))
    return OperationStep(**{**data, "inputs": tuple(data["inputs"]), "outputs": tuple(data["outputs"])})


def with_padding(plans: Sequence[Any]) -> list[Any]:
    """Return plans with the bytes between them."""
    chunks: list[Any] = []
    for plan in plans:
        nbytes = sum(memoryview(chunk).nbytes for chunk in chunks)
        chunks += [bytes(align_up(nbytes, PLAN_ALIGNMENT) - nbytes), plan]
    return chunks
