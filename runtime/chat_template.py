"""`ChatTemplate`: messages to a prompt, with the checkpoint's own Jinja template in a sandbox.

Offers the globals that the transformers library offers, so published templates render to the same string.
What users wrote is marked while rendering, so that special tokens in it stay plain text when the prompt is
encoded.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from relaxpack.errors import RequestError, TokenizerError
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.tool_calls import ToolFormat, detect_format

Message = Mapping[str, Any]
NO_TEMPLATE = ("this model has no chat template, so it cannot chat: use raw completion "
               "(`relaxpack generate --raw`, /v1/completions), or build the bundle "
               "again from a checkpoint with a chat_template")


class _RaisedByTemplate(jinja2.TemplateError):
    pass


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders its body."""

    tags = {"generation"}   # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


class ChatTemplate:
    """The templates of one bundle. `clock` gives the time that `strftime_now` formats."""

    def __init__(self, tokenizer: Tokenizer, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self._tokenizer = tokenizer
        text = tokenizer.text
        sources = dict(text.named_templates)
        if text.chat_template is not None:
            sources["default"] = text.chat_template
        self._sources = sources
        self._env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self._env.filters["tojson"] = _tojson
        self._env.globals["raise_exception"] = _raise_exception
        self._env.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, set[str]] = {}
        self._rules: dict[str, _MarkRules] = {}
        self._special = {k: str(v) for k, v in text.special_tokens.items() if isinstance(v, str)}
        own = {"bos_token": text.bos_token, "eos_token": text.eos_token}
        self._special |= {k: v for k, v in own.items() if v}

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def names(self) -> list[str]:
        return sorted(self._sources)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls, by the template that is used with tools."""
        return detect_format(self._sources.get("tool_use") or self._sources.get("default"))

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, name: str | None = None, fold_system: bool = False,
               **variables: Any) -> str:
        """The prompt as one string. `name` picks one of several templates; by default `tool_use` where
        tools are given and it exists. `fold_system` moves a system message into the first user message."""
        normal = [normalize_message(message) for message in messages]
        if not normal:
            raise RequestError("messages is empty: give at least one message", param="messages")
        if fold_system:
            normal = fold_system_message(normal)
        return self._render(normal, list(tools) if tools else None, add_generation_prompt, name, variables)

    def encode(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, name: str | None = None, fold_system: bool = False,
               special_in_content: bool = False, **variables: Any) -> list[int]:
        """The prompt as token ids. Special tokens that stand in messages or tools are encoded as plain
        characters; `special_in_content=True` reads them as special tokens, as transformers does."""
        if special_in_content:
            text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, name=name,
                               fold_system=fold_system, **variables)
            return self._tokenizer.encode_template(text, {})
        marker = self._marker(name, bool(tools))
        marked = [marker.mark_message(normalize_message(message)) for message in messages]
        text = self.render(marked, tools=[marker.mark(tool, ()) for tool in tools] if tools else None,
                           add_generation_prompt=add_generation_prompt, name=name, fold_system=fold_system,
                           **variables)
        return self._tokenizer.encode_template(text, marker.literals)

    def encode_next(self, messages: Sequence[Message], known_ids: Sequence[int], known: int,
                    **options: Any) -> list[int]:
        """Like `encode`, for a conversation that goes on: `known_ids` are the ids of the first `known` messages as
        they were prefilled and generated, and they are kept as they are wherever the template only appends."""
        added = self._encode_added(messages, known_ids, known, **options) if known and known_ids else None
        return self.encode(messages, **options) if added is None else [*known_ids, *added]

    def _encode_added(self, messages: Sequence[Message], known_ids: Sequence[int], known: int,
                      name: str | None = None, **options: Any) -> list[int] | None:
        """What comes behind `known_ids`; None if the template renders the known messages differently now."""
        marker = self._marker(name, bool(options.get("tools")))
        marked = [marker.mark_message(normalize_message(message)) for message in messages]
        whole = self.render(marked, name=name, **options)
        try:
            before = self.render(marked[:known], name=name, **{**options, "add_generation_prompt": False})
        except RequestError:
            return None
        ends = [match for match in self._tokenizer.find_special(before)
                if self._tokenizer.token_id(match.group()) in self._tokenizer.text.end_token_ids]
        if not whole.startswith(before) or not ends or before[ends[-1].end():].strip():
            return None
        # Encoded from the end token on, as in the whole text: what stands behind a special token does not depend on
        # what stands before it. An answer that was cut off has no end token yet.
        added = self._tokenizer.encode_template(whole[ends[-1].start():], marker.literals)
        return added[1:] if known_ids[-1] in self._tokenizer.text.end_token_ids else added

    def _pick(self, name: str | None, with_tools: bool) -> str:
        if not self._sources:
            raise RequestError(NO_TEMPLATE, param="messages")
        if name is not None and name not in self._sources:
            raise RequestError(f"no chat template named {name!r}: this bundle has {', '.join(self.names)}",
                               param="chat_template")
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        return name if name in self._sources else self.names[0]

    def _marker(self, name: str | None, with_tools: bool) -> _Marker:
        picked = self._pick(name, with_tools)
        if picked not in self._rules:
            self._rules[picked] = _MarkRules(self._tokenizer.special_strings, self._sources[picked])
        return _Marker(self._tokenizer, self._rules[picked])

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._templates:
            try:
                self._templates[name] = self._env.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise TokenizerError(f"chat template {name!r} is not valid Jinja: {error.message} "
                                     f"(line {error.lineno})") from error
        return self._templates[name]

    def _variables_of(self, name: str) -> set[str]:
        if name not in self._variables:
            self._variables[name] = jinja2.meta.find_undeclared_variables(self._env.parse(self._sources[name]))
        return self._variables[name]

    def _render(self, messages: list[dict[str, Any]], tools: list[Mapping[str, Any]] | None,
                add_generation_prompt: bool, name: str | None, variables: Mapping[str, Any]) -> str:
        picked = self._pick(name, bool(tools))
        template = self._template(picked)
        if tools and "tools" not in self._variables_of(picked):
            raise RequestError("this model's chat template has no place for tools: leave tools out, "
                               "or use a model trained to call tools", param="tools")
        try:
            return template.render({**self._special, "documents": None, **variables, "messages": messages,
                                    "tools": tools, "add_generation_prompt": add_generation_prompt})
        except _RaisedByTemplate as error:
            raise RequestError(str(error), param="messages") from error
        except jinja2.sandbox.SecurityError as error:
            raise TokenizerError(f"chat template {picked!r} does what is forbidden: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise RequestError(f"the chat template cannot render these messages: {error}",
                               param="messages") from error


_LOOKED_FOR = re.compile(r"""split\(\s*(['"])(.+?)\1|(['"])([^'"]+)\3\s+in\s""")


class _MarkRules:
    """What `_Marker` must know of one template and vocabulary, worked out once.

    `heads`, `tails`: proper prefixes and suffixes of special tokens. `visible`: special tokens that the template looks
    for in what the assistant said ("</think>"); there they must stay as they are.
    """

    def __init__(self, specials: Sequence[str], template_source: str) -> None:
        self.heads = {s[:n] for s in specials for n in range(1, len(s))}
        self.tails = {s[n:] for s in specials for n in range(1, len(s))}
        self.longest = max(map(len, specials), default=0)
        looked_for = {match[2] or match[4] for match in _LOOKED_FOR.finditer(template_source)}
        self.visible = frozenset(specials) & looked_for


class _Marker:
    """Replaces special tokens in user text by marks that survive trimming, case changes and JSON.

    Marks are decimal digits: no template treats them as space, quotes or markup. A random part makes them
    impossible to type. Also marked are ends of a text that could form a special token together with what
    stands next to it.
    """

    def __init__(self, tokenizer: Tokenizer, rules: _MarkRules) -> None:
        self._tokenizer, self._rules = tokenizer, rules
        self._nonce = f"{secrets.randbelow(10**20):020d}"
        self.literals: dict[str, str] = {}

    def mark_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        keep = self._rules.visible if message.get("role") == "assistant" else ()
        return {key: self.mark(value, keep) for key, value in message.items()}

    def mark(self, value: Any, keep: Collection[str]) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, keep)
        if isinstance(value, Mapping):
            return {self.mark(k, keep): self.mark(v, keep) for k, v in value.items()}
        return [self.mark(item, keep) for item in value] if isinstance(value, list | tuple) else value

    def _mark_text(self, text: str, keep: Collection[str]) -> str:
        pieces, position = [], 0
        for match in self._tokenizer.find_special(text):
            pieces.append(text[position:match.start()])
            pieces.append(match.group() if match.group() in keep else self._new_mark(match.group()))
            position = match.end()
        last = text[position:]
        if position == 0:
            last = self._mark_end(self._mark_start(last))
        else:
            pieces[0] = self._mark_start(pieces[0])
            last = self._mark_end(last)
        return "".join([*pieces, last])

    def _mark_start(self, text: str) -> str:
        body = text.lstrip()
        for n in range(min(len(body), self._rules.longest - 1), 0, -1):
            if body[:n] in self._rules.tails:
                return text[:len(text) - len(body)] + self._new_mark(body[:n]) + body[n:]
        return text

    def _mark_end(self, text: str) -> str:
        body = text.rstrip()
        for n in range(min(len(body), self._rules.longest - 1), 0, -1):
            if body[len(body) - n:] in self._rules.heads:
                return body[:len(body) - n] + self._new_mark(body[len(body) - n:]) + text[len(body):]
        return text

    def _new_mark(self, literal: str) -> str:
        mark = f"{self._nonce}{len(self.literals):08d}"
        self.literals[mark] = literal
        return mark


def normalize_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content one string, tool-call arguments an object."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"each message needs a role, got {message!r:.200}", param="messages")
    result = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    result["content"] = _join_parts(content) if isinstance(content, list | tuple) else content or ""
    if not isinstance(result["content"], str):
        raise RequestError(f"message content must be a string or text parts, got {content!r:.200}",
                           param="messages")
    if result.get("tool_calls"):
        result["tool_calls"] = [_with_object_arguments(call) for call in result["tool_calls"]]
    return result


def _join_parts(parts: Sequence[Any]) -> str:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"content part of type {kind!r} is not supported: only text is",
                               param="messages")
    return "".join(part["text"] for part in parts)


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"arguments of tool call {function.get('name')!r} are not JSON: {error}",
                           param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def fold_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages put in front of the first user message, for templates without a system role."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    others = [m for m in messages if m["role"] != "system"]
    first = next((n for n, m in enumerate(others) if m["role"] == "user"), None)
    if not system or first is None:
        return list(messages)
    others[first] = {**others[first], "content": "\n\n".join([*system, others[first]["content"]])}
    return others
