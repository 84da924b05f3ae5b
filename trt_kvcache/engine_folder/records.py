"""Records in ``config.json``: sizes and hashes of files, the plan of each segment, path and fingerprint of the checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.memory.shapes import align_up
from trt_kvcache.ops.segments import CustomOpNode, Segment, Stage

#: Plans of segments follow each other in one file; each starts at a multiple of this many bytes (a page).
PLAN_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and hash of a file in an engine folder."""

    nbytes: int
    sha256: str  # hex

    @classmethod
    def of(cls, chunks: Iterable[Any]) -> FileRecord:
        """Return the record of a file that consists of these buffers."""
        nbytes, digest = 0, hashlib.sha256()
        for chunk in chunks:
            nbytes += memoryview(chunk).nbytes
            digest.update(memoryview(chunk))
        return cls(nbytes=nbytes, sha256=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """The checkpoint that an engine was built from."""

    path: str  # absolute path of its folder at the time of the build
    fingerprint: str  # Checkpoint.fingerprint
    nbytes: int  # of its weights
    embedded: bool  # the engine folder holds a copy
    weights: str = ""  # format of the weights in the engine: WeightsSummary
    quantize: str = ""  # rounding of weights at the build; empty for none
    adapter: str = ""  # absolute path of the folder of the merged adapter at the time of the build; empty for none
    adapter_fingerprint: str = ""  # LoraAdapter.fingerprint


@dataclass(frozen=True, kw_only=True)
class SegmentsRecord:
    """An engine in segments."""

    stages: tuple[Stage, ...]  # in the order in which they run
    plans: tuple[int, ...]  # bytes of the plan of each segment
    constants: FileRecord

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of each plan in ``engine.plan``."""
        spans: list[tuple[int, int]] = []
        for nbytes in self.plans:
            start = align_up(spans[-1][1], PLAN_ALIGNMENT) if spans else 0
            spans.append((start, start + nbytes))
        return tuple(spans)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back. The format calls the stages ``steps``."""
        plans = iter(self.plans)
        steps = [
            {"plan_nbytes": next(plans), "tensors": list(map(tensor_to_dict, stage.tensors))}
            if isinstance(stage, Segment)
            else {**asdict(stage), "attributes": dict(stage.attributes)}
            for stage in self.stages
        ]
        return {"steps": steps, "constants": asdict(self.constants)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SegmentsRecord:
        """Read what :meth:`to_dict` wrote; the registry of operations is not read."""
        segments = [step for step in data["steps"] if "tensors" in step]
        return cls(
            stages=tuple(map(_stage_from_dict, data["steps"])),
            plans=tuple(segment["plan_nbytes"] for segment in segments),
            constants=FileRecord(**data["constants"]),
        )


def tensor_to_dict(spec: TensorSpec) -> dict[str, Any]:
    """Return plain JSON values of one tensor."""
    return {**asdict(spec), "shape": list(spec.shape), "mode": spec.mode.value}


def tensor_from_dict(data: Mapping[str, Any]) -> TensorSpec:
    """Read one tensor."""
    return TensorSpec(**{**data, "shape": tuple(data["shape"]), "mode": TensorMode(data["mode"])})


def _stage_from_dict(data: Mapping[str, Any]) -> Stage:
    """Read one stage: a segment has tensors, an operation has inputs and outputs."""
    if "tensors" in data:
        return Segment(tensors=tuple(map(tensor_from_dict, data["tensors"])))
    return CustomOpNode(**{**data, "inputs": tuple(data["inputs"]), "outputs": tuple(data["outputs"])})


def with_padding(plans: Sequence[Any]) -> list[Any]:
    """Return the buffers of ``engine.plan``: the plans, and padding between them as :attr:`SegmentsRecord.spans` expects."""
    chunks: list[Any] = []
    for plan in plans:
        nbytes = sum(memoryview(chunk).nbytes for chunk in chunks)
        chunks += [bytes(align_up(nbytes, PLAN_ALIGNMENT) - nbytes), plan]
    return chunks
