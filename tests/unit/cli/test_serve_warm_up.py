"""`relaxpack serve` on a GPU, over stand-ins: graphs are captured before the server answers anybody, what that took is
said, and it can be left out.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

import relaxpack.llm
import relaxpack.runtime.server.serve as server_module
from relaxpack.cli import run
from relaxpack.llm import LLM
from relaxpack.runtime.cuda_model_runner import WarmUp
from relaxpack.runtime.device_plan import Comparison, DevicePlan
from relaxpack.runtime.load import LoadReport
from tests.helpers.server import hash_model
from tests.helpers.waiting import DEADLINE

PLAN = DevicePlan(16 << 30, 40 << 30, 1 << 30, 1 << 24, 1 << 30, 5000, 80000, 139 << 30)


class Loaded:
    """A model that was loaded onto a GPU; `during` happens while its graphs are captured."""

    def __init__(self, during: Callable[[], None]) -> None:
        self.report = LoadReport("cuda:sm_90a", 16 << 30, {"weights": 2.0, "library": 0.5}, PLAN)
        self.during, self.warmed = during, 0

    def warm_up(self, progress: Callable[[int, int], None]) -> WarmUp:
        self.warmed += 1
        progress(1, 2)
        self.during()
        progress(2, 2)
        return WarmUp(2, 0.25, 120_000_000, 100_000_000)

    def compare_plan(self) -> Comparison:
        return Comparison(1000, 1010)


def serving(monkeypatch: pytest.MonkeyPatch, loaded: Loaded, arguments: list[str],
            talk: Callable[[tuple[str, int]], None]) -> int:
    """Run the command in a thread; `talk` gets the address once the socket listens. Gives the exit code."""
    model = hash_model()
    llm = LLM.from_engine(model.engine._engine, model.tokenizer)
    llm.loaded = loaded  # type: ignore[assignment]
    monkeypatch.setattr(relaxpack.llm, "LLM", lambda *_, **__: llm)
    listening, running, made = threading.Event(), threading.Event(), dict[str, Any]()
    listen, make = server_module.listen, server_module.make_server

    def note_listener(host: str, port: int) -> socket.socket:
        made["address"] = (found := listen(host, port)).getsockname()
        listening.set()
        return found

    def note_server(*given: Any, **options: Any) -> Any:
        made["server"] = make(*given, **options)
        running.set()
        return made["server"]

    monkeypatch.setattr(server_module, "listen", note_listener)
    monkeypatch.setattr(server_module, "make_server", note_server)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(["serve", *arguments, "--port", "0"])))
    thread.start()
    assert listening.wait(DEADLINE)
    talk(made["address"])
    assert running.wait(DEADLINE)
    made["server"].should_exit = True
    thread.join(DEADLINE)
    return codes[0]


def ask_health(address: tuple[str, int]) -> socket.socket:
    asking = socket.create_connection(address, DEADLINE)
    asking.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return asking


def test_health_answers_only_after_the_graphs_are_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    asked, captured = threading.Event(), threading.Event()
    before: list[bytes] = []

    def during() -> None:
        assert asked.wait(DEADLINE)
        waiting[0].settimeout(0.2)
        try:
            before.append(waiting[0].recv(1))
        except TimeoutError:
            before.append(b"")
        captured.set()

    waiting: list[socket.socket] = []

    def talk(address: tuple[str, int]) -> None:
        waiting.append(ask_health(address))
        asked.set()
        assert captured.wait(DEADLINE)
        waiting[0].settimeout(DEADLINE)
        answer = b""
        with waiting[0]:
            while part := waiting[0].recv(4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200") and b'"status":"ok"' in answer

    loaded = Loaded(during)
    assert serving(monkeypatch, loaded, [str(tmp_path)], talk) == 0
    assert before == [b""] and loaded.warmed == 1
    err = capsys.readouterr().err
    for said in ("cuda:sm_90a: 17.18 GB of weights copied at 8.6 GB/s (weights 2.00 s, library 0.50 s)",
                 "GPU memory: weights 17.18, KV cache of 80000 tokens 42.95, arena 1.07", "of 149.25 GB",
                 "captured 2 graphs in 0.2 s and 20 MB beside the arena of 100 MB; the driver says", "(+1.0 %)"):
        assert said in err, err
    assert err.index("captured 2 graphs") < err.index("serving ")


def test_capturing_can_be_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    loaded = Loaded(lambda: None)

    def talk(address: tuple[str, int]) -> None:
        with ask_health(address) as asking:
            asking.settimeout(DEADLINE)
            assert asking.recv(15).startswith(b"HTTP/1.1 200")

    assert serving(monkeypatch, loaded, [str(tmp_path), "--no-warm-up"], talk) == 0
    assert loaded.warmed == 0 and "captured" not in capsys.readouterr().err
