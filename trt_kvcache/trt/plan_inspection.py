"""``inspect_plan``: tensors and profiles of a serialised engine ("plan") without an engine folder, by TensorRT and a GPU."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trt_kvcache._util.checks import one_of
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import EngineError
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin import register
from trt_kvcache.trt.tensors import ProfileRanges, read_ranges, read_tensors


@dataclass(frozen=True, kw_only=True)
class PlanInspection:
    """A plan in plain values."""

    path: Path
    nbytes: int
    tensorrt: str
    tensors: tuple[TensorSpec, ...]
    profiles: tuple[ProfileRanges, ...]
    activations_nbytes: int


def inspect_plan(path: Path, flavour: str = "auto") -> PlanInspection:
    """Read a plan with TensorRT. This needs the GPU, or one like it, that the plan was built for."""
    one_of("TensorRT flavour", flavour, FLAVOURS, error=EngineError)
    plan = path.read_bytes()
    failures = []
    for candidate in FLAVOURS[1:] if flavour == "auto" else (flavour,):
        try:
            return _inspect(path, plan, load(candidate))
        except EngineError as error:
            failures.append(str(error))
    raise EngineError(f"{path}: a plan without its engine folder can be read by TensorRT on a GPU only. {' '.join(failures)}")


def _inspect(path: Path, plan: bytes, tensorrt: TensorRT) -> PlanInspection:
    with suppress(EngineError):  # of a TensorRT in which no plan has our plugin
        register(tensorrt)
    with tensorrt.log.collect() as messages:
        try:
            engine = tensorrt.create("Runtime").deserialize_cuda_engine(plan)
        except (TypeError, RuntimeError):
            engine = None
        if engine is None:
            messages.fail(EngineError, f"{tensorrt} refuses it")
        tensors: Mapping[str, TensorSpec] = read_tensors(tensorrt, engine)
        profiles = tuple(read_ranges(engine, tensors))
        activations = max(int(engine.get_device_memory_size_for_profile_v2(index)) for index in range(len(profiles)))
        return PlanInspection(
            path=path,
            nbytes=len(plan),
            tensorrt=str(tensorrt),
            tensors=tuple(tensors.values()),
            profiles=profiles,
            activations_nbytes=activations,
        )
