"""Clients that read slowly, late or not at all: what they get, who waits for them, and what a shutdown leaves of them."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time

import httpx
import pytest
from starlette.responses import Response

from relaxpack.runtime.server import http_protocol
from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.serve import background
from tests.helpers.server import gate_of, hash_model, scripted_model
from tests.helpers.waiting import DEADLINE, eventually
from tests.unit.server.conftest import read_chunks
from tests.unit.server.raw_client import SLOW, body_of, connections, idle, raw_request

MUCH = {"prompt": [1, 2], "n": 4, "logprobs": 20, "max_tokens": 2000}


def sleeping_reader(server, body=MUCH):
    """Many outputs with log-probabilities: far more than the buffers between us hold."""
    sleeper = socket.socket()
    sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").split(":")
    sleeper.connect((host, int(port)))
    sleeper.sendall(raw_request({"stream": True, **body}, "/v1/completions"))
    return sleeper


def events_of(received):
    """What a chunked answer's events say, as far as [DONE]."""
    parts, rest = [], received.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[:int(size, 16)])
        rest = rest[int(size, 16) + 2:]
    events = b"".join(parts).decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events[:events.index("data: [DONE]")]]


LONG = {"num_pages": 4000, "max_context": 2500, "page_size": 16}


def test_nobody_waits_for_a_reader_that_stops_reading():
    with background(hash_model(**LONG), Limits(write_seconds=3600)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session, sleeping_reader(server):
        eventually(lambda: any(connection.flow.write_paused for connection in connections(server)))
        for _ in range(5):
            assert session.post("/v1/completions", json={"prompt": [3], "max_tokens": 3}).status_code == 200
        eventually(lambda: server.state.counts.in_flight == 1)      # a client sees its answer's end before it is counted
        assert server.state.counts.disconnects == 0


def test_a_reader_of_one_byte_at_a_time_delays_nobody_and_gets_everything():
    """Others are answered between any two of its bytes."""
    with background(hash_model(**LONG), Limits(write_seconds=3600)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session, sleeping_reader(server) as slow:
        slow.settimeout(DEADLINE)
        eventually(lambda: any(connection.flow.write_paused for connection in connections(server)))
        received = b""
        for _ in range(20):
            received += slow.recv(1)
            assert session.post("/v1/completions", json={"prompt": [3], "max_tokens": 3}).status_code == 200
        assert len(received) == 20 and server.state.counts.in_flight >= 1
        while b"data: [DONE]" not in received[-200:]:
            part = slow.recv(1 << 20)
            assert part
            received += part
        assert received.count(b'"finish_reason":"length"') == 4
        eventually(lambda: idle(server))


@pytest.mark.parametrize("body", [{"prompt": [1, 2], "n": 4},
                                  {"prompt": [[1, 2], [3], [4, 5]], "n": 2, "stop": ["never said"]}])
def test_a_reader_that_is_behind_gets_the_same_answer_in_fewer_chunks(body):
    """Several outputs of one prompt, and of several: what waits of each is one chunk."""
    body = {**body, "logprobs": 20, "max_tokens": 300, "seed": 7}
    model = hash_model(**LONG)
    with background(model, Limits(write_seconds=3600)) as server, gate_of(model).held(2) as gate, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session, \
            sleeping_reader(server, {**body, "stream_options": {"include_usage": True}}) as slow:
        slow.settimeout(DEADLINE)
        eventually(lambda: gate.holds)
        [connection] = connections(server)
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        gate.allow(None)
        eventually(lambda: connection.flow.write_paused and model.engine.metrics.running == 0)
        received = b""
        while b"data: [DONE]" not in received[-200:]:
            received += slow.recv(1 << 20)
        whole = session.post("/v1/completions", json=body).json()
    *chunks, last = events_of(received)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [one for one in choices if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for name, column in choice["logprobs"].items():
            assert [entry for one in own for entry in one["logprobs"][name]] == column
        assert max(len(one["logprobs"]["tokens"]) for one in own) == 64


def test_a_reader_that_stops_reading_is_dropped():
    with background(hash_model(**LONG), Limits(write_seconds=0.5)) as server, sleeping_reader(server):
        eventually(lambda: server.state.counts.disconnects == 1 and idle(server))
        assert not connections(server)


def test_a_large_answer_may_take_longer_than_a_reader_that_sleeps():
    """As long as it is read: this one is slower than the limit, but never still."""
    size = 14 << 20
    with background(hash_model(), Limits(write_seconds=1.0)) as server, socket.socket() as slow:
        server.server.config.app.add_route("/large", lambda request: Response(bytes(size)))
        for listener in server.server.servers[0].sockets:       # or the kernel takes megabytes at a time, and then long none
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        host, port = server.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        slow.settimeout(DEADLINE)
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        received = 0
        while received < size:
            part = slow.recv(1 << 16)
            assert part, f"cut off after {received} bytes"
            received += len(part)
            time.sleep(0.01)


def test_a_shutdown_lets_running_answers_finish():
    model = scripted_model(lambda prompt: "word " * 25)
    with background(model, Limits(drain_seconds=DEADLINE)) as server, gate_of(model).held(10) as gate, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        results = []
        threads = [threading.Thread(target=lambda: results.append(
            read_chunks(session.post("/v1/chat/completions", json=body_of(stream=True))))) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.state.counts.in_flight == 3 and gate.holds)
        server.stop()
        eventually(lambda: server.state.draining)
        gate.allow(None)
        for thread in threads:
            thread.join(DEADLINE)
    assert [chunks[-1]["choices"][0]["finish_reason"] for chunks in results] == ["stop"] * 3
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_what_is_left_when_the_drain_ends_is_told_so():
    model = scripted_model(lambda prompt: "word " * 900, **SLOW)
    with background(model, Limits(drain_seconds=0.5)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        with session.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "choices" in next(lines)
            server.stop()
            *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": "the server is shutting down: try again later", "type": "server_error", "param": None,
        "code": "unavailable"}
    assert not model.engine.healthy


def test_a_shutdown_drops_who_does_not_read(monkeypatch, caplog):
    monkeypatch.setattr(http_protocol, "_LAST_WORDS", 1.0)
    with background(hash_model(**LONG), Limits(drain_seconds=0.0)) as server, sleeping_reader(server):
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        eventually(lambda: any(connection.flow.write_paused for connection in connections(server)))
        server.stop()
        eventually(lambda: not connections(server) and server.state.counts.disconnects == 1)
    assert not caplog.text      # nothing has crashed
