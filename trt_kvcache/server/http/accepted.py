"""Fields of OpenAI's chats that clients send and that change no answer here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Text = Annotated[str, Field(max_length=512)]


class Body(BaseModel):
    """A body: unknown fields are errors, and ``"1"`` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class AcceptedFields(Body):
    """What a chat may have besides what it asks for. Values that would ask for something are refused.

    The first group says who asks, how calls of tools are written and what to compute or keep of a request, none of which changes its
    answer. The second one has the only values that mean what is done here in any case, the third one has no value that could be followed.
    """

    user: str | None = None
    safety_identifier: _Text | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: _Text | None = None
    prompt_cache_retention: _Text | None = None

    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = None
    verbosity: Literal["medium"] | None = None

    audio: Literal[None] = None
    functions: Literal[None] = None
    function_call: Literal[None] = None
    web_search_options: Literal[None] = None
