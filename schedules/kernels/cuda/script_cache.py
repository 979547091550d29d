"""What TVMScript's parser need not do again. It reads the source of an inlined function at every definition, parses it at
every call, and compiles every expression of it: most of the time that a kernel takes to make, for texts that are the same
for every kernel of a family. Importing this module makes it remember them; the kernels are the same.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import lru_cache
from types import CodeType
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.parser import ScriptMacro

_POSITION = frozenset({"lineno", "col_offset", "end_lineno", "end_col_offset"})
_MOST_CODES = 1 << 15
_fields: dict[type, tuple[str, ...]] = {}
_codes: dict[Any, CodeType] = {}
_sources: dict[tuple[str, CodeType], dict[str, Any]] = {}
_read_source, _parse = Source.__init__, Source.as_ast


def _source(self: Source, program: Any) -> None:
    """`Source.__init__`, which finds the text of a function, its file and its module."""
    code = getattr(inspect.unwrap(program), "__code__", None) if callable(program) else None
    if code is None:
        _read_source(self, program)
    elif (known := _sources.get((code.co_filename, code))) is not None:
        self.__dict__.update(known)
    else:
        _read_source(self, program)
        _sources[code.co_filename, code] = dict(self.__dict__)


@lru_cache(1024)
def _parsed(source: str) -> doc.AST:
    return doc.parse(source)


def _as_ast(self: Source) -> doc.AST:
    """`Source.as_ast`. A function within the text is parsed anew: the parser moves its node when it defines it. All else
    that it changes in a tree, the step of a slice that has none, is the same the next time."""
    return _parsed(self.source) if len(re.findall(r"\bdef\b", self.source)) == 1 else _parse(self)


def _parser(self: ScriptMacro) -> Any:
    """`ScriptMacro._find_parser_def` without a record of every frame."""
    frame = sys._getframe(1)
    while frame is not None:
        if (found := frame.f_globals.get(ScriptMacro.parser_object_name)) is not None:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("an inlined function is called outside of a TVMScript function")


def _key(node: Any) -> Any:
    """Equal for nodes that compile to the same code."""
    kind = type(node)
    if kind is list or kind is tuple:
        return kind, *map(_key, node)
    if not isinstance(node, doc.AST):
        return kind, node if kind is str else repr(node)
    if (names := _fields.get(kind)) is None:
        names = _fields[kind] = tuple(name for name in kind._FIELDS if name not in _POSITION)
    return kind, *[_key(getattr(node, name)) for name in names]


def _eval(node: doc.AST, values: dict[str, Any] | None) -> Any:
    """`evaluator._eval_expr`."""
    if (code := _codes.get(key := _key(node))) is None:
        expression = doc.from_doc(node)
        if isinstance(expression, ast.expr):
            expression = ast.Expression(expression)
        if len(_codes) == _MOST_CODES:
            _codes.clear()
        _codes[key] = code = compile(ast.fix_missing_locations(expression), "<ast>", "eval")
    return eval(code, {} if values is None else values)


Source.__init__ = _source  # type: ignore[method-assign]
Source.as_ast = _as_ast  # type: ignore[method-assign]
ScriptMacro._find_parser_def = _parser  # type: ignore[method-assign]
evaluator._eval_expr = _eval
