"""`/v1/embeddings`: from its body to requests of the engine, and from their pooled hidden states to the answer.

Inputs of one body are requests of their own, batched with whatever else the engine does. No more than a batch of them are
given to the engine at once, so that others are not kept waiting behind thousands; leaving the connection cancels them.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from starlette.responses import Response
from starlette.types import Send

from relaxpack.errors import RelaxpackError, RequestError
from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.pooling import EmbeddingParams
from relaxpack.runtime.request import Request
from relaxpack.runtime.request_stream import Piece, RequestStream
from relaxpack.runtime.server.errors import ApiError, response_to
from relaxpack.runtime.server.model import ServedModel
from relaxpack.runtime.server.protocol import EmbeddingBody
from relaxpack.runtime.server.stream import EngineResponse
from relaxpack.runtime.server.translate import prompt_ids

MOST_INPUTS = 2048      # of one body, as OpenAI's API has it


@dataclass
class EmbeddingJob:
    """The inputs of one body, and their embeddings as they come."""

    prompts: list[list[int]]
    params: EmbeddingParams
    base64: bool
    salt: str
    done: dict[int, Request] = field(default_factory=dict)      # by place in `prompts`
    cancelled: bool = False
    _running: set[RequestStream] = field(default_factory=set)

    async def run(self, engine: AsyncEngine) -> Piece | None:
        """Compute all of them; the end of the first one that failed or was cancelled. Raises EngineClosed."""
        left = iter(enumerate(self.prompts))
        failed: list[Piece] = []

        async def worker() -> None:
            for number, ids in left:
                if self.cancelled:
                    failed.append(Piece(0, finish_reason="abort"))
                    return
                stream = engine.submit_embedding(ids, self.params, salt=self.salt)
                self._running.add(stream)
                [end] = await stream.collect_async()
                self._running.discard(stream)
                if end.finish_reason != "stop":
                    failed.append(end)
                    self.cancel()
                    return
                self.done[number] = stream.request

        workers = [asyncio.ensure_future(worker()) for _ in range(min(engine.max_batch, len(self.prompts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            self.cancel()
            for task in workers:
                task.cancel()
        return failed[0] if failed else None

    def cancel(self) -> None:
        self.cancelled = True
        for stream in self._running:
            stream.cancel()


def embedding_job(body: EmbeddingBody, model: ServedModel, tenant: str = "") -> EmbeddingJob:
    """A body of /v1/embeddings, checked. Raises RequestError or ApiError with the field that is wrong."""
    model.check_name(body.model)
    if not model.engine.embedding_size:
        raise RequestError("the bundle served here has no function for embeddings: build one with `relaxpack build "
                           "--embeddings` (or --embeddings-only) and serve that", "model")
    params = EmbeddingParams(pooling=body.pooling or "last", dimensions=body.dimensions,
                             normalize=body.normalize is not False)
    params.check_size(model.engine.embedding_size)
    prompts = prompt_ids(body.input, model, body.add_special_tokens, "input")
    if len(prompts) > MOST_INPUTS:
        raise RequestError(f"input has {len(prompts)} entries, at most {MOST_INPUTS} are allowed in one request: send "
                           "several", "input")
    limit, last = model.engine.max_tokens, model.tokenizer.vocab_size - 1
    for number, ids in enumerate(prompts):
        name = "input" if len(prompts) == 1 else f"input[{number}]"
        if not ids:
            raise RequestError(f"{name} is empty: it needs at least one token", "input")
        if len(ids) > limit:
            raise ApiError(400, f"{name} has {len(ids)} tokens, but this model's context holds {limit}: shorten it by "
                                f"{len(ids) - limit}", param="input", code="context_length_exceeded")
        if not 0 <= min(ids) <= max(ids) <= last:
            wrong = next(token_id for token_id in ids if not 0 <= token_id <= last)
            raise RequestError(f"{name} has the token id {wrong}, but ids go from 0 to {last}", "input")
    return EmbeddingJob(prompts, params, body.encoding_format == "base64", tenant + (body.cache_salt or ""))


class EmbeddingResponse(EngineResponse):
    def __init__(self, job: EmbeddingJob, model: ServedModel, *, timeout: float | None = None,
                 draining: Callable[[], bool] = lambda: False) -> None:
        super().__init__(job, timeout, draining)
        self._job, self._model = job, model

    async def _answer(self, send: Send, gone: Callable[[], bool]) -> Response | None:
        try:
            failed = await self._job.run(self._model.engine)
        except RelaxpackError as error:
            return response_to(error)
        if failed is not None and (why := self._error(failed)) is not None:
            return response_to(why)
        parts: list[bytes] = []
        for index in range(len(self._job.prompts)):
            embedding = self._job.done[index].embedding
            assert embedding is not None
            item = {"object": "embedding", "index": index, "embedding": self._encoded(embedding)}
            parts.append(json.dumps(item, separators=(",", ":")).encode())
            await asyncio.sleep(0)      # thousands of numbers each: others have their turn in between
        prompt = sum(map(len, self._job.prompts))
        cached = sum(request.cached_tokens or 0 for request in self._job.done.values())
        rest = json.dumps({"model": self._model.name, "usage": {
            "prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}})
        body = b'{"object":"list","data":[' + b",".join(parts) + b"]," + rest[1:].encode()
        return Response(body, media_type="application/json")

    def _encoded(self, embedding: np.ndarray) -> list[float] | str:
        if self._job.base64:
            return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        values: list[float] = embedding.tolist()
        return values
