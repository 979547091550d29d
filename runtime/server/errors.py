"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, from ours, pydantic's and Starlette's.

Messages say what is wrong, what was given and what to do; nothing of a stack trace ever leaves the server.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from relaxpack.errors import EnvironmentProblem, RelaxpackError, RequestError
from relaxpack.runtime.async_engine import EngineClosed

_SHOWN = 120        # characters of a wrong value that a message repeats


class ApiError(RelaxpackError):
    """An error that knows its HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None,
                   headers: Mapping[str, str] | None = None) -> Response:
    """An error as OpenAI's API gives them."""
    content = json.dumps(error_body(status, message, param, code), ensure_ascii=False)
    # Broken text of a client (a lone surrogate) must not break the answer about it.
    return Response(content.encode("utf-8", "replace"), status, headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, EnvironmentProblem):
        return ApiError(501, str(error), code="not_available")
    if isinstance(error, RelaxpackError):
        return ApiError(500, str(error))
    return ApiError(500, "an internal error, which is a bug; the server's log has the details", code="internal_error")


def response_to(error: Exception) -> Response:
    api = as_api_error(error)
    return error_response(api.status, str(api), param=api.param, code=api.code, headers=api.headers)


async def on_relaxpack_error(request: Request, error: Exception) -> Response:
    return response_to(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"nothing is at {request.url.path}: /openapi.json lists what is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another")
        message = f"{request.method} is not allowed at {request.url.path}: use {allowed}"
    elif "parsing the body" in message:
        message = "the body is not JSON: it cannot be parsed"
    return error_response(error.status_code, message, headers=error.headers)


async def on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = get_type_hints(request.scope["endpoint"])["body"].model_fields
    param, message = describe(error.errors(), error.body, [field.alias or name for name, field in fields.items()])
    return error_response(400, message, param=param)


def describe(errors: Iterable[Mapping[str, Any]], body: Any, fields: Sequence[str]) -> tuple[str | None, str]:
    """(field, message) of a body that does not fit. Several complaints about one field, as a union makes, become one.
    `fields`: those that the body may have."""
    found: dict[str, list[str]] = {}
    for error in errors:
        name = _name(_path(error["loc"][1:], body, absent=error["type"] in ("missing", "extra_forbidden")))
        if error["type"] == "json_invalid":
            return None, f"the body is not valid JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
        found.setdefault(name, []).append(_complaint(error, name, fields))
    name = max(found, key=lambda n: len(found[n]) == 1)     # the plainest complaint first
    complaints = list(dict.fromkeys(found[name]))
    if not name:
        return None, f"the body must be a JSON object sent with Content-Type: application/json: {complaints[0]}"
    return name, f"{name}: {'; or '.join(complaints[:3])}"


def _path(loc: Iterable[Any], body: Any, absent: bool) -> list[str | int]:
    """The part of a location that leads into the body; the rest names members of unions. `absent`: its end does not."""
    path: list[str | int] = []
    parts, here = list(loc), body
    for number, part in enumerate(parts):
        if (isinstance(here, Mapping) and part in here) or (isinstance(here, list) and isinstance(part, int)
                                                            and part < len(here)):
            path.append(part)
            here = here[part]
        elif absent and number == len(parts) - 1:
            path.append(part)
    return path


def _name(path: list[str | int]) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return name.removeprefix(".")


def _complaint(error: Mapping[str, Any], name: str, fields: Sequence[str]) -> str:
    if error["type"] == "missing":
        return "is required and missing"
    if error["type"] == "extra_forbidden":
        return f"is not a field of this request{_near(name, fields)}"
    message = str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if message.startswith("a valid "):
        message = message.replace("a valid ", "a ", 1).replace("a integer", "an integer")
    given = json.dumps(error.get("input"), ensure_ascii=False, default=str)
    return f"must be {message}, got {given[:_SHOWN]}{'...' if len(given) > _SHOWN else ''}"


def _near(name: str, fields: Sequence[str]) -> str:
    near = [] if "." in name else difflib.get_close_matches(name, fields, n=2)      # `fields` are those at the top
    return f": did you mean {' or '.join(near)}?" if near else ": leave it out; /openapi.json lists the fields"
