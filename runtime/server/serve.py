"""`serve`: an engine, its text side and HTTP, from start to a drained end. The CLI and tests start servers here."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from relaxpack.errors import EnvironmentProblem
from relaxpack.runtime.server.app import ServerState, create_app
from relaxpack.runtime.server.http_protocol import DrainingServer
from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.model import ServedModel


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only for sockets that say TCP; with it every answer
    # waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with "
                                 "--host and --port") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(model: ServedModel, limits: Limits, *, api_keys: Sequence[str] = (), allow_origins: Sequence[str] = (),
                log_level: str = "warning", on_ready: Callable[[], None] = lambda: None) -> DrainingServer:
    """The server of a model, not yet running. `on_ready` is called when it listens."""
    app = create_app(model, limits, api_keys=api_keys, allow_origins=allow_origins)
    state: ServerState = app.state.server

    def start_draining() -> None:
        state.draining = True

    def abort() -> None:    # joins the engine's thread, which may be in the middle of a step
        threading.Thread(target=model.engine.close, daemon=True).start()
    return DrainingServer(app, limits, on_drain=start_draining, abort=abort, on_ready=on_ready, log_level=log_level,
                          access_log=False)


def serve(model: ServedModel, listener: socket.socket, limits: Limits, **options: Any) -> None:
    """Serve until a signal, then drain. The engine is closed at the end; runs in the main thread."""
    server = make_server(model, limits, **options)
    try:
        server.run([listener])
    finally:
        listener.close()
        model.engine.close()


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    state: ServerState
    server: DrainingServer

    def stop(self) -> None:
        """As a signal would."""
        self.server.should_exit = True


@contextlib.contextmanager
def background(model: ServedModel, limits: Limits | None = None, **options: Any) -> Iterator[Running]:
    """A server beside this thread, on a free port; drained and closed at the end."""
    ready = threading.Event()
    listener = listen("127.0.0.1", 0)
    server = make_server(model, limits or Limits(), on_ready=ready.set, **options)
    thread = threading.Thread(target=server.run, args=([listener],), name="relaxpack-server", daemon=True)
    thread.start()
    try:
        if not ready.wait(120):
            raise RuntimeError("the server did not start")
        yield Running(url_of(listener), server.config.app.state.server, server)
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        model.engine.close()
