"""uvicorn's HTTP/1.1 protocol with the time limits it lacks, and a server that drains when it is told to stop.

A client that never finishes its headers, or never reads its answer, holds a connection for a bounded time only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from relaxpack.runtime.server.limits import Limits

_LAST_WORDS = 5.0       # seconds that a client has to read why its answer ended with the server


def protocol_with(limits: Limits) -> type[H11Protocol]:
    """uvicorn's protocol with the timeouts of `limits`: for the head of a request, and for a client that does not read."""

    class TimedProtocol(H11Protocol):
        """Timers only exist while something is awaited from the client."""

        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _unread = 0         # bytes of the send buffer when that timer began

        def connection_made(self, transport: asyncio.Transport) -> None:    # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                if self.cycle is None or self.cycle.response_complete:
                    self._await_head()
            elif self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._head_timer, self._write_timer):
                if timer is not None:
                    timer.cancel()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._write_timer is None:
                self._await_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.header_seconds, self._head_is_late)

        def _await_reader(self) -> None:
            self._unread = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(limits.write_seconds, self._reader_is_late)

        def _reader_is_late(self) -> None:
            """A large answer may take longer, as long as a send buffer's worth of it is read each time."""
            _, high = self.transport.get_write_buffer_limits()
            if self._unread - self.transport.get_write_buffer_size() < high:
                self.transport.abort()
            else:
                self._await_reader()

        def _head_is_late(self) -> None:
            self._head_timer = None
            # Between two requests the keep-alive timer is in charge; bytes of a half-sent head are not nothing.
            idle = self.cycle is not None and self.cycle.response_complete and not self.conn.trailing_data[0]
            if self.conn.their_state is h11.IDLE and not idle and not self.transport.is_closing():
                self.transport.abort()

    return TimedProtocol


class DrainingServer(uvicorn.Server):
    """On SIGTERM, SIGHUP or SIGINT: no new connections; running answers may finish; what is left after `drain_seconds` is
    aborted by `abort` and told so. A second SIGINT ends at once. Ends with exit code 0."""

    def __init__(self, app: Any, limits: Limits, *, on_drain: Callable[[], None], abort: Callable[[], None],
                 on_ready: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__(uvicorn.Config(
            app, http=protocol_with(limits), ws="none", lifespan="on", timeout_keep_alive=30, server_header=False,
            timeout_graceful_shutdown=int(limits.drain_seconds + 2 * _LAST_WORDS), h11_max_incomplete_event_size=64 << 10,
            **options))
        self._drain_seconds, self._on_drain, self._abort, self._on_ready = limits.drain_seconds, on_drain, abort, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_drain()
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self._drain_seconds, self._abort),
                  loop.call_later(self._drain_seconds + _LAST_WORDS, self._drop_connections)]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _drop_connections(self) -> None:
        """Of clients that do not read: uvicorn would cancel their answers later, and log each as a crash."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:                  # whatever runs is cancelled now, and uvicorn logs each as a crash
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but a signal that was served is not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A terminal that closes says SIGHUP, where nohup does not keep it away: an exception amid requests would end none.
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
