"""Requests as bytes on a socket, for clients that no library would be, and what the server knows of them."""

from __future__ import annotations

import json
import socket

from tests.helpers.waiting import DEADLINE

SLOW = {"delay": 0.01, "max_context": 4000}     # half a minute for 700 words


def body_of(text="hi", **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def raw_request(body, path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            .encode() + data)


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def read_until(connection, words):
    received = b""
    while words not in received:
        part = connection.recv(65536)
        assert part, received
        received += part


def connections(server):
    return list(server.server.server_state.connections)


def idle(server):
    metrics = server.state.model.engine.metrics
    return metrics.running == 0 and metrics.waiting == 0 and metrics.pages_held == 0 and server.state.counts.in_flight == 0
