"""``Grammar``: the grammar of a guided text, in a format of llguidance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from trt_kvcache.errors import ConfigError, KVCacheError, ProcessorError

_KINDS = ("json", "json_object", "regex", "choice", "grammar")

#: Most characters of a grammar in an error.
_SHOWN = 60


class Grammar:
    """A JSON schema, a regular expression or a Lark grammar, from the ``guided_decoding`` of a request."""

    def __init__(self, guided: Mapping[str, Any]) -> None:
        given = [(name, value) for name, value in guided.items() if value is not None]
        if len(given) != 1 or given[0][0] not in _KINDS:
            raise ConfigError(f"guided decoding: expected one of {', '.join(_KINDS)}, got {', '.join(guided) or 'nothing'}.")
        [(kind, value)] = given
        if kind in ("json", "json_object"):
            text = value if kind == "json" and isinstance(value, str) else _as_json({"type": "object"} if kind == "json_object" else value)
        elif kind == "choice":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
                raise ConfigError(f"guided decoding: choice: expected texts, got {value!r:.80}.")
            text = "start: " + " | ".join(json.dumps(one) for one in value)
        elif isinstance(value, str):
            text = value
        else:
            raise ConfigError(f"guided decoding: {kind}: expected a text, got {value!r:.80}.")
        shown = " ".join((text if kind != "choice" else ", ".join(map(repr, value))).split())
        #: Short form for errors.
        self.shown = f"{kind} {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}"
        #: ``"json"``, ``"regex"`` or ``"grammar"``.
        self.kind = {"json_object": "json", "choice": "grammar"}.get(kind, kind)
        #: Source, in UTF-8.
        self.text = text.encode("utf-8", "replace")

    @cached_property
    def key(self) -> bytes:
        """Hash of kind and source: equal for equal grammars."""
        return hashlib.sha256(self.kind.encode() + b" " + self.text).digest()

    def refused(self, reason: str, *, first: bool) -> KVCacheError:
        """Return the error for a grammar: ``first`` if it fails before the first token, else in the middle of a text."""
        return (ConfigError if first else ProcessorError)(f"guided decoding: {self.shown}: {reason}.")


def _as_json(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ConfigError("guided decoding: json: expected a schema that is less deep, got one of too many levels.") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"guided decoding: json: expected a JSON schema, got an error: {error}.") from None
