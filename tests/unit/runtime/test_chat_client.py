"""A conversation over HTTP against a small server in this process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import relaxpack.cli as cli
from relaxpack.errors import EnvironmentProblem, RequestError, UsageError
from relaxpack.runtime.chat import QUESTION
from relaxpack.runtime.chat_client import RemoteConversation


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        text = body["messages"][-1]["content"]
        if text == "too long":
            return self._send(400, json.dumps({"error": {"message": "the prompt has 9000 tokens"}}))
        if text == "broken":
            return self._send(500, "<html>oops</html>")
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": piece}}]} for piece in ("Dobrý ", "den ", text)]
        if text == "fails later":
            events[2:] = [{"error": {"message": "out of pages"}}]
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3,
                                                "prompt_tokens_details": {"cached_tokens": 5}}})
        if text == "strange":
            events[2:] = [[1]]
        stream = ": comment\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return self._send(200, stream if text == "dies" else stream + "data: [DONE]\n\n")

    def _send(self, status, text):
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def url(server):
    server.requests.clear()
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_answers_stream_and_history_is_sent(url, server):
    conversation = RemoteConversation(url, system="Be kind.", api_key="secret", sampling={"temperature": 0.5})
    assert conversation.name == "tiny"
    assert list(conversation.ask("x")) == ["Dobrý ", "den ", "x"]
    assert "".join(conversation.ask("y")) == "Dobrý den y"
    path, headers, body = server.requests[1]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["stream"] is True and body["temperature"] == 0.5 and body["model"] == "tiny"
    assert (conversation.timings.prompt_tokens, conversation.timings.cached_tokens) == (7, 5)
    assert conversation.total.output_tokens == 6


def test_url_with_v1_and_a_named_model(url, server):
    conversation = RemoteConversation(url + "/v1/", model="other")
    assert "".join(conversation.ask("x")) and server.requests[0][2]["model"] == "other"


def test_refusals_carry_the_servers_sentence(url):
    conversation = RemoteConversation(url)
    with pytest.raises(RequestError, match="400: the prompt has 9000 tokens"):
        list(conversation.ask("too long"))
    with pytest.raises(RequestError, match="500: <html>oops"):
        list(conversation.ask("broken"))
    with pytest.raises(RequestError, match="out of pages"):
        list(conversation.ask("fails later"))
    assert [m["content"] for m in conversation.messages] == ["fails later", "Dobrý "]


@pytest.mark.parametrize("text, says", [("dies", r"no \[DONE\]"), ("strange", r"no object: +\[1\]")])
def test_half_an_answer_is_none(url, text, says):
    """A server that is killed ends the stream as a whole one ends, only without the last event."""
    with pytest.raises(EnvironmentProblem, match=f"broke off in the middle of the answer: .*{says}"):
        list(RemoteConversation(url).ask(text))


def test_stopping_an_answer_keeps_what_was_said(url):
    conversation = RemoteConversation(url)
    pieces = []
    for piece in conversation.ask("x", lambda: len(pieces) > 0):
        pieces.append(piece)
    assert pieces == ["Dobrý "] and conversation.messages[-1]["content"] == "Dobrý "


def test_nobody_there_and_no_url():
    with pytest.raises(EnvironmentProblem, match="cannot reach http://127.0.0.1:9"):
        RemoteConversation("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="no URL"):
        RemoteConversation("http://")


def test_server_of_another_kind(url):
    with pytest.raises(EnvironmentProblem, match="names no model"):
        RemoteConversation(url + "/other")


def test_the_command_talks_to_a_url(url, server, capsys):
    assert cli.run(["chat", url, "--temperature", "0.5", "--stop", "x", "--system", "Be kind."]) == 0
    out, err = capsys.readouterr()
    assert out == f"Dobrý den {QUESTION}\n" and "3 output tokens" in err
    body = server.requests[0][2]
    assert (body["temperature"], body["stop"], body["max_tokens"]) == (0.5, ["x"], 128)
    assert cli.run(["chat", "http://127.0.0.1:9"]) == 6
    assert capsys.readouterr().err.startswith("relaxpack: cannot reach http://127.0.0.1:9")
