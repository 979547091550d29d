"""What an output must match: grammars from `response_format`, `structured_outputs` and forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relaxpack.errors import RequestError
from relaxpack.runtime.sampling_params import Grammar
from relaxpack.runtime.server.protocol import ChatBody, NamedTool, SamplingBody, Tool

# Between JSON values. Without an end to it, small models write line breaks until their tokens are spent.
_WHITE_SPACE = r"[ \n\t]{0,20}"


def own_grammar(body: SamplingBody) -> Grammar | None:
    """Of `structured_outputs`."""
    asked = body.structured_outputs
    if asked is None:
        return None
    kinds: dict[str, Any] = {"json_schema": asked.json_, "regex": asked.regex, "choice": asked.choice, "lark": asked.grammar}
    given = [(kind, source) for kind, source in kinds.items() if source is not None]
    if len(given) != 1:
        raise RequestError(f"structured_outputs needs exactly one of json, regex, choice and grammar, got {len(given)}",
                           "structured_outputs")
    kind, source = given[0]
    if kind == "json_schema":
        return _json_grammar(source, "structured_outputs")
    return Grammar(kind, tuple(source) if kind == "choice" else source, "structured_outputs")   # type: ignore[arg-type]


def _json_grammar(schema: Any, param: str = "response_format") -> Grammar:
    """Of a JSON schema, as an object or as text."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}", param) from error
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}, **schema}
    return Grammar("json_schema", json.dumps(schema), param)


def response_grammar(body: ChatBody) -> Grammar | None:
    """Of `response_format`."""
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if body.structured_outputs is not None:
        raise RequestError("response_format and structured_outputs both say what the output must match: give one of them",
                           "response_format")
    if asked.type == "json_object":
        return _json_grammar(asked.schema_ or asked.value or {"type": "object"})
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise RequestError('response_format of type "json_schema" needs json_schema.schema', "response_format.json_schema")
    return _json_grammar(asked.json_schema.schema_)


def forced_tools(body: ChatBody) -> list[Tool]:
    """The tools of which one must be called; none where the model may choose."""
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools: give tools", "tool_choice")
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise RequestError(f"tool_choice names {choice.function.name!r}, but the tools are "
                           f"{', '.join(tool.function.name for tool in tools)}", "tool_choice")
    return named


def call_grammar(tools: Sequence[Tool], argument: str, listed: bool) -> Grammar:
    """One call of one of these tools; `argument` is what the model's format calls the arguments, `listed`: in brackets."""
    calls = [{"type": "object", "properties": {"name": {"const": tool.function.name},
                                               argument: tool.function.parameters or {"type": "object"}},
              "required": ["name", argument], "additionalProperties": False} for tool in tools]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if listed else call
    return _json_grammar(schema)
