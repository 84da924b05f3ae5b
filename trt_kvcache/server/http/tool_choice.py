"""Parameter types of tools, and the grammar of an answer that must call one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trt_kvcache.server.http.api_errors import ApiError
from trt_kvcache.server.http.tool_formats import ToolFormat

#: JSON in one line, as in the chat templates.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the parameters by tool and parameter; malformed descriptions are skipped."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found.setdefault(function["name"], properties if isinstance(properties, Mapping) else {})
    return found


def forced_calls(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], *, name: str | None, several: bool, tag_ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return ``guided_decoding`` of an answer that must be tool calls; ``name`` is the only allowed tool, if given."""
    # tag_ids: tags that are tokens. llguidance accepts such a token only by its id.
    functions = [_function(index, tool) for index, tool in enumerate(tools)]
    wanted = [(tool, parameters) for tool, parameters in functions if name in (None, tool)]
    if not wanted:
        raise ApiError(400, f"tool_choice: expected the name of one of {len(tools)} tools, got {name!r:.80}.", param="tool_choice")

    def tag(text: str) -> str:
        return f"<[{tag_ids[text]}]>" if text in tag_ids else _literal(text)

    rules, names = [], []
    for index, (tool, parameters) in enumerate(wanted):
        names.append(f"call{index}")
        written = json.dumps(tool, ensure_ascii=False)
        if form.names_before_arguments:
            head, tail = f"{_literal(tool)} {tag('[ARGS]')}", ""
        else:
            key = "parameters" if form.name == "llama3_json" else "arguments"
            head, tail = _literal(f'{{"name": {written}, "{key}": '), _literal("}")
        rules.append(f"call{index}: {head} %json {json.dumps({**parameters, 'x-guidance': _JSON_FORM})} {tail}")
    rules.append(f"call: {' | '.join(names)}")
    if form.name == "llama3_json":  # its chat template accepts one call only
        rules.append("start: call")
    elif form.name == "hermes":
        rules.append(f"one: {tag('<tool_call>')} {_literal(chr(10))} call {_literal(chr(10))} {tag('</tool_call>')}")
        rules.append(f"start: one{f' ({_literal(chr(10))} one)*' if several else ''}")
    elif form.names_before_arguments:
        rules.append(f"one: {tag('[TOOL_CALLS]')} call")
        rules.append(f"start: one{'+' if several else ''}")
    else:
        more = f" ({_literal(', ')} call)*" if several else ""
        rules.append(f"start: {tag('[TOOL_CALLS]')} {_literal(' ')}? {_literal('[')} call{more} {_literal(']')}")
    return {"grammar": "\n".join(rules)}


def _literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _function(index: int, tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a tool and the schema of its arguments."""
    where, function = f"tools.{index}.function", tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(400, f"{where}: expected a function with a name, got {function!r:.80}.", param="tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ApiError(400, f"{where}.parameters: expected the schema of an object, got {parameters!r:.80}.", param="tools")
    return function["name"], {"type": "object", **parameters}
