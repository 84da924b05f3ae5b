"""``Quantization``: weight-only quantization of a 16-bit model when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError

#: Schemes of a matrix: bits, and the inputs that share a scale (None for all).
SCHEMES: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, 32), "int4:32": (4, 32), "int4:128": (4, 128)}

_HINT = "Such as int8, int4, int4:128, or int4:32,head=int8."


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Schemes by which weights are rounded to the nearest multiples of a scale."""

    weights: str
    embedding: str | None = None
    head: str | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "embedding", "head"):
            scheme = getattr(self, name)
            if scheme is None and name != "weights":
                continue
            if not isinstance(scheme, str) or scheme not in SCHEMES:
                raise ConfigError(f"quantize: {name}: expected one of {', '.join(SCHEMES)}, got {short_repr(scheme)}. {_HINT}")
            if scheme == "int4":
                object.__setattr__(self, name, "int4:32")

    @classmethod
    def parse(cls, text: str | Quantization) -> Quantization:
        """Parse ``WEIGHTS[,embedding=...][,head=...]``, the text of :meth:`__str__`. Raises ConfigError."""
        if isinstance(text, Quantization):
            return text
        if not isinstance(text, str):
            raise ConfigError(f"quantize: expected a text, got {short_repr(text)}. {_HINT}")
        weights, *others = (part.strip() for part in text.split(","))
        fields: dict[str, str] = {}
        for other in others:
            name, equals, scheme = other.partition("=")
            if name not in ("embedding", "head") or not equals or name in fields:
                raise ConfigError(
                    f"quantize: expected embedding=... and head=... after the linear layers, got {short_repr(other)}. {_HINT}"
                )
            fields[name] = scheme
        return cls(weights=weights, **fields)

    def __str__(self) -> str:
        others = [f",{name}={scheme}" for name, scheme in (("embedding", self.embedding), ("head", self.head)) if scheme]
        return self.weights + "".join(others)
