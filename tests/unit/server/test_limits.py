"""What clients may take and what happens when they leave: keys, sizes, times, numbers, disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading

import httpx
import pytest

from relaxpack.runtime.server import limits, stream
from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.serve import background
from tests.helpers.server import gate_of, hash_model, last_question, scripted_model
from tests.helpers.waiting import DEADLINE, eventually
from tests.unit.server.conftest import error_of
from tests.unit.server.raw_client import SLOW, body_of, connect, connections, idle, raw_request, read_until


def test_api_keys_guard_everything_but_the_page_and_health():
    with background(scripted_model(last_question), api_keys=["secret-1", "schlüssel-2"]) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        assert session.get("/health").status_code == 200 and session.get("/").status_code == 200
        for path in ("/v1/models", "/metrics"):
            error = error_of(session.get(path), 401)
            assert error["code"] == "invalid_api_key" and "Authorization: Bearer" in error["message"]
        for value in (b"Bearer wrong", b"Bearer", b"Basic secret-1", b"secret-1", b"Bearer secret-1x"):
            error_of(session.post("/v1/chat/completions", json=body_of(), headers={"Authorization": value}), 401)
        for key in ("secret-1", "schlüssel-2"):
            header = {"Authorization": f"Bearer {key}".encode()}
            assert session.post("/v1/chat/completions", json=body_of(), headers=header).status_code == 200


def test_tenants_do_not_share_cached_prefixes():
    long = "words that fill some pages of the prefix cache, again and again and again"
    with background(scripted_model(last_question), api_keys=["a", "b"]) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        def cached(key):
            answer = session.post("/v1/chat/completions", json=body_of(long, max_tokens=1),
                                  headers={"Authorization": f"Bearer {key}"})
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert [cached("a"), cached("b")] == [0, 0] and cached("a") > 0 and cached("b") > 0


def test_other_origins_are_let_in_only_when_named():
    with background(scripted_model(last_question), allow_origins=["https://ours.example"]) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        ours = session.get("/v1/models", headers={"Origin": "https://ours.example"})
        assert ours.headers["access-control-allow-origin"] == "https://ours.example"
        theirs = session.get("/v1/models", headers={"Origin": "https://theirs.example"})
        assert "access-control-allow-origin" not in theirs.headers


def test_bodies_that_are_too_large_are_refused_with_the_limit(monkeypatch):
    monkeypatch.setattr(limits, "_DRAIN_SECONDS", DEADLINE)
    with background(scripted_model(last_question), Limits(max_body_bytes=10_000)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        large = body_of("x" * 20_000)
        error = error_of(session.post("/v1/chat/completions", json=large), 413)
        assert "10000" in error["message"] and error["code"] == "request_too_large"
        chunked = (json.dumps(large).encode()[i:i + 1000] for i in range(0, 21_000, 1000))
        response = session.post("/v1/chat/completions", content=chunked, headers={"Content-Type": "application/json"})
        error_of(response, 413)
        whole = json.dumps(large).encode()
        at_once = b"%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole)
        with connect(server) as connection:     # nothing is left to wait for
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                               b"Transfer-Encoding: chunked\r\n\r\n" + at_once)
            read_until(connection, b" 413 ")
        assert session.post("/v1/chat/completions", json=body_of()).status_code == 200


def test_small_answers_do_not_wait_for_acknowledgements():
    """Nagle's algorithm on the server's side would add 40 ms to each."""
    with background(scripted_model(last_question)) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        assert session.post("/tokenize", json={"prompt": "hi"}).status_code == 200
        [connection] = connections(server)
        ours = connection.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_above_the_limit_are_told_to_come_back():
    model = scripted_model(lambda prompt: "word " * 50)
    with background(model, Limits(max_concurrent=2)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        held = [connect(server) for _ in range(2)]
        with gate_of(model).held(10):
            for connection in held:
                connection.sendall(raw_request(body_of(stream=True)))
            eventually(lambda: server.state.counts.in_flight == 2)
            response = session.post("/v1/chat/completions", json=body_of())
            assert error_of(response, 429)["code"] == "too_many_requests" and response.headers["retry-after"] == "1"
            assert session.get("/v1/models").status_code == 200
            for connection in held:
                connection.close()
        eventually(lambda: idle(server))
        assert session.post("/v1/chat/completions", json=body_of(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back_within_two_steps(stream):
    model = scripted_model(lambda prompt: "word " * 100)
    metrics = model.engine.metrics
    with background(model) as server, gate_of(model).held(8) as gate:
        connection = connect(server)
        connection.sendall(raw_request(body_of(stream=stream, n=2)))
        eventually(lambda: gate.holds)
        if stream:
            read_until(connection, b'"content":"w')
        assert metrics.output_tokens > 6 and metrics.pages_held > 0
        connection.close()
        eventually(lambda: model.engine._commands)      # the news waits for the end of the step that runs
        steps = metrics.steps
        gate.allow(2)
        eventually(lambda: metrics.pages_held == 0 or gate.holds)
        assert metrics.pages_held == 0 and metrics.steps - steps <= 2 and metrics.finished == {"abort": 2}
        eventually(lambda: idle(server) and server.state.counts.disconnects == 1)


def test_a_disconnect_before_the_first_token_is_noticed_too():
    model = scripted_model(lambda prompt: "x")
    with background(model) as server:
        with gate_of(model).held(1) as gate:        # of several chunks of the prompt
            connection = connect(server)
            connection.sendall(raw_request(body_of("long " * 100)))
            eventually(lambda: gate.holds and model.engine.metrics.running == 1)
            connection.close()
            eventually(lambda: model.engine._commands)
        eventually(lambda: idle(server))
        assert model.engine.metrics.finished == {"abort": 1} and model.engine.metrics.output_tokens == 0


def test_answers_that_take_too_long_are_ended_with_the_limit(monkeypatch):
    with background(scripted_model(lambda prompt: "word " * 700, **SLOW), Limits(request_seconds=0.3)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        error = error_of(session.post("/v1/chat/completions", json=body_of()), 504)
        assert error["code"] == "timeout" and "0.3 seconds" in error["message"]
        time_is_up, begun = stream.GenerationResponse._time_is_up, threading.Event()

        def not_before_it_has_begun(response):      # a slow machine may take 0.3 seconds for the first token
            if begun.is_set():
                time_is_up(response)
            else:
                asyncio.get_running_loop().call_later(0.01, not_before_it_has_begun, response)
        monkeypatch.setattr(stream.GenerationResponse, "_time_is_up", not_before_it_has_begun)
        with session.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as response:
            lines = (line for line in response.iter_lines() if line)
            assert response.status_code == 200 and all("choices" in next(lines) for _ in range(4))
            begun.set()
            *_, last, done = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout" and done == "data: [DONE]"
        eventually(lambda: idle(server))


def half_sent(server):
    """Connections that send nothing, half a head, a head and half a body, half a head behind a good request."""
    whole = raw_request(body_of())
    body = connect(server)
    body.sendall(whole[:-5])
    second = connect(server)
    second.sendall(whole)
    read_until(second, b"200 OK")
    second.sendall(whole[:30])
    silent, head = connect(server), connect(server)
    head.sendall(whole[:30])
    return silent, head, body, second


def test_half_sent_requests_disturb_nobody():
    """However long they take: nobody waits for their end."""
    with background(scripted_model(last_question), Limits(header_seconds=3600, body_seconds=3600)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        stalled = half_sent(server)
        eventually(lambda: len(connections(server)) == 4)
        for _ in range(3):
            assert session.post("/v1/chat/completions", json=body_of()).status_code == 200
        assert len(connections(server)) == 5
        for connection in stalled:
            connection.close()
        eventually(lambda: len(connections(server)) == 1)


def test_half_sent_requests_are_cut_off():
    with background(scripted_model(last_question), Limits(header_seconds=2.0, body_seconds=1.0)) as server:
        silent, head, body, second = half_sent(server)
        read_until(body, b" 408 ")
        for connection in (silent, head, second):
            try:
                while connection.recv(65536):
                    pass
            except ConnectionResetError:
                pass
        for connection in (silent, head, body, second):
            connection.close()
        eventually(lambda: not connections(server))


def test_a_failing_model_is_an_error_and_the_server_goes_on():
    model = hash_model()
    with background(model) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        runner = model.engine._engine.runner
        for stream in (False, True):
            runner.fail_next = RuntimeError("no more memory")
            response = session.post("/v1/completions", json={"prompt": [1, 2], "stream": stream, "max_tokens": 4})
            error = error_of(response, 500)         # also for a stream: nothing was sent yet
            assert "no more memory" in error["message"] and error["code"] == "generation_failed"
        assert session.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 4}).status_code == 200
        model.engine.close()
        assert session.get("/health").status_code == 503
        error = error_of(session.post("/v1/completions", json={"prompt": [1]}), 503)
        assert "shutting down" in error["message"]


def test_a_long_wait_for_the_first_token_sends_comments(monkeypatch):
    """So that no proxy gives up; clients skip comments."""
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.05)
    model = hash_model()
    with background(model) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        def after_two_comments():
            """The lines that come once the model goes on."""
            body = {"prompt": [1, 2], "max_tokens": 3, "stream": True, "temperature": 0}
            with gate_of(model).held(0) as gate, session.stream("POST", "/v1/completions", json=body) as response:
                lines = (line for line in response.iter_lines() if line)
                assert [next(lines), next(lines)] == [": waiting"] * 2
                gate.allow(None)
                return [line for line in lines if line != ": waiting"]
        *events, done = after_two_comments()
        assert done == "data: [DONE]" and all(json.loads(e.removeprefix("data: "))["choices"] for e in events) and events
        # A failure after the headers went out is an event, as the status can no longer say it.
        model.engine._engine.runner.fail_next = RuntimeError("no more memory")
        event, done = after_two_comments()
        assert done == "data: [DONE]"
        assert "no more memory" in json.loads(event.removeprefix("data: "))["error"]["message"]


def test_a_bug_of_ours_shows_no_stack_trace(monkeypatch, caplog):
    model = scripted_model(last_question)
    monkeypatch.setattr(model.template, "encode", lambda *a, **k: 1 / 0)
    with background(model) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        error = error_of(session.post("/v1/chat/completions", json=body_of()), 500)
        assert error["code"] == "internal_error" and "division" not in error["message"]
        assert "ZeroDivisionError" in caplog.text       # but the log has it
        assert session.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01" * 20, b"GET\r\n\r\n",
                                     b"POST /v1/completions HTTP/9.9\r\n\r\n",
                                     b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"\r\n" * 1000,
                                     b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                                     b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"])
def test_what_is_not_http_disturbs_nobody(scripted, garbage):
    with connect(scripted) as connection:
        connection.settimeout(5)
        try:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except OSError:
            answer = b""
    assert b" 200 " not in answer and b"Traceback" not in answer
    assert httpx.get(f"{scripted.url}/health").status_code == 200
