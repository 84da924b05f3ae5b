"""Fields of OpenAI's chats that clients send and that change no answer here."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_Text = Annotated[str, Field(max_length=512)]

#: Unknown fields of which it is said that they are.
_SHOWN_UNKNOWN = 6


def at_most(count: int) -> BeforeValidator:
    """Return what refuses an object with more members, before it looks at any of them."""

    def checked(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"expected at most {count} members, got {len(value)}")
        return value

    return BeforeValidator(checked)


class Body(BaseModel):
    """A body: unknown fields are errors, and ``"1"`` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, found: Any) -> Any:
        """Leave all unknown fields out but the first ones: of each there would be a complaint."""
        if not isinstance(found, dict) or len(found) <= len(cls.model_fields) or cls.model_config["extra"] != "forbid":
            return found
        known = {field.alias or name for name, field in cls.model_fields.items()} | set(cls.model_fields)
        unknown = islice((name for name in found if name not in known), _SHOWN_UNKNOWN)
        return {name: found[name] for name in (*(known & found.keys()), *unknown)}


class AcceptedFields(Body):
    """What a chat may have besides what it asks for. Values that would ask for something are refused."""

    user: str | None = None
    safety_identifier: _Text | None = None
    metadata: Annotated[dict[str, str] | None, at_most(16)] = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: _Text | None = None
    prompt_cache_retention: _Text | None = None

    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=8, fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None

    audio: Literal[None] = None
    functions: Literal[None] = None
    function_call: Literal[None] = None
    web_search_options: Literal[None] = None
