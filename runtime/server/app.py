"""`create_app`: the routes. The server translates between HTTP and the engine, and does nothing more.

It runs over any `AsyncEngine`, so most tests need no model. Who starts the engine also closes it; see `serve.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from relaxpack import __version__
from relaxpack.errors import RelaxpackError, RequestError
from relaxpack.runtime.server import errors
from relaxpack.runtime.server import responses as answers_doc
from relaxpack.runtime.server.answers import ChatOutput, CompletionOutput, Head, Output
from relaxpack.runtime.server.auth import AuthMiddleware
from relaxpack.runtime.server.embeddings import EmbeddingResponse, embedding_job
from relaxpack.runtime.server.limits import HttpCounts, Limits, LimitsMiddleware
from relaxpack.runtime.server.model import ServedModel
from relaxpack.runtime.server.prometheus import CONTENT_TYPE, metrics_text
from relaxpack.runtime.server.protocol import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from relaxpack.runtime.server.stream import GenerationResponse
from relaxpack.runtime.server.translate import Job, chat_job, completion_job, plain_message

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The page shows text that a model wrote: nothing but our own files may run or load.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_ERROR_STATUSES = (400, 401, 404, 408, 413, 429, 500, 501, 503, 504)


@dataclass
class ServerState:
    model: ServedModel
    limits: Limits
    counts: HttpCounts = field(default_factory=HttpCounts)
    draining: bool = False


def create_app(model: ServedModel, limits: Limits | None = None, *, api_keys: Sequence[str] = (),
               allow_origins: Sequence[str] = ()) -> FastAPI:
    """`allow_origins`: origins of other web pages that may use the API from a browser."""
    state = ServerState(model, limits or Limits())
    app = FastAPI(title="relaxpack", version=__version__, docs_url=None, redoc_url=None,
                  description="OpenAI-compatible server of one relaxpack bundle.", separate_input_output_schemas=False)
    app.state.server = state
    _add_generation(app, state)
    _add_text(app, state)
    _add_information(app, state)
    _add_page(app)
    app.add_exception_handler(RelaxpackError, errors.on_relaxpack_error)
    app.add_exception_handler(RequestValidationError, errors.on_invalid_body)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    paths = frozenset(path for path in (getattr(route, "path", "") for route in app.routes) if "{" not in path)
    app.add_middleware(LimitsMiddleware, limits=state.limits, counts=state.counts, known_paths=paths)
    app.add_middleware(AuthMiddleware, keys=api_keys)
    if allow_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(allow_origins), allow_methods=["GET", "POST"],
                           allow_headers=["Authorization", "Content-Type"])
    return app


def _documented(model: Any, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its answer, and every error in OpenAI's shape."""
    ok: dict[str, Any] = {"model": model}
    if streams:
        ok["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
        ok["description"] = "The answer; with `stream` server-sent events that end with [DONE]."
    return {200: ok, **{status: {"model": answers_doc.ErrorBody} for status in _ERROR_STATUSES}}


def _tenant(request: Request) -> str:
    return str(request.scope.get("state", {}).get("tenant", ""))


def _add_generation(app: FastAPI, state: ServerState) -> None:
    model = state.model

    async def answer(make: Callable[[], Job], head: Head, whole_kind: str,
                     output_of: Callable[[int, Job], Output]) -> Response:
        job = await run_in_threadpool(lambda: make().submit(model))
        outputs = [output_of(index, job) for index in range(len(job.prompts) * job.params.n)]
        return GenerationResponse(job, head, outputs, whole_kind=whole_kind, timeout=state.limits.request_seconds,
                                  draining=lambda: state.draining)

    @app.post("/v1/chat/completions", response_model=None, responses=_documented(answers_doc.ChatCompletion, True))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await answer(lambda: chat_job(body, model, _tenant(request)),
                            Head("chatcmpl", "chat.completion.chunk", model.name), "chat.completion",
                            lambda index, job: ChatOutput.of(index, job, model.tokenizer))

    @app.post("/v1/completions", response_model=None, responses=_documented(answers_doc.Completion, True))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue raw prompts."""
        return await answer(lambda: completion_job(body, model, _tenant(request)),
                            Head("cmpl", "text_completion", model.name), "text_completion",
                            lambda index, job: CompletionOutput.of(index, job, model.tokenizer))


    @app.post("/v1/embeddings", response_model=None, responses=_documented(answers_doc.EmbeddingList))
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Last hidden states of texts, pooled; for bundles built with --embeddings."""
        job = await run_in_threadpool(lambda: embedding_job(body, model, _tenant(request)))
        return EmbeddingResponse(job, model, timeout=state.limits.request_seconds, draining=lambda: state.draining)


def _add_text(app: FastAPI, state: ServerState) -> None:
    model = state.model

    @app.post("/tokenize", response_model=None, responses=_documented(answers_doc.Tokenized))
    def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text, or of a conversation in the model's chat template."""
        model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.messages is not None:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            ids = model.template.encode([plain_message(m) for m in body.messages], tools=tools or None,
                                        add_generation_prompt=body.add_generation_prompt is not False)
        else:
            ids = model.tokenizer.encode(body.prompt or "", add_bos=body.add_special_tokens)
        strings = [model.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": model.engine.max_tokens,
                             "token_strs": strings})

    @app.post("/detokenize", response_model=None, responses=_documented(answers_doc.Detokenized))
    def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids."""
        model.check_name(body.model)
        last = model.tokenizer.vocab_size - 1
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id <= last), None)
        if wrong is not None:
            raise RequestError(f"tokens has the id {wrong}, but ids go from 0 to {last}", "tokens")
        return JSONResponse({"prompt": model.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens),
                                                              continuation=True)})


def _add_information(app: FastAPI, state: ServerState) -> None:
    model = state.model

    @app.get("/v1/models", response_model=None, responses={200: {"model": answers_doc.ModelList},
                                                           401: {"model": answers_doc.ErrorBody}})
    def models() -> Response:
        """The model served here."""
        return JSONResponse({"object": "list", "data": [model.describe()]})

    @app.get("/v1/models/{name:path}", response_model=None, responses=_documented(answers_doc.ModelCard))
    def one_model(name: str) -> Response:
        model.check_name(name)
        return JSONResponse({**model.describe(), "id": name})

    @app.get("/health", response_model=None, responses={200: {"model": answers_doc.Health},
                                                        503: {"model": answers_doc.Health}})
    def health() -> Response:
        """200 while requests are taken, 503 while the server shuts down or after the engine failed."""
        metrics = model.engine.metrics
        status = "draining" if state.draining else "ok" if model.engine.healthy else "failed"
        return JSONResponse({"status": status, "model": model.name, "running": metrics.running, "waiting": metrics.waiting},
                            200 if status == "ok" else 503)

    @app.get("/metrics", response_model=None, responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."},
        401: {"model": answers_doc.ErrorBody}})
    def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(metrics_text(model.engine.metrics, state.counts, model.name), headers={"Content-Type": CONTENT_TYPE})


def _add_page(app: FastAPI) -> None:
    """The chat page: files of this package, read once."""
    folder = files("relaxpack.runtime.server") / "static"
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        kind = _KINDS.get(item.name.rpartition(".")[2])
        if kind is None:
            continue
        content = item.read_bytes()

        def page(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers=_PAGE_HEADERS)
        paths = ["/"] if item.name == "index.html" else [f"/static/{item.name}"]
        if item.name == "favicon.svg":
            paths.append("/favicon.ico")   # where a browser looks on pages that name none: /docs, /health
        for path in paths:
            # A closure's default arguments would look like query parameters to FastAPI.
            app.add_route(path, _without_parameters(page), methods=["GET", "HEAD"], include_in_schema=False)


def _without_parameters(page: Callable[[], Response]) -> Callable[[Request], Any]:
    async def handler(request: Request) -> Response:
        return page()
    return handler
