"""API keys: which paths need one, and who a request belongs to. Keys are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from relaxpack.runtime.server.errors import error_response

PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/metrics")     # the page, its files and /health are for everybody


class AuthMiddleware:
    """Without keys everybody is let in. With several, each key has a prefix cache of its own: what is cached shows in
    response times, and one tenant must not learn another's prompts from them."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"].startswith(PROTECTED) and scope["method"] != "OPTIONS":
            # Starlette reads headers as Latin-1; keys are compared as the bytes that were sent.
            kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            key = next((k for k in self._keys if hmac.compare_digest(k, given.strip().encode("latin-1"))), None)
            if kind.lower() != "bearer" or key is None:
                message = "the API key is wrong: check it" if given else \
                    "an API key is needed: send it as 'Authorization: Bearer KEY'"
                response = error_response(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
            if len(self._keys) > 1:
                scope.setdefault("state", {})["tenant"] = hashlib.sha256(key).hexdigest()[:16] + ":"
        await self._app(scope, receive, send)
