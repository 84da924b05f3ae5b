"""The engines that the checks run: TensorRT with each attention variant, and PyTorch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from trt_kvcache.builder.attention_choice import BuildTarget, native_defect
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.doctor.cases import SEGMENTS, VARIANTS, NotHere
from trt_kvcache.doctor.models import CheckedModel
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.engine.attention_variants import attention_variant
from trt_kvcache.errors import EngineError
from trt_kvcache.kernels.attention_tiles import HEAD_DIMS
from trt_kvcache.session.open_model import why_no_torch
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.trt.module import TensorRT, load

#: Name of the case of check C for TensorRT as a whole.
TENSORRT = "TensorRT"

EngineName = Literal["tensorrt", "torch"]


class Subject(NamedTuple):
    """An engine to check."""

    engine: EngineName
    variant: str  # one of VARIANTS; "torch" for PyTorch

    def open(self, settings: Settings, model: CheckedModel, dtype: str, *, cuda_graphs: bool = True) -> InferenceSession:
        """Open a session. Raises NotHere with the reason that this machine, or the variant, cannot run it."""
        reason = self._reason(settings, model, dtype)
        if reason is not None:
            raise NotHere(reason)
        if self.engine == "torch":
            return open_checkpoint(model, dtype, engine="torch", device=settings.device, attention=torch_attention(model, dtype))
        folder = engine_folder(settings, model, dtype, self.variant)
        if settings.dry_run:
            return InferenceSession.open(folder, engine="numpy")
        return InferenceSession.open(folder, engine="tensorrt", device=settings.device, cuda_graphs=cuda_graphs)

    def _reason(self, settings: Settings, model: CheckedModel, dtype: str) -> str | None:
        if self.engine == "torch":
            return torch_reason(settings)
        reason = settings.left_out.get(TENSORRT) or settings.left_out.get(case_name(self.variant, model, dtype))
        return reason or variant_reason(usable_tensorrt(settings), self.variant, model, dtype)


SUBJECTS = (*(Subject("tensorrt", name) for name in VARIANTS), Subject("torch", "torch"))


def case_name(variant: str, model: CheckedModel, dtype: str) -> str:
    """Return the name of the cases of an engine."""
    return f"{variant}, {model.name} model, {dtype}"


def open_checkpoint(model: CheckedModel, dtype: str, **options: Any) -> InferenceSession:
    """Open a session on a model folder, with the sizes of the model."""
    return InferenceSession.from_model(
        model.path,
        dtype=dtype,  # type: ignore[arg-type]
        max_batch_size=model.slots,
        max_sequence_length=model.length,
        max_prefill_length=model.width,
        **options,
    )


def open_reference(model: CheckedModel, dtype: str) -> InferenceSession:
    """Open a session on the NumPy engine."""
    return open_checkpoint(model, dtype, engine="numpy")


def torch_attention(model: CheckedModel, dtype: str) -> str:
    """Return the attention of the PyTorch engine: the kernels of this package if they have the model's head dim."""
    return "plugin" if has_kernels(model, dtype) else "native"


def has_kernels(model: CheckedModel, dtype: str) -> bool:
    """Return True if the attention kernels have the model's head dim and dtype."""
    return dtype != "float32" and model.head_dim in HEAD_DIMS


def usable_tensorrt(settings: Settings) -> TensorRT:
    """Return TensorRT; raises NotHere if it is not installed."""
    try:
        return load(settings.flavour)
    except EngineError as error:
        raise NotHere(str(error)) from None


def torch_reason(settings: Settings) -> str | None:
    """Return why the PyTorch engine cannot run in the memory of the checks, or None."""
    reason = why_no_torch()
    if reason is None and not settings.dry_run:
        from trt_kvcache.torch_engine.device import gpu_failure

        reason = gpu_failure(settings.device)
    return reason


def variant_reason(tensorrt: TensorRT, variant: str, model: CheckedModel, dtype: str) -> str | None:
    """Return why an engine with a kind of attention cannot be built for a model, or None."""
    if variant == SEGMENTS and not tensorrt.is_rtx:
        return f"segments are for TensorRT for RTX, not for {tensorrt}"
    attention = _attention(variant)
    if not tensorrt.supports(attention_variant(attention)):
        return f"{tensorrt} has no {attention_variant(attention).needs}"
    target = BuildTarget(tensorrt=str(tensorrt), is_rtx=tensorrt.is_rtx, release=tensorrt.release)
    if variant == "native" and (defect := native_defect(target)) is not None:
        return defect
    if attention == "plugin" and not has_kernels(model, dtype):
        return f"the attention kernels have no {dtype} with head dim {model.head_dim}"
    return None


def _attention(variant: str) -> str:
    """Return the attention of a build."""
    return "plugin" if variant == SEGMENTS else variant


def engine_folder(settings: Settings, model: CheckedModel, dtype: str, variant: str) -> str:
    """Return the engine folder of a model, which the first check that needs it builds."""
    folder = settings.folder / f"engine-{model.name}-{dtype}-{variant}"
    if not folder.is_dir():
        build_engine(
            model.path,
            folder,
            max_batch_size=model.slots,
            max_sequence_length=model.length,
            max_prefill_length=model.width,
            dtype=dtype,
            attention=_attention(variant),
            plugin_layers="segments" if variant == SEGMENTS else "one-plan",
            device=settings.device,
            flavour=usable_tensorrt(settings).flavour,
        )
    return str(folder)
