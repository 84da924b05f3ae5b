"""Rotary position embedding (RoPE): its variants, and their fields in ``config.json``. :mod:`.rope_table` computes angles."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache._util.checks import int_in_range, one_of, positive_number
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.config_fields import ConfigFields

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")

DEFAULT_THETA = 10000.0

_ORIGINAL = "original_max_position_embeddings"

#: Fields of each variant, besides theta and the rotated part of a head; also the names of our own fields.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate", _ORIGINAL),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL),
    "proportional": ("factor",),
}
_READ_FIELDS = {name for names in _FIELDS.values() for name in names} | {"mscale", "mscale_all_dim"}
#: Limit, above the turns of any frequency over a context.
_MAX_TURNS = 1e9

_NO_OTHER_KINDS: Mapping[str, str] = {}
_KNOWN_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", *_READ_FIELDS})


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the angle of a position.

    Parameters
    ----------
    kind : {"default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"}
        ``"linear"`` divides all positions by ``factor``. ``"dynamic"`` raises ``theta`` for sequences that are longer than
        ``original_max_position_embeddings``. ``"llama3"`` and ``"yarn"`` divide the frequencies of long wavelengths by ``factor``, keep
        frequencies of short wavelengths, and interpolate in between. ``"longrope"`` divides each frequency by a factor of its own.
        ``"proportional"`` pairs the two halves of a whole head, and divides all frequencies by ``factor``; ``partial_rotary_factor`` is the
        part of them, fastest first, that is not 0.
    theta : float
        Base of the geometric series of wavelengths.
    partial_rotary_factor : float
        The part of a head that RoPE is applied to, from its first element on.
    factor : float
        Scaling factor of all kinds but ``"default"``.
    low_freq_factor, high_freq_factor : float
        For ``"llama3"``: it interpolates over the wavelengths from ``original_max_position_embeddings / high_freq_factor`` to
        ``original_max_position_embeddings / low_freq_factor``, in tokens.
    original_max_position_embeddings : int
        Context length during pretraining, in tokens, for ``"dynamic"``, ``"llama3"``, ``"yarn"`` and ``"longrope"``.
    attention_factor : float
        For ``"yarn"`` and ``"longrope"``: factor of cosine and sine.
    beta_fast, beta_slow : float
        For ``"yarn"``: it interpolates over the frequencies that make from ``beta_slow`` to ``beta_fast`` turns over the original context.
    truncate : bool
        For ``"yarn"``: true to round the bounds of that range to whole frequencies.
    short_factor, long_factor : tuple of float
        For ``"longrope"``: the divisor of each frequency, for sequences up to the original context length, and for longer ones.

    Raises
    ------
    ConfigError
        The kind is unknown, or a number is out of range.

    Examples
    --------
    >>> from trt_kvcache.model import RopeConfig
    >>> config = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    >>> rope = RopeConfig.from_dict(config, max_position_embeddings=2048)
    >>> rope.kind, rope.theta, rope.factor
    ('linear', 500000.0, 4.0)
    """

    kind: str
    theta: float
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        one_of("RopeConfig.kind", self.kind, ROPE_KINDS)
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"):
            positive_number(f"RopeConfig.{name}", getattr(self, name))
        for name in ("beta_fast", "beta_slow"):
            if not 1 / _MAX_TURNS <= getattr(self, name) <= _MAX_TURNS:
                raise ConfigError(f"RopeConfig.{name}: expected from {1 / _MAX_TURNS:g} to {_MAX_TURNS:g}, got {getattr(self, name)}.")
        int_in_range(f"RopeConfig.{_ORIGINAL}", self.original_max_position_embeddings, 1, MAX_DIMENSION, error=ConfigError)
        part = self.partial_rotary_factor
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
            raise ConfigError(f"RopeConfig.partial_rotary_factor: expected more than 0 and at most 1, got {short_repr(part)}.")
        for name in ("short_factor", "long_factor"):
            for index, value in enumerate(getattr(self, name)):
                positive_number(f"RopeConfig.{name}[{index}]", value)
        if self.kind == "yarn" and self.theta <= 1:
            raise ConfigError(f"RopeConfig.theta: expected more than 1 for yarn, got {short_repr(self.theta)}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"RopeConfig.high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, got {self.high_freq_factor}."
            )

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of leading elements of a head that are rotated (partial RoPE).

        Parameters
        ----------
        head_dim : int
            Elements of a head.
        """
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)

    def check_head_dim(self, head_dim: int) -> None:
        """Check that heads of a size can be rotated.

        Parameters
        ----------
        head_dim : int
            Elements of a head.

        Raises
        ------
        ConfigError
            The rotated part is empty or odd, has a single pair where the kind needs more, or there are not as many factors of
            ``"longrope"`` as frequencies.
        """
        rotary_dim = self.rotary_dim(head_dim)
        least = 4 if self.kind == "dynamic" else 2
        if rotary_dim % 2 or rotary_dim < least:
            raise ConfigError(
                f"partial_rotary_factor: expected an even number of {least} or more of the {head_dim} elements of a head, got {rotary_dim}."
            )
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            count = len(getattr(self, name))
            if count != rotary_dim // 2:
                raise ConfigError(f"{name}: expected {rotary_dim // 2} factors, one for each frequency, got {count}.")

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        *,
        max_position_embeddings: int,
        original_max_position_embeddings: int | None = None,
        may_be_partial: bool = False,
        other_fields: Collection[str] = (),
        other_kinds: Mapping[str, str] = _NO_OTHER_KINDS,
    ) -> RopeConfig:
        """Read the RoPE fields of a ``config.json`` as transformers 5 or an earlier version writes it.

        Parameters
        ----------
        config : mapping of str to object
            The whole ``config.json``, with ``rope_parameters``, or with ``rope_theta`` and ``rope_scaling``.
        max_position_embeddings : int
            Used if a scaling has no ``original_max_position_embeddings``, as in transformers, which does not look for it next to the
            scaling either.
        original_max_position_embeddings : int, optional
            For families that have it outside the scaling object: it takes precedence.
        may_be_partial : bool
            True if the family reads ``partial_rotary_factor``. It is refused for others, except for 1.
        other_fields : collection of str
            Fields of the scaling that the family reads itself.
        other_kinds : mapping of str to str
            Names of variants in this family, in addition to the names of transformers.

        Returns
        -------
        RopeConfig
            The scaling; without any such field, ``"default"`` with a theta of 10000.

        Raises
        ------
        ConfigError
            The scaling is not supported, or the same value is given twice and differs.
        """
        top = ConfigFields(config)
        spelling, rope = _rope_object(config)
        kind = _kind(rope, spelling, other_kinds)
        known = _KNOWN_FIELDS.union(other_fields)
        unknown = sorted(name for name in rope if name not in known and rope[name] is not None)
        if unknown:
            raise ConfigError(f"{spelling}: expected only {', '.join(sorted(known))}, got {', '.join(unknown):.200} as well.")
        fields = ConfigFields(rope, f"{spelling}.")
        part = fields if "partial_rotary_factor" in fields else top
        for place in () if may_be_partial or kind == "proportional" else (fields, top):
            if "partial_rotary_factor" in place and place.get("partial_rotary_factor") != 1:
                raise place.refusal("partial_rotary_factor", "1 (RoPE over the whole head)")
        found: dict[str, Any] = {
            "theta": fields.number("rope_theta", top.number("rope_theta", DEFAULT_THETA)),
            "partial_rotary_factor": part.number("partial_rotary_factor", 1.0),
        }
        if found["partial_rotary_factor"] > 1:
            raise part.refusal("partial_rotary_factor", "more than 0 and at most 1")
        wanted = _FIELDS[kind]
        if _ORIGINAL in wanted:
            original = original_max_position_embeddings
            if original is None and _ORIGINAL in fields and _ORIGINAL in top and fields.get(_ORIGINAL) != top.get(_ORIGINAL):
                values = f"{short_repr(top.get(_ORIGINAL))} and, in {spelling}, {short_repr(fields.get(_ORIGINAL))}"
                raise ConfigError(f"{_ORIGINAL}: expected one value, got {values}.")
            found[_ORIGINAL] = original or fields.integer(_ORIGINAL, max_position_embeddings)
            if kind == "dynamic" and found[_ORIGINAL] != max_position_embeddings:
                raise fields.refusal(_ORIGINAL, f"max_position_embeddings={max_position_embeddings} with RoPE {kind}")
        if "factor" in wanted:
            implied = {"proportional": 1.0, "longrope": max_position_embeddings / found.get(_ORIGINAL, 1)}
            found["factor"] = fields.number("factor", implied.get(kind))
        if kind == "llama3":
            found |= {name: fields.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        if kind == "yarn":
            found |= {"beta_fast": fields.number("beta_fast", 32.0), "beta_slow": fields.number("beta_slow", 1.0)}
            found |= {"truncate": fields.flag("truncate", True), "attention_factor": _yarn_attention_factor(fields, found["factor"])}
        if kind == "longrope":
            found |= {name: fields.numbers(name) for name in ("short_factor", "long_factor")}
            found["attention_factor"] = fields.number(
                "attention_factor", _longrope_attention_factor(found["factor"], found[_ORIGINAL], fields)
            )
        return cls(kind=kind, **found)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that transformers 5 writes as ``rope_parameters``.

        Returns
        -------
        dict
            Values that JSON can hold.
        """
        result: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.partial_rotary_factor != 1:
            result["partial_rotary_factor"] = self.partial_rotary_factor
        for name in _FIELDS[self.kind]:
            value = getattr(self, name)
            result[name] = list(value) if isinstance(value, tuple) else value
        return result

    def at_length(self, length: int) -> dict[str, Any]:
        """Return a key for comparisons: equal for caches of a length whose rotated keys can be exchanged.

        Parameters
        ----------
        length : int
            Tokens that a slot can hold, S.

        Returns
        -------
        dict
            :meth:`to_dict`, and for variants whose angles depend on the length, the deciding fact: see
            :func:`~trt_kvcache.model.rope_table.rope_table`.
        """
        found = self.to_dict()
        if self.kind == "longrope":
            found["is_long"] = length > self.original_max_position_embeddings
        if self.kind == "dynamic":
            found["length"] = max(length, self.original_max_position_embeddings)
        return found


def _yarn_attention_factor(fields: ConfigFields, factor: float) -> float:
    """Return YaRN's factor of cosine and sine, as transformers infers it."""

    def growth(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        inferred = growth(fields.number("mscale")) / growth(fields.number("mscale_all_dim"))
    else:
        inferred = growth(1.0)
    return fields.number("attention_factor", inferred)


def _longrope_attention_factor(factor: float, original: int, fields: ConfigFields) -> float:
    """Return LongRoPE's factor of cosine and sine, as transformers infers it."""
    if factor <= 1:
        return 1.0
    if original < 2:
        raise fields.refusal(_ORIGINAL, "at least 2")
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _rope_object(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the field of the scaling and its object, which is empty without scaling."""
    given = [(name, config[name]) for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    if not given:
        return "rope_parameters", {}
    if len(given) == 2 and given[0][1] != given[1][1]:
        raise ConfigError("rope_parameters and rope_scaling: expected one of them, or the same in both, got two that differ.")
    name, value = given[0]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected an object, got {short_repr(value)}.")
    if any(isinstance(item, Mapping) for item in value.values()):
        raise ConfigError(f"{name}: expected one RoPE for all layers, got one per layer type: {', '.join(value):.200}.")
    return name, value


def _kind(rope: Mapping[str, Any], spelling: str, other_kinds: Mapping[str, str]) -> str:
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    kinds = [other_kinds.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if len(kinds) > 1 and kinds[0] != kinds[1]:
        raise ConfigError(f"{spelling}: expected `rope_type` and `type` to agree, got {short_repr(kinds[0])} and {short_repr(kinds[1])}.")
    kind = kinds[0] if kinds else "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{spelling}: RoPE scaling {short_repr(kind)} is not supported. Supported: {', '.join(ROPE_KINDS)}.")
    return str(kind)
