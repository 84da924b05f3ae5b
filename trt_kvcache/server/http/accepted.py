"""Fields of OpenAI's chat API that are accepted and do not change the answer."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_Text = Annotated[str, Field(max_length=512)]

#: Most unknown fields that an error names.
_SHOWN_UNKNOWN = 6


def at_most(count: int) -> BeforeValidator:
    """Return a validator that refuses an object with more members, before any of them is validated."""

    def checked(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"expected at most {count} members, got {len(value)}")
        return value

    return BeforeValidator(checked)


class Body(BaseModel):
    """A body: unknown fields are errors, and ``"1"`` is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, found: Any) -> Any:
        """Drop all unknown fields but the first ones: each would make an error."""
        if not isinstance(found, dict) or len(found) <= len(cls.model_fields) or cls.model_config["extra"] != "forbid":
            return found
        known = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
        unknown = islice((name for name in found if name not in known), _SHOWN_UNKNOWN)
        return {name: found[name] for name in (*(known & found.keys()), *unknown)}


class AcceptedFields(Body):
    """Fields without effect on the answer. Values that would need an effect are refused."""

    # About the caller, or hints for speed and storage.
    user: str | None = None
    safety_identifier: _Text | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: _Text | None = None
    prompt_cache_retention: _Text | None = None

    # Only the values that describe this server.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=8, fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None

    # Unsupported.
    audio: Literal[None] = None
    functions: Literal[None] = None
    function_call: Literal[None] = None
    web_search_options: Literal[None] = None
